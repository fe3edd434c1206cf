"""Carries a routing decision out: prefill where it says, move the KV, and fall back to a local prefill."""

import asyncio
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from prfaas.core.deployment import Deployment
from prfaas.core.scheduling import Decision, NoDecodeInstanceError, Route
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.control_plane import PrefillWork
from prfaas.serving.gateway.egress_bill import EgressBill
from prfaas.serving.gateway.kv_transfer import MovedPrefix, StartedTransfer, TransferDone, TransferSpec
from prfaas.serving.gateway.prefill_hop import INCOMPATIBLE, HopFailedError, PrefillHop
from prfaas.serving.gateway.prefix_moves import PrefixMoves
from prfaas.serving.gateway.prompts import DirectPrompt
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.request_log import Attempt, WaitsFor

# Prefills elsewhere that one request may try before its decode engine prefills.
_PREFILL_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class _RemotePrefill:
    """A prefill elsewhere whose instance is taken."""

    request: ServingRequest
    prompt: TokenizedPrompt
    attempt: Attempt
    moved: MovedPrefix
    """What the prefill may start from."""
    wanted: str
    """The instance that it was moved to."""
    work: PrefillWork
    stack: AsyncExitStack
    """Gives the instance back."""


class PrefillOrchestrator:
    """Makes requests ready for their decode engines."""

    def __init__(
        self, deployment: Deployment, hop: PrefillHop, prefixes: PrefixMoves, context: GatewayContext
    ) -> None:
        self._hop = hop
        self._prefixes = prefixes
        self._plane = context.plane
        self._metrics = context.metrics
        self._bill = EgressBill(deployment, context.metrics)
        self.adopt(deployment)

    def adopt(self, deployment: Deployment) -> None:
        """Prefill with these instances from now on."""
        self._lead_s = deployment.transfer.decode_lead_s
        self._bill.adopt(deployment)
        self._staging_bytes = {
            instance.name: deployment.engine.staging_bytes * instance.tensor_parallel
            for instance in deployment.instances
        }

    async def prepare(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt | DirectPrompt,
        decision: Decision,
        avoid: Collection[str] = (),
    ) -> PreparedRequest:
        """Prefill the prompt where `decision` says, and have its KV at the decode engine, or nearly.

        A prefill that fails is tried once more inside the PD cluster. After that the decode engine prefills: this
        never raises for a failed prefill.

        Args:
            avoid: instances that have failed this request.
        """
        if isinstance(prompt, DirectPrompt):
            return self._direct(request, decision, prompt.reason)
        num_tokens = len(prompt.token_ids)
        if decision.reason == INCOMPATIBLE:
            self._note_rejections(request, decision.decode)
        failed = set(avoid)
        fallback: str | None = None
        for _ in range(_PREFILL_ATTEMPTS):
            if not decision.transfers:
                moved = MovedPrefix(decision)
                if decision.cache_transfer is not None and decision.cache_transfer.from_pool:
                    moved = await self._prefixes.move(request, prompt, decision)
                local = self._at_decode(request, prompt, moved.decision, decision.reason, fallback)
                return replace(local, prefix=moved)
            if decision.kv_bytes > self._staging_bytes[decision.decode]:
                return self._at_decode(request, prompt, decision, "staging", fallback)
            attempt = request.record.start(decision, num_tokens)
            try:
                prepared = await self._begin_remote(request, prompt, attempt)
            except HopFailedError as failure:
                fallback = failure.reason
                request.record.fell_back(attempt, fallback)
                self._metrics.fallbacks.labels(fallback).inc()
                if failure.hopeless:
                    break
                failed.add(attempt.decision.prefill)
                try:
                    # Never to another remote cluster: the client has waited enough.
                    decision = self._plane.route(num_tokens, prompt.chains, avoid=failed, offload=False)
                except NoDecodeInstanceError:
                    break
            else:
                if prepared.arriving is None:
                    attempt.outcome = "done"
                return replace(prepared, fallback=fallback)
        reason = "fallback" if decision.transfers else decision.reason
        return self._at_decode(request, prompt, decision, reason, fallback)

    async def prepare_again(
        self, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt, avoid: Collection[str]
    ) -> PreparedRequest:
        """The same for a request whose decode engines `avoid` have failed it, by a new decision.

        Raises:
            NoDecodeInstanceError: no other engine can decode.
        """
        if isinstance(prompt, DirectPrompt):
            decision = self._plane.route(0, None, avoid=avoid)
        else:
            decision = self._plane.route(len(prompt.token_ids), prompt.chains, avoid=avoid)
        return await self.prepare(request, prompt, decision, avoid)

    async def arrived(self, request: ServingRequest, prepared: PreparedRequest) -> PreparedRequest:
        """Wait for the rest of the KV that the decode engine waits for too; what became of it.

        If it does not come, the decode engine learns that as well, and prefills.
        """
        arriving, prompt, decision = prepared.arriving, prepared.prompt, prepared.decision
        if arriving is None:
            return prepared
        await asyncio.wait((arriving,))
        attempt = request.record.attempts[-1]
        try:
            prepared = replace(arriving.result(), fallback=prepared.fallback)
        except HopFailedError as failure:
            request.record.fell_back(attempt, failure.reason)
            self._metrics.fallbacks.labels(failure.reason).inc()
            assert isinstance(prompt, TokenizedPrompt) and decision is not None
            return self._at_decode(request, prompt, decision, "fallback", failure.reason)
        attempt.outcome = "done"
        return prepared

    def delivered(self, prepared: PreparedRequest) -> None:
        """The decode engine answers, so it holds the prompt now."""
        if prepared.prompt is not None:
            self._plane.expect(prepared.decode, prepared.prompt.chains)

    def abandon(self, prepared: PreparedRequest, reason: str) -> None:
        """The decode engine may never take the transfer: have its staging freed."""
        if prepared.arriving is not None:
            prepared.arriving.cancel()
        if prepared.transfer is not None:
            self._hop.abandon(prepared.transfer.ticket, reason)

    def _note_rejections(self, request: ServingRequest, consumer: str) -> None:
        for producer in self._staging_bytes:
            why = self._plane.incompatible(producer, consumer)
            if why is not None:
                request.record.note(f"{producer} may send nothing to {consumer}: {why}")

    def _direct(self, request: ServingRequest, decision: Decision, reason: str) -> PreparedRequest:
        """The decode engine gets the request as it is; the prompt was not looked at."""
        request.record.direct_reason = reason
        self._metrics.direct.labels(reason).inc()
        return PreparedRequest(Route.LOCAL, decision.decode, decision.decode, reason)

    def _at_decode(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt,
        decision: Decision,
        reason: str,
        fallback: str | None,
    ) -> PreparedRequest:
        """The decode instance of `decision` prefills itself."""
        self._metrics.direct.labels(reason).inc()
        if decision.transfers:
            # The policy did not ask what the decode instance can reuse. Attention blocks that need not be sent
            # are a bound.
            decision = replace(
                decision,
                route=Route.LOCAL,
                prefill=decision.decode,
                prefill_tokens=len(prompt.token_ids) - decision.skip_tokens,
                skip_tokens=0,
                kv_bytes=0,
                reason=reason,
                cache_transfer=None,
            )
        request.record.start(decision, len(prompt.token_ids)).outcome = "done"
        return PreparedRequest(
            route=Route.LOCAL,
            prefill=decision.decode,
            decode=decision.decode,
            reason=reason,
            prompt=prompt,
            decision=decision,
            own_prefill_tokens=decision.prefill_tokens,
            fallback=fallback,
        )

    async def _begin_remote(
        self, request: ServingRequest, prompt: TokenizedPrompt, attempt: Attempt
    ) -> PreparedRequest:
        """Prefill elsewhere until the KV is at the decode engine, or is expected to be there in a moment.

        In the second case `PreparedRequest.arriving` goes on. Raises HopFailedError.
        `attempt.decision` becomes the one that was carried out: another instance may be free first.
        """
        wanted = attempt.decision
        # 1. A cached prefix that is elsewhere goes to the prefill instance first.
        moved = await self._prefixes.move(request, prompt, wanted)
        decision = moved.decision
        begun_s = time.perf_counter()
        request.record.waits_for = WaitsFor.PREFILL_INSTANCE
        async with AsyncExitStack() as stack:
            if moved.transfer is not None:
                stack.callback(self._abandon_unused, moved.transfer, wanted, attempt)
            # 2. Wait until an instance of the cluster is free for the prefill. From then on it counts as its work, and
            #    requests that are decided meanwhile see that.
            decision = await stack.enter_async_context(self._plane.admit(decision, prompt.chains))
            request.record.since("turn", begun_s)
            request.record.waits_for = WaitsFor.PREFILL
            attempt.decision = decision
            self._plane.expect(decision.prefill, prompt.chains)
            work = stack.enter_context(self._plane.prefilling(decision))
            running = _RemotePrefill(request, prompt, attempt, moved, wanted.prefill, work, stack.pop_all())
        # 3. Prefill there.
        if self._lead_s <= 0:
            return await self._prefill_remote(running, None)
        return await self._until_soon(running)

    async def _until_soon(self, running: _RemotePrefill) -> PreparedRequest:
        loop = asyncio.get_running_loop()
        soon: asyncio.Future[PreparedRequest] = loop.create_future()
        moving = loop.create_task(self._prefill_remote(running, soon))
        moving.add_done_callback(_look_at)
        begun = False
        try:
            await asyncio.wait((moving, soon), return_when=asyncio.FIRST_COMPLETED)
            begun = True
        finally:
            if not begun:
                moving.cancel()
                await asyncio.wait((moving,))
                # One that was cancelled before it began has given nothing back.
                await running.stack.aclose()
        return moving.result() if moving.done() else replace(soon.result(), arriving=moving)

    async def _prefill_remote(
        self, running: _RemotePrefill, soon: "asyncio.Future[PreparedRequest] | None"
    ) -> PreparedRequest:
        """Prefill at another instance than the decode instance, and move the KV. Raises HopFailedError.

        `soon` gets the request as it is prepared when the KV is expected in a moment.
        """
        request, prompt, attempt, moved = running.request, running.prompt, running.attempt, running.moved
        decision, prefix = attempt.decision, moved.transfer
        has_prefix = prefix is not None and decision.prefill == running.wanted

        def on_soon(transfer: StartedTransfer) -> None:
            if soon is not None and not soon.done():
                soon.set_result(_prepared(prompt, decision, transfer, moved))

        async with running.stack:
            # The last token stays for the decode engine, which samples from it.
            done = await self._hop.run(
                TransferSpec(
                    producer=decision.prefill,
                    consumer=decision.decode,
                    token_ids=prompt.token_ids[:-1],
                    skip_tokens=decision.skip_tokens,
                    kv_bytes=decision.kv_bytes,
                    uses=request.samples,
                    sealed_from=prefix.sealed if prefix is not None and has_prefix else None,
                ),
                request,
                on_soon if soon is not None else None,
            )
            running.work.measured()
            attempt.moved, attempt.cached_tokens = done.moved, done.cached_tokens
        self._count(request, decision, done)
        return _prepared(prompt, decision, done, moved)

    def _abandon_unused(self, prefix: TransferDone, wanted: Decision, attempt: Attempt) -> None:
        if attempt.moved is None or attempt.decision.prefill != wanted.prefill:
            self._hop.abandon(prefix.ticket, "the prefill that would have used it failed")

    def _count(self, request: ServingRequest, decision: Decision, done: TransferDone) -> None:
        route, metrics = str(decision.route), self._metrics
        metrics.prefill_seconds.labels(route).observe(done.prefill_s)
        metrics.transfer_seconds.labels(route).observe(done.transfer_s)
        metrics.transferred_bytes.labels(route).inc(done.moved.total_bytes)
        self._bill.add(decision.prefill, decision.decode, done.moved.total_bytes)
        metrics.overlapped_bytes.labels(route).inc(done.moved.overlapped_bytes)
        # Both begin at once, and the transfer has just ended.
        begun_s = time.perf_counter() - done.transfer_s
        request.record.took("prefill", done.prefill_s, begun_s)
        request.record.took("transfer", done.transfer_s, begun_s)


def _prepared(
    prompt: TokenizedPrompt, decision: Decision, transfer: StartedTransfer, prefix: MovedPrefix
) -> PreparedRequest:
    """A request whose prompt was prefilled elsewhere, or nearly."""
    return PreparedRequest(
        route=decision.route,
        prefill=decision.prefill,
        decode=decision.decode,
        reason=decision.reason,
        prompt=prompt,
        decision=decision,
        transfer=transfer,
        prefix=prefix,
    )


def _look_at(moving: "asyncio.Task[PreparedRequest]") -> None:
    """Asyncio warns of an exception that nobody looks at, as when the decode engine failed before."""
    if not moving.cancelled():
        moving.exception()
