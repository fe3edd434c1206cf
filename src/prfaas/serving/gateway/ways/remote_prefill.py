"""A prefill at another instance than the decode instance, and the way of its KV to that one."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prfaas.core.scheduling.decision import Decision
from prfaas.serving.control.cluster_state import OpenPrefill
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.request_log import Attempt, WaitsFor
from prfaas.serving.gateway.ways.first_token import FirstTokenAsk, SampledTokens
from prfaas.serving.gateway.ways.kv_transfer import KvTransfers, MovedPrefix, StartedTransfer, TransferDone
from prfaas.serving.gateway.ways.prefix_moves import PrefixMoves
from prfaas.serving.gateway.ways.pull import PulledHop
from prfaas.serving.gateway.ways.push import PrefillHop, TransferSpec, tell
from prfaas.serving.gateway.ways.ready_requests import (
    DecidedRequest,
    EarlyRequest,
    MovedRequest,
    MovingRequest,
    PullingRequest,
)
from prfaas.serving.tasks import look_at
from prfaas.serving.transport.protocol.ticket import PLAIN, TransferAttributes


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemotePrefill:
    """One prefill elsewhere, and what it tells before it is over."""

    request: ServingRequest
    prompt: TokenizedPrompt
    attempt: Attempt
    prefix: MovedPrefix
    """What the prefill may start from."""
    wanted: str
    """The instance that it was moved to."""
    ask: FirstTokenAsk | None
    """The prefill samples the first token too, so; None: the decode instance does."""
    soon: "asyncio.Future[StartedTransfer]"
    """Has the transfer when the KV is expected at the decode instance in a moment."""
    first: "asyncio.Future[SampledTokens]"
    """Has the first token."""

    def take_first(self, answer: bytes) -> None:
        """The prefill engine has answered. Raises ValueError for what has no first token."""
        tell(self.first, SampledTokens.of(answer))


class RemotePrefills:
    """Prefills elsewhere, each until its request can go to the decode instance, or has its first token."""

    def __init__(
        self,
        push: PrefillHop,
        pull: PulledHop,
        prefixes: PrefixMoves,
        transfers: KvTransfers,
        context: GatewayContext,
    ) -> None:
        """`pull`: where the decode engine reads the KV by NIXL."""
        self._push = push
        self._pull = pull
        self._prefixes = prefixes
        self.transfers = transfers
        """Frees what nobody loads."""
        self._plane = context.plane
        self._metrics = context.metrics
        self._running = context.running

    async def begin(
        self, request: ServingRequest, prompt: TokenizedPrompt, attempt: Attempt, ask: FirstTokenAsk | None
    ) -> DecidedRequest:
        """Prefill elsewhere until the KV is at the decode engine, or is expected to be there in a moment.

        With `ask`, until the first token is sampled. Raises HopFailedError.
        `attempt.decision` becomes the one that was carried out: another instance may be free first.
        """
        # 1. A cached prefix that is elsewhere goes to the prefill instance first.
        wanted = attempt.decision
        prefix = await self._prefixes.move(request, prompt, wanted)
        loop = asyncio.get_running_loop()
        running = _RemotePrefill(
            request=request,
            prompt=prompt,
            attempt=attempt,
            prefix=prefix,
            wanted=wanted.prefill,
            ask=ask,
            soon=loop.create_future(),
            first=loop.create_future(),
        )
        # 2. From here on the prefill counts as its instance's work. Not in the task: until that runs, other requests
        #    would be decided as if there was none.
        async with AsyncExitStack() as stack:
            work = await stack.enter_async_context(self._at_work(running))
            held = stack.pop_all()
        # 3. It goes on by itself when the decode engine can be asked, or the client can have a token.
        moving = loop.create_task(self._prefill(running, work, held))
        # Nobody reads its failure where the decode engine has failed before.
        moving.add_done_callback(look_at)
        told = running.soon if ask is None else running.first
        begun = False
        try:
            await asyncio.wait((moving, told), return_when=asyncio.FIRST_COMPLETED)
            begun = True
        finally:
            if not begun:
                moving.cancel()
                # It may have ended well in this very moment, with a transfer that nobody will load.
                moving.add_done_callback(self._abandon_done)
                await asyncio.wait((moving,))
                # One that was cancelled before it began has given nothing back.
                await held.aclose()
        if running.first.done():
            return EarlyRequest(
                request=request,
                decision=attempt.decision,
                prompt=prompt,
                prefix=prefix,
                first=running.first.result(),
                arriving=moving,
                soon=running.soon,
            )
        if moving.done():
            return moving.result()
        transfer = running.soon.result()
        kind = PullingRequest if transfer.by == "nixl" else MovingRequest
        return kind(
            request=request,
            decision=attempt.decision,
            prompt=prompt,
            prefix=prefix,
            transfer=transfer,
            arriving=moving,
        )

    def _abandon_done(self, moving: "asyncio.Task[MovedRequest]") -> None:
        if not moving.cancelled() and moving.exception() is None:
            self.transfers.abandon(moving.result().transfer.ticket, "the request was cancelled")

    @asynccontextmanager
    async def _at_work(self, running: _RemotePrefill) -> AsyncIterator[OpenPrefill]:
        """Wait for an instance of the cluster, and have it for the prefill. `attempt.decision` names it then."""
        request, prompt, attempt, prefix = running.request, running.prompt, running.attempt, running.prefix
        begun_s = time.perf_counter()
        request.record.waits_for = WaitsFor.PREFILL_INSTANCE
        try:
            async with self._plane.admission.admit(prefix.decision, prompt.chains) as decision:
                request.record.since("turn", begun_s)
                request.record.waits_for = WaitsFor.PREFILL
                attempt.decision = decision
                self._plane.prefixes.expect(decision.prefill, prompt.chains)
                with self._plane.prefilling(decision) as work:
                    yield work
        finally:
            is_used = attempt.moved is not None and attempt.decision.prefill == running.wanted
            if prefix.transfer is not None and not is_used:
                self.transfers.abandon(prefix.transfer.ticket, "the prefill that would have used it failed")

    async def _prefill(
        self, running: _RemotePrefill, work: OpenPrefill, held: AsyncExitStack
    ) -> MovedRequest:
        """Have the instance prefill, and move the KV; `held` is given back then. Raises HopFailedError."""
        async with held:
            return await self._moved(running, work)

    async def _moved(self, running: _RemotePrefill, work: OpenPrefill) -> MovedRequest:
        """Prefill there, and move the KV to the decode instance. Raises HopFailedError."""
        request, prompt, attempt = running.request, running.prompt, running.attempt
        decision, is_early = attempt.decision, running.ask is not None
        # NIXL frees the blocks after one reader, and its producer leaves the last token of some models out.
        pulled = not is_early and request.samples == 1 and not prompt.media and self._reads(decision)
        # The last token of what is decoded stays for the decode engine, which samples from it: of the prompt, or the
        # first of the answer. Some drafters need more. NIXL's connectors see to that by themselves.
        token_ids = prompt.token_ids if is_early or pulled else self._moved_ids(prompt, decision)
        # With the first token the ticket is for one more than the decode request's prompt. What NIXL has read lies in
        # no staging.
        keeps = not is_early and not pulled
        attributes = TransferAttributes(
            uses=request.samples,
            checkpoint_tokens=self._plane.waits.checkpoint_tokens(decision) if keeps else 0,
        )
        has_lead = pulled or self._running.current.transfer.decode_lead_s > 0
        done = await (self._pull if pulled else self._push).run(
            _spec(running, token_ids, work, attributes),
            request,
            running.soon if has_lead else None,
            keeps=keeps,
        )
        work.measured()
        attempt.moved, attempt.cached_tokens, attempt.by = done.moved, done.cached_tokens, done.by
        self._count(request, decision, done)
        return MovedRequest(
            request=request, decision=decision, prompt=prompt, prefix=running.prefix, transfer=done
        )

    def _reads(self, decision: Decision) -> bool:
        """Whether the decode engine reads the KV by NIXL."""
        # Of the plane: an instance that has just left the file may have work to end.
        producer, consumer = (
            self._plane.members.instance(name) for name in (decision.prefill, decision.decode)
        )
        return self._running.current.pulls(producer, consumer)

    def _moved_ids(self, prompt: TokenizedPrompt, decision: Decision) -> Sequence[int]:
        """Of a prompt, the tokens whose KV moves: at least what the decode engine is taken to hold already."""
        tokens = len(prompt.token_ids)
        own = self._plane.prefixes.own_last_tokens(decision.decode)
        return prompt.token_ids[: min(tokens - 1, max(tokens - own, decision.skip_tokens, 1))]

    def _count(self, request: ServingRequest, decision: Decision, done: TransferDone) -> None:
        route, metrics = str(decision.route), self._metrics
        metrics.transfers.labels(route, done.by).inc()
        metrics.prefill_seconds.labels(route).observe(done.prefill_s)
        metrics.transfer_seconds.labels(route).observe(done.transfer_s)
        metrics.transferred_bytes.labels(route).inc(done.moved.total_bytes)
        source, target = (self._plane.members.instance(name) for name in (decision.prefill, decision.decode))
        self._prefixes.bill.add(request.record, source.cluster, target.cluster, done.moved.sent_bytes)
        metrics.overlapped_bytes.labels(route).inc(done.moved.overlapped_bytes)
        # Both begin at once, and the transfer has just ended.
        begun_s = time.perf_counter() - done.transfer_s
        request.record.took("prefill", done.prefill_s, begun_s)
        request.record.took("transfer", done.transfer_s, begun_s)


def _spec(
    running: _RemotePrefill,
    token_ids: Sequence[int],
    work: OpenPrefill,
    attributes: TransferAttributes = PLAIN,
) -> TransferSpec:
    """What moves of a prefill elsewhere: the KV of `token_ids`."""
    decision, prefix = running.attempt.decision, running.prefix.transfer
    has_prefix = prefix is not None and decision.prefill == running.wanted
    return TransferSpec(
        producer=decision.prefill,
        consumer=decision.decode,
        token_ids=token_ids,
        skip_tokens=decision.skip_tokens,
        kv_bytes=decision.kv_bytes,
        media=running.prompt.media,
        attributes=attributes,
        sealed_from=prefix.sealed if prefix is not None and has_prefix else None,
        sampling=None if running.ask is None else running.ask.body_fields(),
        on_answer=None if running.ask is None else running.take_first,
        left_s=lambda: work.left_s,
    )
