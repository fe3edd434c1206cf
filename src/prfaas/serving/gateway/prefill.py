"""Carries a routing decision out: prefill where it says, move the KV, and fall back to a local prefill."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from prfaas.core.scheduling import Decision, NoDecodeInstanceError, Route
from prfaas.core.scheduling.preemption import goes_on_at_decode
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.first_token import FirstTokenAsk, FirstTokenHeldError
from prfaas.serving.gateway.hop_failure import INCOMPATIBLE, PREEMPTED, HopFailedError, KeptPart
from prfaas.serving.gateway.kv_transfer import MovedPrefix
from prfaas.serving.gateway.prefill_hop import PrefillHop
from prfaas.serving.gateway.prefix_moves import PrefixMoves
from prfaas.serving.gateway.prompts import DirectPrompt
from prfaas.serving.gateway.remote_prefill import RemotePrefills
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest, TokenizedPrompt

# Prefills elsewhere that one request may try before its decode engine prefills.
_PREFILL_ATTEMPTS = 2


class PrefillOrchestrator:
    """Makes requests ready for their decode engines."""

    def __init__(self, hop: PrefillHop, prefixes: PrefixMoves, context: GatewayContext) -> None:
        self._remote = RemotePrefills(hop, prefixes, context)
        self._prefixes = prefixes
        self._plane = context.plane
        self._metrics = context.metrics
        self._context = context

    async def prepare(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt | DirectPrompt,
        decision: Decision,
        avoid: Collection[str] = (),
        *,
        ask: FirstTokenAsk | None = None,
    ) -> PreparedRequest:
        """Prefill the prompt where `decision` says, and have its KV at the decode engine, or nearly.

        With `ask`, a prefill elsewhere samples the first token, and this returns once it has (`PreparedRequest.first`).
        The KV may be far from complete then: `loadable` waits for it.

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
        held: str | None = None
        for _ in range(_PREFILL_ATTEMPTS):
            if not decision.transfers:
                moved = MovedPrefix(decision)
                if decision.cache_transfer is not None and decision.cache_transfer.from_pool:
                    moved = await self._prefixes.move(request, prompt, decision)
                local = self._at_decode(request, prompt, moved.decision, decision.reason, fallback)
                return replace(local, prefix=moved)
            if decision.kv_bytes > self._context.staging_bytes(decision.decode):
                return self._at_decode(request, prompt, decision, "staging", fallback)
            attempt = request.record.start(decision, num_tokens)
            try:
                prepared = await self._remote.begin(request, prompt, attempt, None if held else ask)
            except FirstTokenHeldError as error:
                # What is prefilled there is still cached, so the other way costs little more than the transfer.
                held = error.reason
                self._metrics.first_tokens.labels(held).inc()
                request.record.fell_back(attempt, f"first-token-{held}")
            except HopFailedError as failure:
                fallback = failure.reason
                request.record.fell_back(attempt, fallback)
                self._metrics.fallbacks.labels(fallback).inc()
                if failure.kept is not None:
                    kept_tokens, is_preempted = failure.kept.usable_tokens, fallback == PREEMPTED
                    if goes_on_at_decode(kept_tokens, num_tokens, is_preempted=is_preempted):
                        return self._from_kept(request, prompt, attempt.decision, failure.kept, fallback)
                    self._remote.give_up(failure.kept, "another engine prefills all of it")
                if failure.hopeless:
                    break
                failed.add(attempt.decision.prefill)
                try:
                    # Never to another remote cluster: the client has waited enough. Where notice was given, nothing
                    # has gone wrong yet, and its neighbours are as fast.
                    decision = self._plane.router.route(
                        num_tokens, prompt.chains, avoid=failed, offload=fallback == PREEMPTED
                    )
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
            decision = self._plane.router.route(0, None, avoid=avoid)
        else:
            decision = self._plane.router.route(len(prompt.token_ids), prompt.chains, avoid=avoid)
        return await self.prepare(request, prompt, decision, avoid)

    async def prepare_near(
        self, request: ServingRequest, prompt: TokenizedPrompt, avoid: Collection[str], fallback: str
    ) -> PreparedRequest:
        """The same inside of the PD cluster, where a prefill elsewhere has failed for the reason `fallback`.

        Raises:
            NoDecodeInstanceError: no engine can decode.
        """
        decision = self._plane.router.route(len(prompt.token_ids), prompt.chains, avoid=avoid, offload=False)
        prepared = await self.prepare(request, prompt, decision, avoid)
        return replace(prepared, fallback=prepared.fallback or fallback)

    async def loadable(
        self, prepared: PreparedRequest, rest: ServingRequest, rest_prompt: TokenizedPrompt
    ) -> PreparedRequest:
        """`rest`, which continues `prepared` after its first token, ready for the decode engine.

        Waits until the transfer is complete, or nearly. Raises HopFailedError if it will not be.
        """
        arriving, soon = prepared.arriving, prepared.soon
        assert arriving is not None and soon is not None
        await asyncio.wait((arriving, soon), return_when=asyncio.FIRST_COMPLETED)
        attempt = rest.record.attempts[-1]
        if not arriving.done():
            ready = replace(soon.result(), arriving=arriving)
        else:
            try:
                ready = arriving.result()
            except HopFailedError as failure:
                rest.record.fell_back(attempt, failure.reason)
                self._metrics.fallbacks.labels(failure.reason).inc()
                raise
            attempt.outcome = "done"
        return replace(ready, prompt=rest_prompt, first=prepared.first, fallback=prepared.fallback)

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
            done = replace(arriving.result(), first=prepared.first, fallback=prepared.fallback)
        except HopFailedError as failure:
            request.record.fell_back(attempt, failure.reason)
            self._metrics.fallbacks.labels(failure.reason).inc()
            assert isinstance(prompt, TokenizedPrompt) and decision is not None
            if failure.kept is not None:
                # The decode engine has the ticket, and finds what has come by itself.
                kept = self._from_kept(request, prompt, decision, failure.kept, failure.reason)
                return replace(kept, first=prepared.first)
            local = self._at_decode(request, prompt, decision, "fallback", failure.reason)
            return replace(local, first=prepared.first)
        attempt.outcome = "done"
        return done

    def _from_kept(
        self,
        request: ServingRequest,
        prompt: TokenizedPrompt,
        decision: Decision,
        kept: KeptPart,
        fallback: str,
    ) -> PreparedRequest:
        """The decode engine loads what has come of a broken transfer, and computes the rest."""
        left_tokens = len(prompt.token_ids) - kept.usable_tokens
        self._metrics.kept_tokens.inc(kept.usable_tokens - kept.ticket.skip_tokens)
        request.record.note(f"{decision.decode} goes on after {kept.usable_tokens} tokens that had come")
        local = self._at_decode(request, prompt, decision, "kept", fallback)
        assert local.decision is not None
        mine = structs.replace(local.decision, prefill_tokens=left_tokens)
        request.record.attempts[-1].decision = mine
        return replace(local, decision=mine, transfer=kept, own_prefill_tokens=left_tokens)

    def delivered(self, prepared: PreparedRequest) -> None:
        """The decode engine answers, so it holds the prompt now."""
        if prepared.prompt is not None:
            self._plane.prefixes.expect(prepared.decode, prepared.prompt.chains)

    def abandon(self, prepared: PreparedRequest, reason: str) -> None:
        """The decode engine may never take the transfer: have its staging freed."""
        self._remote.abandon(prepared, reason)

    def _note_rejections(self, request: ServingRequest, consumer: str) -> None:
        for producer in self._plane.members.instances:
            why = self._plane.compatibility.reason(producer, consumer)
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
