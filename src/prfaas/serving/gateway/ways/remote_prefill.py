"""A prefill at another instance than the decode instance, and the way of its KV to that one."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from prfaas.core.scheduling.decision import Decision
from prfaas.serving.control.cluster_state import OpenPrefill
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.request import TokenizedPrompt
from prfaas.serving.gateway.request_log import Attempt, WaitsFor
from prfaas.serving.gateway.ways.first_token import FirstTokenAsk, SampledTokens
from prfaas.serving.gateway.ways.hops import PrefillHops, PullHop, PushHop, TransferSpec, tell
from prfaas.serving.gateway.ways.kv_transfer import MovedPrefix, StartedTransfer, TransferDone
from prfaas.serving.gateway.ways.prefix_moves import PrefixMoves
from prfaas.serving.gateway.ways.ready_requests import (
    DecidedRequest,
    EarlyRequest,
    MovedRequest,
    MovingRequest,
    PullingRequest,
)
from prfaas.serving.tasks import look_at


class RemotePrefill:
    """One prefill elsewhere, until its request can go to the decode instance, or has its first token.

    `begin` is the whole way; what is left of it goes on in a task.
    """

    def __init__(
        self,
        hops: PrefillHops,
        prefixes: PrefixMoves,
        context: GatewayContext,
        *,
        prompt: TokenizedPrompt,
        attempt: Attempt,
        ask: FirstTokenAsk | None,
    ) -> None:
        """`ask`: the prefill samples the first token too, so; None: the decode instance does."""
        self._hops = hops
        self._prefixes = prefixes
        self._context, self._plane = context, context.plane
        self._prompt, self._record = prompt, prompt.request.record
        self._attempt = attempt
        self._ask = ask
        # The instance that a cached prefix is moved to, and what the prefill may start from.
        self._wanted = attempt.decision.prefill
        self._prefix: MovedPrefix
        loop = asyncio.get_running_loop()
        # Has the transfer when the KV is expected at the decode instance in a moment.
        self._soon: asyncio.Future[StartedTransfer] = loop.create_future()
        self._first: asyncio.Future[SampledTokens] = loop.create_future()

    async def begin(self) -> DecidedRequest:
        """Prefill elsewhere until the KV is at the decode engine, or is expected to be there in a moment.

        With a first token to ask for, until it is sampled. Raises HopFailedError.
        The attempt's decision becomes the one that was carried out: another instance may be free first.
        """
        # 1. A cached prefix that is elsewhere goes to the prefill instance first.
        self._prefix = await self._prefixes.move(self._prompt, self._attempt.decision)
        # 2. From here on the prefill counts as its instance's work. Not in the task: until that runs, other requests
        #    would be decided as if there was none.
        async with AsyncExitStack() as stack:
            work = await stack.enter_async_context(self._at_work())
            held = stack.pop_all()
        # 3. It goes on by itself when the decode engine can be asked, or the client can have a token.
        moving = asyncio.get_running_loop().create_task(self._prefill(work, held))
        # Nobody reads its failure where the decode engine has failed before.
        moving.add_done_callback(look_at)
        told = self._soon if self._ask is None else self._first
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
        if self._first.done():
            return EarlyRequest(
                decision=self._attempt.decision,
                prompt=self._prompt,
                prefix=self._prefix,
                first=self._first.result(),
                arriving=moving,
                soon=self._soon,
            )
        if moving.done():
            return moving.result()
        transfer = self._soon.result()
        kind = PullingRequest if transfer.by == "nixl" else MovingRequest
        return kind(
            decision=self._attempt.decision,
            prompt=self._prompt,
            prefix=self._prefix,
            transfer=transfer,
            arriving=moving,
        )

    def _abandon_done(self, moving: "asyncio.Task[MovedRequest]") -> None:
        if not moving.cancelled() and moving.exception() is None:
            self._hops.transfers.abandon(moving.result().transfer.ticket, "the request was cancelled")

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[OpenPrefill]:
        """Wait for an instance of the cluster, and have it for the prefill. The attempt's decision names it then."""
        record, chains, attempt = self._record, self._prompt.chains, self._attempt
        begun_s = time.perf_counter()
        record.waits_for = WaitsFor.PREFILL_INSTANCE
        try:
            async with self._plane.admission.admit(self._prefix.decision, chains) as decision:
                record.since("turn", begun_s)
                record.waits_for = WaitsFor.PREFILL
                attempt.decision = decision
                self._plane.prefixes.expect(decision.prefill, chains)
                with self._plane.prefilling(decision) as work:
                    yield work
        finally:
            is_used = attempt.moved is not None and attempt.decision.prefill == self._wanted
            transfer = self._prefix.transfer
            if transfer is not None and not is_used:
                self._hops.transfers.abandon(transfer.ticket, "the prefill that would have used it failed")

    async def _prefill(self, work: OpenPrefill, held: AsyncExitStack) -> MovedRequest:
        """Have the instance prefill, and move the KV; `held` is given back then. Raises HopFailedError."""
        async with held:
            return await self._moved(work)

    async def _moved(self, work: OpenPrefill) -> MovedRequest:
        """Prefill there, and move the KV to the decode instance. Raises HopFailedError."""
        prompt, attempt, ask = self._prompt, self._attempt, self._ask
        request, decision = prompt.request, attempt.decision
        # NIXL frees the blocks after one reader, and its producer leaves the last token of some models out.
        pulled = ask is None and request.samples == 1 and not prompt.media and self._reads(decision)
        # The last token of what is decoded stays for the decode engine, which samples from it: of the prompt, or the
        # first of the answer. Some drafters need more. NIXL's connectors see to that by themselves.
        token_ids = prompt.token_ids if ask is not None or pulled else self._moved_ids(prompt, decision)
        # With the first token the ticket is for one more than the decode request's prompt. What NIXL has read lies in
        # no staging.
        keeps = ask is None and not pulled
        has_lead = pulled or self._context.running.current.transfer.decode_lead_s > 0
        prefix = self._prefix.transfer if decision.prefill == self._wanted else None
        spec = TransferSpec(
            producer=decision.prefill,
            consumer=decision.decode,
            token_ids=token_ids,
            skip_tokens=decision.skip_tokens,
            kv_bytes=decision.kv_bytes,
            media=prompt.media,
            uses=request.samples,
            checkpoint_tokens=self._plane.waits.checkpoint_tokens(decision) if keeps else 0,
            sealed_from=None if prefix is None else prefix.sealed,
            sampling=None if ask is None else ask.sampling,
            on_answer=None if ask is None else self._take_first,
            left_s=lambda: work.left_s,
        )
        hop = (PullHop if pulled else PushHop)(self._hops, spec, request, self._soon if has_lead else None)
        done = await hop.run(keeps=keeps)
        work.measured()
        attempt.moved, attempt.cached_tokens, attempt.by = done.moved, done.cached_tokens, done.by
        self._count(decision, done)
        return MovedRequest(decision=decision, prompt=prompt, prefix=self._prefix, transfer=done)

    def _take_first(self, answer: bytes) -> None:
        """The prefill engine has answered. Raises ValueError for what has no first token."""
        tell(self._first, SampledTokens.of(answer))

    def _reads(self, decision: Decision) -> bool:
        """Whether the decode engine reads the KV by NIXL."""
        # Of the plane: an instance that has just left the file may have work to end.
        producer, consumer = (
            self._plane.members.instance(name) for name in (decision.prefill, decision.decode)
        )
        return self._context.running.current.pulls(producer, consumer)

    def _moved_ids(self, prompt: TokenizedPrompt, decision: Decision) -> Sequence[int]:
        """Of a prompt, the tokens whose KV moves: at least what the decode engine is taken to hold already."""
        tokens = len(prompt.token_ids)
        own = self._plane.prefixes.own_last_tokens(decision.decode)
        return prompt.token_ids[: min(tokens - 1, max(tokens - own, decision.skip_tokens, 1))]

    def _count(self, decision: Decision, done: TransferDone) -> None:
        route, metrics, record = str(decision.route), self._context.metrics, self._record
        metrics.transfers.labels(route, done.by).inc()
        metrics.prefill_seconds.labels(route).observe(done.prefill_s)
        metrics.transfer_seconds.labels(route).observe(done.transfer_s)
        metrics.transferred_bytes.labels(route).inc(done.moved.total_bytes)
        source, target = (self._plane.members.instance(name) for name in (decision.prefill, decision.decode))
        self._prefixes.bill.add(record, source.cluster, target.cluster, done.moved.sent_bytes)
        metrics.overlapped_bytes.labels(route).inc(done.moved.overlapped_bytes)
        # Both begin at once, and the transfer has just ended.
        begun_s = time.perf_counter() - done.transfer_s
        record.took("prefill", done.prefill_s, begun_s)
        record.took("transfer", done.transfer_s, begun_s)
