"""Drives one request's prefill: tokenize, decide, prefill elsewhere, follow the transfer, fall back."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prfaas.gateway.bodies import prefill_body
from prfaas.gateway.engine_client import EngineClient, EngineError
from prfaas.gateway.health import HealthWatch
from prfaas.gateway.instances import InstancePool
from prfaas.gateway.journey import Journey
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.offloop import OffLoop
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.prefixes import Prefixes
from prfaas.gateway.prompts import ChatPrompt, DirectPrompt, Prompt
from prfaas.gateway.tokenizing import Tokenizing
from prfaas.gateway.transfer_bound import TransferBound
from prfaas.gateway.transfers import Moved, TransferFailedError, Transfers
from prfaas.scheduling import Decision, Route, RoutingRequest, View, static_threshold
from prfaas.transport.ticket import Ticket, prompt_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """`threshold_tokens`: offload above it (0 always, infinity never). `key` seals tickets."""

    model: str
    max_model_len: int
    threshold_tokens: float
    key: bytes


@dataclass(frozen=True, slots=True)
class _Prefilled:
    ticket: Ticket
    sealed: str
    moved: Moved
    prefill_s: float
    transfer_s: float


class _PrefillFailedError(Exception):
    """A prefill elsewhere came to nothing. `hopeless`: another one would fare no better."""

    def __init__(self, reason: str, *, hopeless: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hopeless = hopeless


class Driver:
    """Takes a prompt to the point where its decode engine can answer."""

    def __init__(
        self,
        settings: DriverSettings,
        *,
        pool: InstancePool,
        client: EngineClient,
        transfers: Transfers,
        bound: TransferBound,
        tokenizing: Tokenizing,
        prefixes: Prefixes,
        health: HealthWatch,
        metrics: Metrics,
        offloop: OffLoop,
        options: GatewayOptions,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._client = client
        self._transfers = transfers
        self._bound = bound
        self._tokenizing = tokenizing
        self._prefixes = prefixes
        self._health = health
        self._metrics = metrics
        self._offloop = offloop
        self._options = options
        self._background: set[asyncio.Task[None]] = set()

    async def prepare(self, prompt: Prompt, samples: int, headers: Mapping[str, str]) -> Journey:
        """Prefill `prompt`, of which `samples` answers are wanted, where it is best done.

        Raises NoDecodeInstanceError; everything else ends in a local prefill.
        """
        if isinstance(prompt, DirectPrompt):
            return self._direct(prompt.reason)
        start = self._decide(RoutingRequest(0), self._pool.view(), math.inf)
        try:
            await self._prefixes.learn(self._pool[start.decode])
            tokenized = await self._tokenizing.tokenize(prompt, self._pool[start.decode])
        except EngineError as error:
            return self._direct("refused" if error.is_clients_fault else "not-tokenized")
        if tokenized is None:
            return self._direct("not-tokenized")
        ids = tokenized.token_ids
        if not 1 < len(ids) < self._settings.max_model_len:
            return self._direct("length")

        # Without exact ids the engine tokenizes by itself; the digest in the ticket then guards the KV.
        takes_ids = isinstance(prompt, ChatPrompt) and prompt.takes_ids and tokenized.exact
        chain = self._prefixes.chain(ids)
        request = RoutingRequest(len(ids), self._prefixes.cached_tokens(self._pool, chain))
        decision = self._decide(request, self._pool.view(), self._settings.threshold_tokens)
        if decision.transfers and not self._bound.fits(decision, len(ids) - 1):
            return replace(self._direct("staging"), uncached_tokens=decision.uncached_tokens, chain=chain)
        fallback: str | None = None
        failed: set[str] = set()
        while decision.transfers and len(failed) < 2:
            try:
                prefilled = await self._prefill(decision, ids, samples, headers)
            except _PrefillFailedError as failure:
                fallback = failure.reason
                self._metrics.fallbacks.labels(fallback).inc()
                if failure.hopeless:
                    return replace(
                        self._direct("fallback"), uncached_tokens=decision.uncached_tokens, fallback=fallback
                    )
                failed.add(decision.prefill)
                # Never to another remote cluster: the client has waited enough.
                decision = self._decide(request, self._pool.view().without(failed), math.inf)
                continue
            self._prefixes.add(decision.prefill, chain)
            return Journey(
                route=decision.route,
                prefill=decision.prefill,
                decode=decision.decode,
                reason=decision.reason,
                uncached_tokens=decision.uncached_tokens,
                skip_tokens=decision.skip_tokens,
                chain=chain,
                reuse_ids=ids if takes_ids else None,
                ticket=prefilled.ticket,
                sealed=prefilled.sealed,
                moved=prefilled.moved,
                prefill_s=prefilled.prefill_s,
                transfer_s=prefilled.transfer_s,
                fallback=fallback,
            )
        reason = "fallback" if decision.transfers else decision.reason
        self._metrics.direct.labels(reason).inc()
        return Journey(
            route=Route.LOCAL,
            prefill=decision.decode,
            decode=decision.decode,
            reason=reason,
            uncached_tokens=decision.uncached_tokens,
            chain=chain,
            reuse_ids=ids if takes_ids else None,
            fallback=fallback,
        )

    def redirect(self, journey: Journey, failed: set[str]) -> Journey | None:
        """The same request at another decode instance, prefilled there; None when there is no other."""
        view = self._pool.view().without(failed)
        if not view.decoders():
            return None
        decision = self._decide(RoutingRequest(0), view, math.inf)
        return replace(
            journey,
            route=Route.LOCAL,
            prefill=decision.decode,
            decode=decision.decode,
            reason="decode-unreachable",
            ticket=None,
            sealed=None,
            moved=None,
            skip_tokens=0,
        )

    def delivered(self, journey: Journey) -> None:
        """The decode engine answers: it holds the prompt now."""
        self._prefixes.add(journey.decode, journey.chain)

    def abandon(self, journey: Journey, reason: str) -> None:
        """The decode engine may never take the journey's transfer: have its staging freed, in the
        background."""
        if journey.ticket is not None:
            self._abandon(journey.ticket, reason)

    async def close(self) -> None:
        """Wait for the abandonments under way (each is bounded)."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def _direct(self, reason: str) -> Journey:
        decision = self._decide(RoutingRequest(0), self._pool.view(), math.inf)
        self._metrics.direct.labels(reason).inc()
        return Journey(Route.LOCAL, decision.decode, decision.decode, reason)

    @staticmethod
    def _decide(request: RoutingRequest, view: View, threshold_tokens: float) -> Decision:
        return static_threshold(request, view, threshold_tokens)

    async def _prefill(
        self, decision: Decision, ids: Sequence[int], samples: int, headers: Mapping[str, str]
    ) -> _Prefilled:
        ticket = Ticket.issue(
            producer=decision.prefill,
            consumer=decision.decode,
            num_tokens=len(ids) - 1,
            skip_tokens=decision.skip_tokens,
            prompt_digest=prompt_digest(ids[:-1]),
            lifetime_s=self._options.ticket_lifetime_s,
            now_s=time.time(),
            uses=samples,
        )
        sealed = ticket.seal(self._settings.key)
        body = await self._offloop.run(len(ids) * 5, prefill_body, self._settings.model, ids[:-1], sealed)
        prefilled: _Prefilled | None = None
        failure: EngineError | TransferFailedError | None = None
        try:
            with self._metrics.in_flight_transfers.track_inprogress(), self._pool.busy(decision.prefill):
                try:
                    prefilled = await self._both(decision, ticket, sealed, body, headers)
                except* (EngineError, TransferFailedError) as failures:
                    failure = _first(failures)
        finally:
            # Also when the client has left: nobody will come for what has arrived.
            if prefilled is None:
                self._abandon(ticket, str(failure) if failure is not None else "the request was cancelled")
        if prefilled is None:
            assert failure is not None
            raise self._judged(decision, failure)
        return prefilled

    async def _both(
        self, decision: Decision, ticket: Ticket, sealed: str, body: bytes, headers: Mapping[str, str]
    ) -> _Prefilled:
        """The prefill hop and the transfer, side by side; the first to fail ends the other."""
        clock = asyncio.get_running_loop().time
        start_s = clock()
        late_s = self._bound.seconds(decision, ticket)
        prefill_timeout_s = self._options.prefill_timeout_s

        async def prefill() -> float:
            producer = self._pool[decision.prefill]
            await self._client.call(producer, "/v1/completions", body, headers, prefill_timeout_s)
            return clock() - start_s

        async def in_time() -> None:
            await asyncio.wait((hop,))
            await asyncio.wait((arrival,), timeout=self._options.announce_grace_s)
            if not arrival.done() and not self._transfers.announced(decision.decode, ticket.transfer_id):
                raise TransferFailedError(
                    "not-announced",
                    f"{decision.prefill} prefilled but opened no transfer to {decision.decode}",
                )
            if not (await asyncio.wait((arrival,), timeout=late_s))[0]:
                raise TransferFailedError(
                    "transfer-deadline", f"not complete {late_s:.0f} s after the prefill"
                )

        async with asyncio.TaskGroup() as group:
            hop = group.create_task(prefill())
            arrival = group.create_task(
                self._transfers.wait(decision.decode, ticket.transfer_id, prefill_timeout_s + late_s)
            )
            group.create_task(in_time())
        prefill_s, transfer_s, moved = hop.result(), clock() - start_s, arrival.result()
        self._metrics.prefill_seconds.labels(decision.route).observe(prefill_s)
        self._metrics.transfer_seconds.labels(decision.route).observe(transfer_s)
        self._metrics.transferred_bytes.labels(decision.route).inc(moved.total_bytes)
        self._metrics.hidden_bytes.labels(decision.route).inc(moved.hidden_bytes)
        return _Prefilled(ticket, sealed, moved, prefill_s, transfer_s)

    def _judged(self, decision: Decision, failure: EngineError | TransferFailedError) -> _PrefillFailedError:
        """What a failure says about the producer, and about trying another one."""
        logger.warning("prefill at %s for %s failed: %s", decision.prefill, decision.decode, failure)
        if isinstance(failure, EngineError):
            if failure.is_clients_fault:
                return _PrefillFailedError(failure.reason, hopeless=True)
            lost_cache = failure.reason in ("unreachable", "died")
            self._health.suspect(decision.prefill, str(failure), lost_cache=lost_cache)
            return _PrefillFailedError(failure.reason, hopeless=False)
        if failure.reason == "consumer-unreachable":
            # No other producer could reach it either; the decode engine prefills, if it lives.
            return _PrefillFailedError(failure.reason, hopeless=True)
        self._health.suspect(decision.prefill, str(failure))
        return _PrefillFailedError(failure.reason, hopeless=False)

    def _abandon(self, ticket: Ticket, reason: str) -> None:
        async def abandon() -> None:
            with self._metrics.background_tasks.track_inprogress():
                await self._transfers.abandon(
                    ticket.consumer, ticket.transfer_id, reason, self._options.abandon_timeout_s
                )

        # In the background, since it must also happen when this request's own task is being cancelled.
        task = asyncio.get_running_loop().create_task(abandon())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _first(
    failures: BaseExceptionGroup[EngineError | TransferFailedError],
) -> EngineError | TransferFailedError:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
