"""Carries a routing decision out: prefill where it says, move the KV, and fall back to a local prefill."""

import asyncio
import math
import time
from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from prfaas.core.scheduling.decision import Decision, Route
from prfaas.core.scheduling.preemption import goes_on_at_decode
from prfaas.core.scheduling.view import NoDecodeInstanceError
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.prompt import PROMPT_LOGPROBS, DirectPrompt
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.ways.first_token import FirstTokenAsk, FirstTokenRules
from prfaas.serving.gateway.ways.hops import PrefillHops
from prfaas.serving.gateway.ways.kv_transfer import (
    INCOMPATIBLE,
    PREEMPTED,
    HopFailedError,
    KeptPart,
    MovedPrefix,
)
from prfaas.serving.gateway.ways.prefix_moves import PrefixMoves
from prfaas.serving.gateway.ways.ready_requests import (
    DecidedRequest,
    DirectRequest,
    EarlyRequest,
    KeptRequest,
    LocalRequest,
    MovedRequest,
    MovingRequest,
    ReadyRequest,
)
from prfaas.serving.gateway.ways.remote_prefill import RemotePrefill
from prfaas.serving.tracing import AttributeValue

# Prefills elsewhere that one request may try before its decode engine prefills.
_PREFILL_ATTEMPTS = 2


