"""Takes one request to where its decode engine can answer: look at the prompt, decide, prefill elsewhere, fall back."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from prfaas.core.deployment import Instance
from prfaas.core.scheduling import Decision, NoDecodeInstanceError, Route
from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import ThreadOffload
from prfaas.serving.gateway.prefill_hop import (
    JSON_BYTES_PER_TOKEN,
    HopFailedError,
    PrefillHops,
    TransferBound,
    TransferDone,
    TransferSpec,
)
from prfaas.serving.gateway.prompts import ChatPrompt, DirectPrompt, TokenPrompt
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.request_log import Attempt
from prfaas.serving.gateway.tokenization import Tokenization, Tokenized

# Prefills elsewhere that one request may try before its decode engine prefills.
_PREFILL_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class _NotLooked:
    reason: str


class PrefillOrchestrator:
    """Prepares requests for their decode engines."""

    def __init__(
        self,
        max_model_len: int,
        *,
        plane: ControlPlane,
        hops: PrefillHops,
        bound: TransferBound,
        tokenizing: Tokenization,
        metrics: Metrics,
        thread_offload: ThreadOffload,
    ) -> None:
        self._max_model_len = max_model_len
        self._plane = plane
        self._hops = hops
        self._bound = bound
        self._tokenizing = tokenizing
        self._metrics = metrics
        self._offloop = thread_offload
        # Whom to ask for token ids; any engine of the deployment knows the same ones.
        self._asked: Instance | None = None

    async def prepare(self, order: ServingRequest) -> PreparedRequest:
        """Prefill the prompt where it is best done.

        Raises NoDecodeInstanceError; everything else ends in a local prefill.
        """
        begun_s = time.perf_counter()
        look = await self._look(order)
        begun_s = order.record.since("tokenize", begun_s)
        if isinstance(look, _NotLooked):
            return self._direct(order, look.reason)
        order.record.prompt_tokens = len(look.token_ids)
        decision = self._plane.route(len(look.token_ids), look.chains)
        self._plane.observe(len(look.token_ids), decision.uncached_tokens)
        order.record.since("decide", begun_s)
        self._asked = self._plane.instance(decision.decode)
        return await self._carried_out(order, look, decision, ())

    async def again(
        self, order: ServingRequest, journey: PreparedRequest, avoid: Collection[str]
    ) -> PreparedRequest:
        """Another way for a request whose decode engines `avoid` have failed it. Raises NoDecodeInstanceError."""
        if journey.look is None:
            return self._direct(order, journey.reason, avoid)
        decision = self._plane.route(len(journey.look.token_ids), journey.look.chains, avoid=avoid)
        return await self._carried_out(order, journey.look, decision, avoid)

    async def resume(
        self, order: ServingRequest, token_ids: Sequence[int], avoid: Collection[str]
    ) -> PreparedRequest:
        """A way for the rest of an answer, whose prompt is `token_ids`. Raises NoDecodeInstanceError."""
        look = await self._looked(order, Tokenized(token_ids, exact=True))
        decision = self._plane.route(len(token_ids), look.chains, avoid=avoid)
        return await self._carried_out(order, look, decision, avoid)

    def delivered(self, journey: PreparedRequest) -> None:
        """The decode engine answers: it holds the prompt now."""
        if journey.look is not None:
            self._plane.expect(journey.decode, journey.look.chains)

    def abandon(self, journey: PreparedRequest, reason: str) -> None:
        """The decode engine may never take the journey's transfer: have its staging freed."""
        if journey.ticket is not None:
            self._hops.abandon(journey.ticket, reason)

    async def _look(self, order: ServingRequest) -> TokenizedPrompt | _NotLooked:
        prompt = order.prompt
        if isinstance(prompt, DirectPrompt):
            return _NotLooked(prompt.reason)
        try:
            tokenized = await self._tokenized(order)
        except EngineCallError as error:
            return _NotLooked("refused" if error.is_clients_fault else "not-tokenized")
        if tokenized is None:
            return _NotLooked("not-tokenized")
        if not 1 < len(tokenized.token_ids) < self._max_model_len:
            return _NotLooked("length")
        return await self._looked(order, tokenized)

    async def _tokenized(self, order: ServingRequest) -> Tokenized | None:
        """Ids of the order's prompt; a dead engine that was asked for them is asked only once."""
        prompt = order.prompt
        assert not isinstance(prompt, DirectPrompt)
        if isinstance(prompt, TokenPrompt):
            return Tokenized(prompt.token_ids, exact=True)
        asked = self._asked or self._plane.instance(self._plane.route(0, None).decode)
        try:
            return await self._tokenizing.tokenize(prompt, asked)
        except EngineCallError as error:
            if error.reason not in ("unreachable", "died"):
                raise
            self._plane.suspect(asked.name, str(error), lost_cache=True)
            self._asked = self._plane.instance(self._plane.route(0, None, avoid=(asked.name,)).decode)
            return await self._tokenizing.tokenize(prompt, self._asked)

    async def _looked(self, order: ServingRequest, tokenized: Tokenized) -> TokenizedPrompt:
        ids = tokenized.token_ids
        chains = await self._offloop.run(
            len(ids) * JSON_BYTES_PER_TOKEN, self._plane.chains, ids, order.salt, order.adapter
        )
        # Without exact ids the engine tokenizes by itself; the digest in the ticket then guards the KV.
        takes_ids = isinstance(order.prompt, ChatPrompt) and order.prompt.takes_ids and tokenized.exact
        return TokenizedPrompt(ids, chains, tokenized.exact, takes_ids)

    def _direct(self, order: ServingRequest, reason: str, avoid: Collection[str] = ()) -> PreparedRequest:
        decision = self._plane.route(0, None, avoid=avoid)
        order.record.direct_reason = reason
        self._metrics.direct.labels(reason).inc()
        return PreparedRequest(Route.LOCAL, decision.decode, decision.decode, reason)

    async def _carried_out(
        self, order: ServingRequest, look: TokenizedPrompt, decision: Decision, avoid: Collection[str]
    ) -> PreparedRequest:
        failed = set(avoid)
        fallback: str | None = None
        for _ in range(_PREFILL_ATTEMPTS):
            if not decision.transfers:
                return self._at_decode(order, look, decision, decision.reason, fallback)
            if not self._bound.fits(decision.decode, len(look.token_ids) - 1, decision.skip_tokens):
                return self._at_decode(order, look, decision, "staging", fallback)
            attempt = order.record.went(decision, len(look.token_ids))
            try:
                journey = await self._elsewhere(order, look, attempt)
            except HopFailedError as failure:
                attempt.outcome = fallback = failure.reason
                self._metrics.fallbacks.labels(fallback).inc()
                if failure.hopeless:
                    break
                failed.add(attempt.decision.prefill)
                try:
                    # Never to another remote cluster: the client has waited enough.
                    decision = self._plane.route(
                        len(look.token_ids), look.chains, avoid=failed, offload=False
                    )
                except NoDecodeInstanceError:
                    break
                continue
            attempt.outcome, attempt.moved = "done", journey.moved
            return replace(journey, fallback=fallback)
        reason = "fallback" if decision.transfers else decision.reason
        return self._at_decode(order, look, decision, reason, fallback)

    def _at_decode(
        self,
        order: ServingRequest,
        look: TokenizedPrompt,
        decision: Decision,
        reason: str,
        fallback: str | None,
    ) -> PreparedRequest:
        """The decode instance of `decision` prefills by itself."""
        self._metrics.direct.labels(reason).inc()
        if decision.transfers:
            # What the decode instance can reuse was not asked; attention blocks that need not be sent are a bound.
            prefill_tokens = len(look.token_ids) - decision.skip_tokens
            decision = replace(
                decision,
                route=Route.LOCAL,
                prefill=decision.decode,
                prefill_tokens=prefill_tokens,
                skip_tokens=0,
                kv_bytes=0,
                reason=reason,
                cache_transfer=None,
            )
        order.record.went(decision, len(look.token_ids)).outcome = "done"
        return PreparedRequest(
            route=Route.LOCAL,
            prefill=decision.decode,
            decode=decision.decode,
            reason=reason,
            look=look,
            decision=decision,
            own_prefill_tokens=decision.prefill_tokens,
            fallback=fallback,
        )

    async def _elsewhere(
        self, order: ServingRequest, look: TokenizedPrompt, attempt: Attempt
    ) -> PreparedRequest:
        """Prefill at another instance than the decode instance. Raises HopFailedError.

        `attempt.decision` becomes the one that was carried out: it may be another instance's turn first.
        """
        ids, decision = look.token_ids, attempt.decision
        prefix = await self._prefix_moved(order, look, decision)
        if decision.cache_transfer is not None:
            held_tokens = len(ids) - decision.prefill_tokens
            if prefix is None:
                # What is left is what the instance held without it.
                held_tokens = min(held_tokens, decision.cache_transfer.skip_tokens)
            decision = replace(decision, cache_transfer=None, prefill_tokens=len(ids) - held_tokens)
        arrived: TransferDone | None = None
        wanted, begun_s = decision.prefill, time.perf_counter()
        try:
            async with self._plane.admit(decision, look.chains) as decision:
                order.record.since("turn", begun_s)
                attempt.decision = decision
                sealed_from = prefix.sealed if prefix is not None and decision.prefill == wanted else None
                hop = TransferSpec(
                    producer=decision.prefill,
                    consumer=decision.decode,
                    token_ids=ids[:-1],
                    skip_tokens=decision.skip_tokens,
                    uses=order.samples,
                    sealed_from=sealed_from,
                )
                self._plane.expect(decision.prefill, look.chains)
                with self._plane.prefilling(decision) as work:
                    arrived = await self._hops.run(hop, order)
                    work.measured()
        finally:
            if prefix is not None and (arrived is None or decision.prefill != wanted):
                self._hops.abandon(prefix.ticket, "the prefill that would have used it failed")
        route, moved = str(decision.route), arrived.moved
        self._metrics.prefill_seconds.labels(route).observe(arrived.prefill_s)
        self._metrics.transfer_seconds.labels(route).observe(arrived.transfer_s)
        self._metrics.transferred_bytes.labels(route).inc(moved.total_bytes)
        self._metrics.hidden_bytes.labels(route).inc(moved.hidden_bytes)
        order.record.took("prefill", arrived.prefill_s)
        order.record.took("transfer", arrived.transfer_s)
        return PreparedRequest(
            route=decision.route,
            prefill=decision.prefill,
            decode=decision.decode,
            reason=decision.reason,
            look=look,
            decision=decision,
            ticket=arrived.ticket,
            sealed=arrived.sealed,
            moved=moved,
            prefill_s=arrived.prefill_s,
            transfer_s=arrived.transfer_s,
            prefix_source=prefix.ticket.producer if prefix is not None else None,
            prefix_bytes=prefix.moved.total_bytes if prefix is not None else 0,
        )

    async def _prefix_moved(
        self, order: ServingRequest, look: TokenizedPrompt, decision: Decision
    ) -> TransferDone | None:
        """The cache transfer that `decision` wants; None if it wants none or it failed: then all is computed."""
        wanted = decision.cache_transfer
        if wanted is None:
            return None
        arrived: TransferDone | None = None
        outcome = "done"
        # The prefill must be left at least one token to compute and one to leave out.
        num_tokens = min(wanted.num_tokens, len(look.token_ids) - 2)
        if num_tokens <= wanted.skip_tokens:
            outcome = "short"
        elif not self._bound.fits(decision.prefill, num_tokens, wanted.skip_tokens):
            outcome = "staging"
        else:
            hop = TransferSpec(
                wanted.source, decision.prefill, look.token_ids[:num_tokens], wanted.skip_tokens
            )
            try:
                # The prefill itself comes later: this is no measurement of its time.
                with self._plane.prefilling(decision):
                    arrived = await self._hops.run(hop, order)
            except HopFailedError as failure:
                outcome = failure.reason
        self._metrics.cache_transfers.labels(outcome).inc()
        order.record.prefix_outcome = outcome
        if arrived is not None:
            self._metrics.cache_transferred_bytes.inc(arrived.moved.total_bytes)
            order.record.prefix_moved = arrived.moved
            order.record.took("cache_transfer", arrived.transfer_s)
        return arrived
