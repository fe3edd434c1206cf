"""A prefill at another instance than the decode instance, and the way of its KV to that one."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from prfaas.core.scheduling import Decision
from prfaas.serving.control.cluster_state import OpenPrefill
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.egress_bill import EgressBill
from prfaas.serving.gateway.first_token import FirstTokenAsk, FirstTokenHeldError, SampledTokens
from prfaas.serving.gateway.hop_failure import KeptPart
from prfaas.serving.gateway.kv_transfer import MovedPrefix, StartedTransfer, TransferDone, TransferSpec
from prfaas.serving.gateway.prefill_hop import PrefillHop
from prfaas.serving.gateway.prefix_moves import PrefixMoves
from prfaas.serving.gateway.ready_requests import (
    AnsweredRequest,
    DecidedRequest,
    EarlyRequest,
    MovedRequest,
    MovingRequest,
    PullingRequest,
    ReadyRequest,
)
from prfaas.serving.gateway.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.request_log import Attempt, WaitsFor
from prfaas.serving.tasks import look_at
from prfaas.serving.transport.ticket import PLAIN, TransferAttributes


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
    work: OpenPrefill
    stack: AsyncExitStack
    """Gives the instance back."""
    ask: FirstTokenAsk | None
    """The prefill samples the first token too, so; None: the decode instance does."""
    pulled: bool
    """The decode engine reads the KV by NIXL."""


class RemotePrefills:
    """Prefills elsewhere, each until its request can go to the decode instance, or has its first token."""

    def __init__(self, hop: PrefillHop, prefixes: PrefixMoves, context: GatewayContext) -> None:
        self._hop = hop
        self._prefixes = prefixes
        self._plane = context.plane
        self._metrics = context.metrics
        self._bill = EgressBill(context.running, context.metrics)
        self._running = context.running

    @property
    def _lead_s(self) -> float:
        return self._running.current.transfer.decode_lead_s

    def give_up(self, kept: KeptPart, reason: str) -> None:
        """Nobody goes on from what was kept of a broken transfer."""
        self._hop.abandon(kept.ticket, reason)

    def abandon(self, ready: ReadyRequest, reason: str) -> None:
        """The decode engine may never take the transfer: have its staging freed."""
        transfer = ready.given_up()
        if transfer is not None:
            self._hop.abandon(transfer.ticket, reason)

    async def begin(
        self, request: ServingRequest, prompt: TokenizedPrompt, attempt: Attempt, ask: FirstTokenAsk | None
    ) -> DecidedRequest:
        """Prefill elsewhere until the KV is at the decode engine, or is expected to be there in a moment.

        With `ask`, until the first token is sampled. Raises HopFailedError and FirstTokenHeldError.
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
            decision = await stack.enter_async_context(self._plane.admission.admit(decision, prompt.chains))
            request.record.since("turn", begun_s)
            request.record.waits_for = WaitsFor.PREFILL
            attempt.decision = decision
            self._plane.prefixes.expect(decision.prefill, prompt.chains)
            work = stack.enter_context(self._plane.prefilling(decision))
            # NIXL frees the blocks after one reader, and its producer leaves the last token of some models out.
            pulled = ask is None and request.samples == 1 and self._reads(decision)
            running = _RemotePrefill(
                request=request,
                prompt=prompt,
                attempt=attempt,
                moved=moved,
                wanted=wanted.prefill,
                work=work,
                stack=stack.pop_all(),
                ask=ask,
                pulled=pulled,
            )
        # 3. Prefill there.
        if ask is not None:
            return await (
                self._answer_remote(running, ask) if ask.is_all else self._until_first(running, ask)
            )
        if self._lead_s <= 0 and not pulled:
            return await self._prefill_remote(running, None)
        return await self._until_soon(running)

    def _reads(self, decision: Decision) -> bool:
        """Whether the decode engine reads the KV by NIXL."""
        # Of the plane: an instance that has just left the file may have work to end.
        producer, consumer = (
            self._plane.members.instance(name) for name in (decision.prefill, decision.decode)
        )
        return self._running.current.pulls(producer, consumer)

    async def _until_soon(self, running: _RemotePrefill) -> MovedRequest | MovingRequest:
        soon: asyncio.Future[StartedTransfer] = asyncio.get_running_loop().create_future()
        moving = await self._moving_until(running, soon, None)
        if moving.done():
            return moving.result()
        kind = PullingRequest if running.pulled else MovingRequest
        return kind(
            decision=running.attempt.decision,
            prompt=running.prompt,
            prefix=running.moved,
            transfer=soon.result(),
            arriving=moving,
        )

    async def _until_first(self, running: _RemotePrefill, ask: FirstTokenAsk) -> MovedRequest | EarlyRequest:
        """Until the prefill has sampled the first token. Raises HopFailedError and FirstTokenHeldError."""
        loop = asyncio.get_running_loop()
        soon: asyncio.Future[StartedTransfer] = loop.create_future()
        told: asyncio.Future[SampledTokens] = loop.create_future()
        moving = await self._moving_until(running, soon, told)
        if not told.done():
            # It has failed: a prefill that ends well has told its token.
            return moving.result()
        early = EarlyRequest(
            decision=running.attempt.decision,
            prompt=running.prompt,
            prefix=running.moved,
            first=told.result(),
            arriving=moving,
            soon=soon,
        )
        held = early.first.held(ask)
        if held is not None:
            self.abandon(early, f"the first token can't be told alone: {held}")
            await asyncio.wait((moving,))
            raise FirstTokenHeldError(held)
        return early

    async def _moving_until(
        self,
        running: _RemotePrefill,
        soon: "asyncio.Future[StartedTransfer]",
        told: "asyncio.Future[SampledTokens] | None",
    ) -> "asyncio.Task[MovedRequest]":
        """`_prefill_remote`, begun, when it is over or `told` is done; `soon` in its place if there is none."""
        moving = asyncio.get_running_loop().create_task(self._prefill_remote(running, soon, told))
        # Nobody reads its failure where the decode engine has failed before.
        moving.add_done_callback(look_at)
        begun = False
        try:
            await asyncio.wait((moving, soon if told is None else told), return_when=asyncio.FIRST_COMPLETED)
            begun = True
        finally:
            if not begun:
                moving.cancel()
                # It may have ended well in this very moment, with a transfer that nobody will load.
                moving.add_done_callback(self._abandon_done)
                await asyncio.wait((moving,))
                # One that was cancelled before it began has given nothing back.
                await running.stack.aclose()
        return moving

    def _abandon_done(self, moving: "asyncio.Task[MovedRequest]") -> None:
        if not moving.cancelled() and moving.exception() is None:
            self.abandon(moving.result(), "the request was cancelled")

    async def _answer_remote(self, running: _RemotePrefill, ask: FirstTokenAsk) -> AnsweredRequest:
        """Prefill at another instance, and sample the only token of the answer there. Raises HopFailedError."""
        request, attempt = running.request, running.attempt
        async with running.stack:
            first, prefill_s = await self._hop.sample(_spec(running, running.prompt.token_ids), ask, request)
            running.work.measured()
        route = str(attempt.decision.route)
        self._metrics.prefill_seconds.labels(route).observe(prefill_s)
        request.record.took("prefill", prefill_s)
        return AnsweredRequest(
            decision=attempt.decision, prompt=running.prompt, prefix=running.moved, first=first
        )

    async def _prefill_remote(
        self,
        running: _RemotePrefill,
        soon: "asyncio.Future[StartedTransfer] | None",
        told: "asyncio.Future[SampledTokens] | None" = None,
    ) -> MovedRequest:
        """Prefill at another instance than the decode instance, and move the KV. Raises HopFailedError.

        `soon` gets the transfer when the KV is expected in a moment, `told` the first token.
        """
        request, prompt, attempt = running.request, running.prompt, running.attempt
        decision = attempt.decision

        def on_soon(transfer: StartedTransfer) -> None:
            if soon is not None and not soon.done():
                soon.set_result(transfer)

        def on_first(first: SampledTokens) -> None:
            if told is not None and not told.done():
                told.set_result(first)

        # The last token of what is decoded stays for the decode engine, which samples from it: of the prompt, or the
        # first of the answer. Some drafters need more. NIXL's connectors see to that by themselves.
        whole = running.ask is not None or running.pulled
        token_ids = prompt.token_ids if whole else self._moved_ids(prompt, decision)
        # With the first token the ticket is for one more than the decode request's prompt. What NIXL has read lies in
        # no staging.
        keeps = running.ask is None and not running.pulled
        attributes = TransferAttributes(
            uses=request.samples,
            checkpoint_tokens=self._plane.waits.checkpoint_tokens(decision) if keeps else 0,
        )
        async with running.stack:
            done = await self._hop.run(
                _spec(running, token_ids, attributes),
                request,
                on_soon if soon is not None and (self._lead_s > 0 or running.pulled) else None,
                on_first,
                keeps=keeps,
            )
            running.work.measured()
            attempt.moved, attempt.cached_tokens, attempt.by = done.moved, done.cached_tokens, done.by
        self._count(request, decision, done)
        return MovedRequest(decision=decision, prompt=prompt, prefix=running.moved, transfer=done)

    def _moved_ids(self, prompt: TokenizedPrompt, decision: Decision) -> Sequence[int]:
        """Of a prompt, the tokens whose KV moves: at least what the decode engine is taken to hold already."""
        tokens = len(prompt.token_ids)
        own = self._plane.prefixes.own_last_tokens(decision.decode)
        return prompt.token_ids[: min(tokens - 1, max(tokens - own, decision.skip_tokens, 1))]

    def _abandon_unused(self, prefix: TransferDone, wanted: Decision, attempt: Attempt) -> None:
        if attempt.moved is None or attempt.decision.prefill != wanted.prefill:
            self._hop.abandon(prefix.ticket, "the prefill that would have used it failed")

    def _count(self, request: ServingRequest, decision: Decision, done: TransferDone) -> None:
        route, metrics = str(decision.route), self._metrics
        metrics.transfers.labels(route, done.by).inc()
        metrics.prefill_seconds.labels(route).observe(done.prefill_s)
        metrics.transfer_seconds.labels(route).observe(done.transfer_s)
        metrics.transferred_bytes.labels(route).inc(done.moved.total_bytes)
        sent_bytes = done.moved.total_bytes + done.moved.checkpoint_bytes
        self._bill.add(decision.prefill, decision.decode, sent_bytes)
        metrics.overlapped_bytes.labels(route).inc(done.moved.overlapped_bytes)
        # Both begin at once, and the transfer has just ended.
        begun_s = time.perf_counter() - done.transfer_s
        request.record.took("prefill", done.prefill_s, begun_s)
        request.record.took("transfer", done.transfer_s, begun_s)


def _spec(
    running: _RemotePrefill, token_ids: Sequence[int], attributes: TransferAttributes = PLAIN
) -> TransferSpec:
    """What moves of a prefill elsewhere: the KV of `token_ids`."""
    decision, prefix = running.attempt.decision, running.moved.transfer
    has_prefix = prefix is not None and decision.prefill == running.wanted
    return TransferSpec(
        producer=decision.prefill,
        consumer=decision.decode,
        token_ids=token_ids,
        skip_tokens=decision.skip_tokens,
        kv_bytes=decision.kv_bytes,
        attributes=attributes,
        sealed_from=prefix.sealed if prefix is not None and has_prefix else None,
        ask=running.ask,
        left_s=lambda: running.work.left_s,
        pulled=running.pulled,
    )