class PrefillOrchestrator:
    """Makes requests ready for their decode engines."""

    def __init__(
        self,
        hops: PrefillHops,
        prefixes: PrefixMoves,
        first_tokens: FirstTokenRules,
        context: GatewayContext,
    ) -> None:
        self._hops = hops
        self._prefixes = prefixes
        self._first_tokens = first_tokens
        self._plane = context.plane
        self._context = context

    def decide(self, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt) -> Decision:
        """Where the request goes. Raises NoDecodeInstanceError.

        The length of each prompt enters the statistics from which thresholds and roles are worked out.
        """
        plane, record = self._plane, request.record
        if isinstance(prompt, DirectPrompt):
            record.prompt_tokens = prompt.num_tokens or None
            decision = self._whole(prompt)
            for length in prompt.lengths:
                plane.observe(length, math.ceil(length * decision.uncached_tokens / prompt.num_tokens))
            return decision
        begun_s = time.perf_counter()
        num_tokens = len(prompt.token_ids)
        record.prompt_tokens = num_tokens
        first_from_prefill = self._first_tokens.shows_first(request)
        decision = plane.router.route(num_tokens, prompt.chains, first_from_prefill=first_from_prefill)
        plane.observe(num_tokens, decision.uncached_tokens)
        policy = self._context.running.current.routing.policy
        told = decision_attributes(decision, policy) if record.trace.is_kept else None
        record.since("decide", begun_s, told)
        return decision

    def _whole(self, prompt: DirectPrompt, avoid: Collection[str] = ()) -> Decision:
        """Where a prompt goes that its decode engine prefills itself. Raises NoDecodeInstanceError."""
        return self._plane.router.at_decode(
            prompt.num_tokens,
            prompt.chains,
            reason=prompt.reason,
            reuses=prompt.reason != PROMPT_LOGPROBS,
            avoid=avoid,
        )

    async def prepare_first(
        self, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt, decision: Decision
    ) -> ReadyRequest:
        """Prefill the prompt where `decision` says, and have its KV at the decode engine, or nearly.

        Where a prefill elsewhere samples the first token, this returns once it has (`EarlyRequest`). The KV may be far
        from complete then: `loadable` waits for it.

        A prefill that fails is tried once more inside the PD cluster. After that the decode engine prefills: this
        never raises for a failed prefill.
        """
        if isinstance(prompt, DirectPrompt):
            return self._direct(request, prompt, decision)
        ask = None
        if decision.transfers and self._plane.waits.may_sample(decision):
            ask = self._first_tokens.ask(prompt)
        return await self._prepare(prompt, decision, ask=ask)

    async def _prepare(
        self,
        prompt: TokenizedPrompt,
        decision: Decision,
        avoid: Collection[str] = (),
        ask: FirstTokenAsk | None = None,
    ) -> DecidedRequest:
        """`avoid`: instances that have failed this request. `ask`: the prefill samples the first token, so."""
        request, num_tokens = prompt.request, len(prompt.token_ids)
        if decision.reason == INCOMPATIBLE:
            self._note_rejections(request, decision.decode)
        failed = set(avoid)
        fallback: str | None = None
        for _ in range(_PREFILL_ATTEMPTS):
            if not decision.transfers:
                return await self._from_pool(prompt, decision, fallback)
            if decision.kv_bytes > self._context.staging_bytes(decision.decode):
                return self._at_decode(prompt, decision, "staging", fallback)
            attempt = request.record.start(decision, num_tokens)
            try:
                ready = await RemotePrefill(
                    self._hops,
                    self._prefixes,
                    self._context,
                    prompt=prompt,
                    attempt=attempt,
                    ask=ask,
                ).begin()
            except HopFailedError as failure:
                fallback = failure.reason
                self._fell_back(request, fallback)
                if failure.kept is not None:
                    kept_tokens, is_preempted = failure.kept.usable_tokens, fallback == PREEMPTED
                    if goes_on_at_decode(kept_tokens, num_tokens, is_preempted=is_preempted):
                        return self._from_kept(prompt, attempt.decision, failure.kept, fallback)
                    self._hops.transfers.abandon(failure.kept.ticket, "another engine prefills all of it")
                failed.add(attempt.decision.prefill)
                another = None if failure.hopeless else self._another(prompt, failed, fallback)
                if another is None:
                    break
                decision = another
            else:
                if isinstance(ready, EarlyRequest) and ask is not None and (held := ready.first.held(ask)):
                    # What is prefilled there is still cached, so the other way costs little more than the transfer.
                    self.abandon(ready, f"the first token can't be told alone: {held}")
                    await asyncio.wait((ready.arriving,))
                    ask = None
                    self._context.metrics.first_tokens.labels(held).inc()
                    request.record.fell_back(attempt, f"first-token-{held}")
                    continue
                if isinstance(ready, MovedRequest):
                    attempt.outcome = "done"
                return replace(ready, fallback=fallback)
        reason = "fallback" if decision.transfers else decision.reason
        return self._at_decode(prompt, decision, reason, fallback)

    def _another(self, prompt: TokenizedPrompt, failed: Collection[str], fallback: str) -> Decision | None:
        """Where a prefill is tried that has failed elsewhere; None: nowhere."""
        try:
            # Never to another remote cluster: the client has waited enough. Where notice was given, nothing has gone
            # wrong yet, and its neighbours are as fast.
            return self._plane.router.route(
                len(prompt.token_ids), prompt.chains, avoid=failed, offload=fallback == PREEMPTED
            )
        except NoDecodeInstanceError:
            return None

    async def prepare_again(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt | DirectPrompt,
        avoid: Collection[str],
        near_after: str | None = None,
    ) -> ReadyRequest:
        """The same for a request that instances `avoid` have failed, by a new decision.

        `near_after`: inside of the PD cluster, since a prefill elsewhere has failed for that reason. Raises
        NoDecodeInstanceError.
        """
        if isinstance(prompt, DirectPrompt):
            return self._direct(request, prompt, self._whole(prompt, avoid))
        decision = self._plane.router.route(
            len(prompt.token_ids), prompt.chains, avoid=avoid, offload=near_after is None
        )
        ready = await self._prepare(prompt, decision, avoid)
        return replace(ready, fallback=ready.fallback or near_after)

    async def loadable(self, early: EarlyRequest, rest: TokenizedPrompt) -> DecidedRequest:
        """The request of `rest`, which continues `early` after its first token, ready for the decode engine.

        Waits until the transfer is complete, or nearly. Raises HopFailedError if it will not be.
        """
        await asyncio.wait((early.arriving, early.soon), return_when=asyncio.FIRST_COMPLETED)
        if not early.arriving.done():
            return MovingRequest(
                decision=early.decision,
                prompt=rest,
                prefix=early.prefix,
                first_token=early.first_token,
                fallback=early.fallback,
                transfer=early.soon.result(),
                arriving=early.arriving,
            )
        return replace(self._result(early), prompt=rest)

    async def arrived(self, moving: MovingRequest) -> DecidedRequest:
        """Wait for the rest of the KV that the decode engine waits for too; what became of it.

        If it does not come, the decode engine learns that as well, and prefills.
        """
        await asyncio.wait((moving.arriving,))
        try:
            return self._result(moving)
        except HopFailedError as failure:
            prompt, decision, fallback = moving.prompt, moving.decision, failure.reason
            if failure.kept is None:
                local = self._at_decode(prompt, decision, "fallback", fallback)
                return replace(local, first_token=moving.first_token)
            # The decode engine has the ticket, and finds what has come by itself.
            kept = self._from_kept(prompt, decision, failure.kept, fallback)
            return replace(kept, first_token=moving.first_token)

    def _result(self, moving: EarlyRequest | MovingRequest) -> DecidedRequest:
        """What has arrived. Raises HopFailedError."""
        try:
            moved = moving.arriving.result()
        except HopFailedError as failure:
            self._fell_back(moving.request, failure.reason)
            raise
        moving.request.record.attempts[-1].outcome = "done"
        return replace(moved, prompt=moving.prompt, first_token=moving.first_token, fallback=moving.fallback)

    def _fell_back(self, request: ServingRequest, reason: str) -> None:
        request.record.fell_back(request.record.attempts[-1], reason)
        self._context.metrics.fallbacks.labels(reason).inc()

    def _from_kept(
        self, prompt: TokenizedPrompt, decision: Decision, kept: KeptPart, fallback: str
    ) -> KeptRequest:
        """The decode engine loads what has come of a broken transfer, and computes the rest."""
        record, left_tokens = prompt.request.record, len(prompt.token_ids) - kept.usable_tokens
        self._context.metrics.kept_tokens.inc(kept.usable_tokens - kept.ticket.skip_tokens)
        record.note(f"{decision.decode} goes on after {kept.usable_tokens} tokens that had come")
        local = self._at_decode(prompt, decision, "kept", fallback)
        mine = structs.replace(local.decision, prefill_tokens=left_tokens)
        record.attempts[-1].decision = mine
        return KeptRequest(
            decision=mine, prompt=prompt, prefix=local.prefix, fallback=fallback, transfer=kept
        )

    async def _from_pool(
        self, prompt: TokenizedPrompt, decision: Decision, fallback: str | None
    ) -> LocalRequest:
        """The decode instance prefills itself, after what another pool has of the prompt has come."""
        moved = MovedPrefix(decision)
        if decision.cache_transfer is not None and decision.cache_transfer.from_pool:
            moved = await self._prefixes.move(prompt, decision)
        local = self._at_decode(prompt, moved.decision, decision.reason, fallback)
        return replace(local, prefix=moved)

    def delivered(self, ready: ReadyRequest) -> None:
        """The decode engine answers, so it holds the prompt now."""
        prompt = ready.prompt
        for chains in prompt.chains if isinstance(prompt, DirectPrompt) else (prompt.chains,):
            self._plane.prefixes.expect(ready.decode, chains)

    def abandon(self, ready: ReadyRequest, reason: str) -> None:
        """The decode engine may never take the transfer: have its staging freed."""
        transfer = ready.given_up()
        if transfer is not None:
            self._hops.transfers.abandon(transfer.ticket, reason)

    def _note_rejections(self, request: ServingRequest, consumer: str) -> None:
        for producer in self._plane.members.instances:
            why = self._plane.compatibility.reason(producer, consumer)
            if why is not None:
                request.record.note(f"{producer} may send nothing to {consumer}: {why}")

    def _direct(self, request: ServingRequest, prompt: DirectPrompt, decision: Decision) -> DirectRequest:
        """The decode engine gets the request as it is."""
        request.record.direct_reason = prompt.reason
        self._context.metrics.direct.labels(prompt.reason).inc()
        if prompt.num_tokens:
            request.record.start(decision, prompt.num_tokens).outcome = "done"
        return DirectRequest(decision=decision, prompt=prompt, asked=request)

    def _at_decode(
        self, prompt: TokenizedPrompt, decision: Decision, reason: str, fallback: str | None
    ) -> LocalRequest:
        """The decode instance of `decision` prefills itself."""
        self._context.metrics.direct.labels(reason).inc()
        if decision.transfers:
            # The policy did not ask what the decode instance can reuse. Attention blocks that need not be sent
            # are a bound.
            decision = structs.replace(
                decision,
                route=Route.LOCAL,
                prefill=decision.decode,
                prefill_tokens=len(prompt.token_ids) - decision.skip_tokens,
                skip_tokens=0,
                kv_bytes=0,
                reason=reason,
                cache_transfer=None,
            )
        prompt.request.record.start(decision, len(prompt.token_ids)).outcome = "done"
        return LocalRequest(decision=decision, prompt=prompt, prefix=MovedPrefix(decision), fallback=fallback)


def decision_attributes(decision: Decision, policy: str) -> dict[str, AttributeValue]:
    """What a decision's span tells."""
    told: dict[str, AttributeValue] = {
        "prfaas.policy": policy,
        "prfaas.route": str(decision.route),
        "prfaas.reason": decision.reason,
        "prfaas.uncached_tokens": decision.uncached_tokens,
        "prfaas.prefill_tokens": decision.prefill_tokens,
        "prfaas.skip_tokens": decision.skip_tokens,
        "prfaas.prefill.instance": decision.prefill,
        "prfaas.decode.instance": decision.decode,
    }
    for name, value in (
        ("prfaas.threshold_tokens", decision.threshold_tokens),
        ("prfaas.predicted_ttft_s", decision.predicted_ttft_s),
    ):
        # No attribute in place of "never" and "unknown".
        if math.isfinite(value):
            told[name] = float(value)
    return told
