"""One engine prefills and sends the KV to another: the request and the transfer, side by side."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prfaas.core.link.patience import late_after_s
from prfaas.core.prefix.hashing import MediaItem
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.gateway.bodies import (
    JSON_BYTES_PER_TOKEN,
    Json,
    cached_tokens_of,
    media_prefill_body,
    prefill_body,
)
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import FROZEN, OWN_RESOURCES, Blame, EngineCallError, accuse
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest, Tenants
from prfaas.serving.gateway.request_log import TransferredBytes
from prfaas.serving.gateway.ways.kv_transfer import (
    BLAMES_NOBODY,
    CONSUMER_FROZEN,
    CONSUMER_SILENT,
    HOPELESS,
    INCOMPATIBLE,
    LINK_SILENT,
    LINK_SLOW,
    PREEMPTED,
    HopFailedError,
    KeptPart,
    KvTransfers,
    StartedTransfer,
    TransferDone,
    TransferFailedError,
    kept_part,
)
from prfaas.serving.tasks import BackgroundTasks, end_all
from prfaas.serving.tracing import CANCELLED, AttributeValue, RequestSpans
from prfaas.serving.transport.protocol.ticket import (
    PLAIN,
    TRANSFER_ID_BYTES,
    Ticket,
    TransferAttributes,
    prompt_digest,
)

logger = logging.getLogger(__name__)

# How long a consumer may take to answer before it is blamed in place of the producer.
_ASK_CONSUMER_S = 1.0
# While a transfer is not announced, its producer is asked that often whether it may send at all.
_ASK_PRODUCER_S = 0.25

T = TypeVar("T")
Arrival = asyncio.Task[TransferredBytes]


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """`producer` sends the KV of a prompt to `consumer`."""

    producer: str
    consumer: str
    token_ids: Sequence[int]
    """The tokens whose KV is wanted at the consumer."""
    skip_tokens: int
    """Leading tokens whose attention blocks the consumer holds."""
    kv_bytes: int
    """What is expected to move: `Decision.kv_bytes`."""
    media: Sequence[MediaItem] = ()
    """In the whole prompt. With any the producer renders it from the client's body."""
    attributes: TransferAttributes = PLAIN
    """What its ticket is to say of it, less whose it is."""
    sealed_from: str | None = None
    """The sealed ticket of a prefix that the producer loads first."""
    sampling: Json | None = None
    """How the producer samples its one token; None: in the cheapest way, since nobody wants it."""
    on_answer: Callable[[bytes], None] | None = None
    """Gets the producer's answer as soon as it has come. Raises ValueError for what is none."""
    left_s: Callable[[], float] = float
    """Seconds until its last byte has left the producer, as predicted."""


class HopTrace:
    """The two spans begin together, and each ends by itself."""

    def __init__(self, trace: RequestSpans, spec: TransferSpec, plane: LivePlane) -> None:
        producer, consumer = (
            plane.members.instance(spec.producer).cluster,
            plane.members.instance(spec.consumer).cluster,
        )
        self._spec = spec
        self._links = plane.links
        self._resent_bytes = plane.links.resent_bytes(spec.producer, spec.consumer)
        purpose = "prefix" if spec.attributes.service.background else "request"
        self._prefill = trace.open(
            "prefill",
            {
                "prfaas.instance": spec.producer,
                "prfaas.cluster": producer,
                "prfaas.prompt_tokens": len(spec.token_ids),
                "prfaas.kv.purpose": purpose,
            },
            asks_engine=True,
        )
        self._transfer = trace.open(
            "kv_transfer",
            {
                "prfaas.kv.producer": spec.producer,
                "prfaas.kv.consumer": spec.consumer,
                "prfaas.kv.link": producer if producer == consumer else f"{producer}->{consumer}",
                "prfaas.kv.skip_tokens": spec.skip_tokens,
                "prfaas.kv.expected_bytes": spec.kv_bytes,
                "prfaas.kv.purpose": purpose,
            },
        )

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """For the producer, whose own spans become children of the prefill."""
        return self._prefill.headers(headers)

    def prefilled(self, cached_tokens: int | None) -> None:
        """The producer has answered. `cached_tokens`: what it reused, by its own word."""
        if cached_tokens is not None:
            self._prefill.tell({"gen_ai.usage.cache_read.input_tokens": cached_tokens})
        self._prefill.end()

    def arrived(self, arrival: "asyncio.Task[TransferredBytes]") -> None:
        """The transfer is over; a failed one's span is left for `failed`, which knows why."""
        if arrival.cancelled() or arrival.exception() is not None:
            return
        moved = arrival.result()
        told: dict[str, AttributeValue] = {
            "prfaas.kv.bytes": moved.total_bytes,
            "prfaas.kv.wire_bytes": moved.total_bytes - moved.spared_bytes,
            "prfaas.kv.overlapped_bytes": moved.overlapped_bytes,
            "prfaas.kv.overlapped_fraction": moved.overlapped_fraction,
        }
        now_bytes = self._links.resent_bytes(self._spec.producer, self._spec.consumer)
        if self._resent_bytes is not None and now_bytes is not None:
            # The count starts again with the producer's process.
            told["prfaas.kv.link_resent_bytes"] = max(now_bytes - self._resent_bytes, 0)
        self._transfer.tell(told)
        self._transfer.end()

    def failed(self, reason: str, *, in_transfer: bool) -> None:
        """One of the two has failed, in one word; what is open of the other ends with it."""
        self._transfer.end(reason if in_transfer else CANCELLED)
        self._prefill.end(CANCELLED if in_transfer else reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHop:
    """A prefill and its transfer that are under way."""

    spec: TransferSpec
    ticket: Ticket
    sealed: str
    """The ticket as the producer is told it."""
    body: bytes
    """The producer's request."""
    request: ServingRequest
    spans: HopTrace
    soon: "asyncio.Future[StartedTransfer] | None"
    """Gets the transfer when a request for the KV may be sent; None: nobody waits for that."""


class PrefillHop:
    """Has a producer prefill and send, reports producers that fail, and frees what they leave in staging."""

    def __init__(
        self,
        key: bytes,
        transfers: KvTransfers,
        tenants: Tenants,
        context: GatewayContext,
    ) -> None:
        """`key` seals tickets."""
        self._key = key
        self._tenants = tenants
        self._running = context.running
        self._transfers = transfers
        self._plane = context.plane
        self._client = context.client
        self._metrics = context.metrics
        self._json_threads = context.json_threads
        self._options = context.options
        self._abandoning = BackgroundTasks()
        self._arriving: dict[Arrival, TransferSpec] = {}
        self._frozen: dict[str, str] = {}
        self._given_up: dict[Arrival, TransferFailedError] = {}

    def frozen(self, name: str, reason: str | None) -> None:
        """An instance is frozen: nothing waits any longer for what it was to send or to receive. None: not any more."""
        if reason is None:
            self._frozen.pop(name, None)
            return
        self._frozen[name] = reason
        for arrival, spec in self._arriving.items():
            if name in (spec.producer, spec.consumer):
                arrival.cancel()

    def silent(self, producer: str, consumer: str, sentence: str) -> None:
        """The producer has given up its path to the consumer: nothing waits for what it was to send there."""
        for arrival, spec in self._arriving.items():
            if (producer, consumer) == (spec.producer, spec.consumer):
                self._give_up(arrival, LINK_SILENT, f"{producer} to {consumer}: {sentence}")

    def noticed(self, producer: str, notice_s: float) -> None:
        """The producer is taken away in so many seconds: what it would not have sent until then goes elsewhere now."""
        for arrival, spec in self._arriving.items():
            if spec.producer == producer and (left_s := spec.left_s()) > notice_s:
                sentence = f"{producer} is gone in {notice_s:g} s, and this would have taken {left_s:.1f} s"
                self._give_up(arrival, PREEMPTED, sentence)

    def _give_up(self, arrival: Arrival, reason: str, sentence: str) -> None:
        self._given_up[arrival] = TransferFailedError(reason, sentence)
        arrival.cancel()

    async def run(
        self,
        spec: TransferSpec,
        request: ServingRequest,
        soon: "asyncio.Future[StartedTransfer] | None" = None,
        *,
        keeps: bool = False,
    ) -> TransferDone:
        """Prefill and move the KV, until all bytes are at the consumer.

        `soon` gets the transfer some time (`transfer.decode_lead_s`) before that, perhaps before the prefill's end: a
        request for the KV may be sent then. If this fails later, the consumer prefills such a request itself.

        Raises:
            HopFailedError: the prefill or the transfer failed. What has arrived is freed, or kept as `keeps` allows.
        """
        # 1. A ticket that lets the producer write at the consumer, and the producer's request.
        ticket, sealed, body = await self._json_threads.run(
            len(spec.token_ids) * JSON_BYTES_PER_TOKEN, self._sealed_request, spec, request
        )
        spans = HopTrace(request.record.trace, spec, self._plane)
        hop = OpenHop(
            spec=spec,
            ticket=ticket,
            sealed=sealed,
            body=body,
            request=request,
            spans=spans,
            soon=soon,
        )
        try:
            with self._metrics.in_flight_transfers.track_inprogress():
                # 2. The producer prefills and sends; the consumer's ranks say when all bytes are there.
                return await self._prefill_and_transfer(hop)
        except BaseException as error:
            # None: the client has left. No request will load what has arrived then either.
            failure = error if isinstance(error, EngineCallError | TransferFailedError) else None
            kept: KeptPart | None = None
            try:
                if keeps and failure is not None:
                    within_s = self._options.abandon_timeout_s
                    kept = await kept_part(self._transfers, ticket, sealed, failure, within_s)
            finally:
                if kept is None:
                    self.abandon(ticket, "the request was cancelled" if failure is None else str(failure))
                word = CANCELLED if failure is None else failure.reason
                spans.failed(word, in_transfer=isinstance(failure, TransferFailedError))
            if failure is None:
                raise
            if failure.reason == INCOMPATIBLE:
                request.record.note(f"{spec.producer} and {spec.consumer} are incompatible: {failure}")
            raise self._report(spec, failure, kept) from None

    def abandon(self, ticket: Ticket, reason: str) -> None:
        """Have the staging of a transfer freed, in the background, when its consumer may never take it."""

        async def abandon() -> None:
            with self._metrics.background_tasks.track_inprogress():
                await self._transfers.abandon(ticket, reason, self._options.abandon_timeout_s)

        # In the background, since it must also happen when this request's own task is being cancelled.
        self._abandoning.start(abandon())

    async def close(self) -> None:
        """Wait for the abandonments under way (each is bounded)."""
        await self._abandoning.finish()

    def _sealed_request(self, spec: TransferSpec, request: ServingRequest) -> tuple[Ticket, str, bytes]:
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer=spec.producer,
            consumer=spec.consumer,
            num_tokens=len(spec.token_ids),
            skip_tokens=spec.skip_tokens,
            prompt_digest=prompt_digest(spec.token_ids, request.salt, request.adapter, spec.media),
            expires_at_s=time.time() + self._options.ticket_lifetime_s,
            attributes=self._tenants.of_tenant(spec.attributes, request.salt),
        )
        sealed = self._as_told(ticket.seal(self._key))
        return ticket, sealed, self._prefill_request(spec, request, sealed)

    def _as_told(self, sealed_ticket: str) -> str:
        """The ticket as the producer is told it."""
        return sealed_ticket

    @staticmethod
    def _prefill_request(spec: TransferSpec, request: ServingRequest, sealed: str) -> bytes:
        if spec.media:
            limit = "max_output_tokens" if request.endpoint is Endpoint.RESPONSES else "max_tokens"
            return media_prefill_body(request.body, sealed, limit, request.salt)
        return prefill_body(
            request.model,
            spec.token_ids,
            sealed,
            salt=request.salt,
            sealed_from=spec.sealed_from,
            sampling=spec.sampling,
        )

    async def _prefill(self, hop: OpenHop) -> bytes:
        """The producer's answer. Raises EngineCallError."""
        producer = self._plane.members.instance(hop.spec.producer)
        headers, timeout_s = hop.spans.headers(hop.request.headers), self._options.prefill_timeout_s
        endpoint = hop.request.endpoint if hop.spec.media else Endpoint.COMPLETIONS
        answer = await self._client.call(producer, endpoint.path, hop.body, headers, timeout_s)
        hop.spans.prefilled(cached_tokens_of(answer))
        return answer

    async def _prefill_and_transfer(self, hop: OpenHop) -> TransferDone:
        """The request and the transfer at the same time; the first to fail ends the other."""
        spec, clock = hop.spec, time.perf_counter
        start_s, late_s = clock(), self._deadline_s(spec)
        self._check_frozen(spec)
        loop, waiting = asyncio.get_running_loop(), self._wait(hop, self._options.prefill_timeout_s + late_s)
        # Two tasks and no group: each more costs every request some percent of the gateway's CPU time.
        prefilling = loop.create_task(self._prefill(hop))
        arrival = loop.create_task(waiting)
        self._arriving[arrival] = spec
        arrival.add_done_callback(hop.spans.arrived)
        try:
            await asyncio.wait((prefilling, arrival), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                # Raises what went wrong with it. If nothing did, only the prefill's answer is missing.
                self._arrived(spec, arrival)
            answer = await prefilling
            prefill_s = clock() - start_s
            _take(spec, answer)
            started = self._started(hop, answer)
            await self._wait_for_rest(hop, arrival, late_s)
            moved = self._arrived(spec, arrival)
            cached_tokens = moved.cached_tokens if started.cached_tokens is None else started.cached_tokens
            return TransferDone(
                ticket=hop.ticket,
                sealed=started.sealed,
                cached_tokens=cached_tokens,
                moved=moved,
                prefill_s=prefill_s,
                transfer_s=clock() - start_s,
            )
        finally:
            del self._arriving[arrival]
            self._given_up.pop(arrival, None)
            await end_all(prefilling, arrival)

    def _wait(self, hop: OpenHop, timeout_s: float) -> Coroutine[Any, Any, TransferredBytes]:
        """Waits for all bytes of the transfer. Raises TransferFailedError, at once where it can't be."""
        spec = hop.spec
        _check_compatible(self._plane.compatibility.reason(spec.producer, spec.consumer))
        lead_s = self._running.current.transfer.decode_lead_s if hop.soon is not None else 0.0

        def soon(cached_tokens: int) -> None:
            tell(hop.soon, StartedTransfer(hop.ticket, hop.sealed, cached_tokens))

        return self._transfers.wait(hop.ticket, timeout_s, lead_s, soon)

    def _started(self, hop: OpenHop, answer: bytes) -> StartedTransfer:
        """The transfer, now that the producer has answered."""
        return StartedTransfer(hop.ticket, hop.sealed, cached_tokens_of(answer))

    def _arrived(self, spec: TransferSpec, arrival: Arrival) -> TransferredBytes:
        """What a transfer that is over has moved. Raises TransferFailedError."""
        if arrival.cancelled():
            self._check_frozen(spec)
            if arrival in self._given_up:
                raise self._given_up[arrival]
            raise TransferFailedError(FROZEN, f"{spec.producer} or {spec.consumer} was frozen for a moment")
        return arrival.result()

    def _check_frozen(self, spec: TransferSpec) -> None:
        if spec.consumer in self._frozen:
            raise TransferFailedError(CONSUMER_FROZEN, f"{spec.consumer}: {self._frozen[spec.consumer]}")
        if spec.producer in self._frozen:
            raise TransferFailedError(FROZEN, f"{spec.producer}: {self._frozen[spec.producer]}")

    async def _wait_for_rest(self, hop: OpenHop, arrival: Arrival, late_s: float) -> None:
        """The prefill has answered: see that the transfer ends in time. Raises TransferFailedError."""
        if arrival.done():
            return
        spec = hop.spec
        if not await self._is_announced(hop, arrival):
            await self._ask_consumer(spec)
            if not arrival.done() and not self._transfers.announced(hop.ticket):
                raise TransferFailedError(
                    "not-announced", f"{spec.producer} prefilled but opened no transfer to {spec.consumer}"
                )
        if not arrival.done():
            await asyncio.wait((arrival,), timeout=late_s)
        if not arrival.done():
            await self._ask_consumer(spec)
            reason = "transfer-deadline" if self._link_bits_per_s(spec) is None else LINK_SLOW
            raise TransferFailedError(reason, f"not complete {late_s:.0f} s after the prefill")

    async def _ask_consumer(self, spec: TransferSpec) -> None:
        """Before the producer is blamed for what a consumer has not told. Raises TransferFailedError."""
        if not await self._transfers.answers(spec.consumer, _ASK_CONSUMER_S):
            raise TransferFailedError(CONSUMER_SILENT, f"the KV port of {spec.consumer} does not answer")

    async def _is_announced(self, hop: OpenHop, arrival: Arrival) -> bool:
        """Wait for the transfer to be opened. Raises TransferFailedError as soon as it is known that it cannot be."""
        spec, clock = hop.spec, self._plane.loop_clock
        until_s = clock() + self._options.announce_grace_s
        _check_compatible(self._plane.compatibility.reason(spec.producer, spec.consumer))
        while not self._transfers.announced(hop.ticket):
            left_s = until_s - clock()
            # Not asked at once: most transfers are announced in a moment, and this would hold them up.
            await asyncio.wait((arrival,), timeout=min(_ASK_PRODUCER_S, max(left_s, 0.0)))
            if arrival.done():
                break
            await self._plane.rank_stats.ask(spec.producer)
            _check_compatible(self._plane.compatibility.reason(spec.producer, spec.consumer))
            if left_s <= 0:
                return False
        return True

    def _deadline_s(self, spec: TransferSpec) -> float:
        """Seconds after the prefill's end at which a transfer is given up.

        A transfer that stands still ends earlier, by the receiver's own deadlines.
        """
        bandwidth_bits_per_s = self._link_bits_per_s(spec) or math.inf
        return late_after_s(spec.kv_bytes, bandwidth_bits_per_s, self._options.transfer_grace_s)

    def _link_bits_per_s(self, spec: TransferSpec) -> float | None:
        """As the deployment file says; None inside of a cluster."""
        producer, consumer = (self._plane.members.instance(name) for name in (spec.producer, spec.consumer))
        link = self._running.current.link(producer.cluster, consumer.cluster)
        return None if link is None else link.bandwidth_bits_per_s

    def _report(
        self,
        spec: TransferSpec,
        failure: EngineCallError | TransferFailedError,
        kept: KeptPart | None = None,
    ) -> HopFailedError:
        """Tell the control plane whom a failure blames: the producer, the consumer or nobody, never both."""
        logger.warning("prefill at %s for %s failed: %s", spec.producer, spec.consumer, failure)
        if isinstance(failure, EngineCallError):
            if not failure.is_clients_fault:
                accuse(self._plane, spec.producer, failure)
            hopeless = failure.is_clients_fault or failure.reason == OWN_RESOURCES
            return HopFailedError(failure.reason, hopeless=hopeless, kept=kept)
        if failure.reason == CONSUMER_SILENT:
            self._plane.health.suspect(spec.consumer, str(failure))
        elif failure.reason not in BLAMES_NOBODY:
            self._plane.health.suspect(spec.producer, str(failure))
        # No other producer could reach such a consumer either; it prefills, if it lives.
        return HopFailedError(failure.reason, hopeless=failure.reason in HOPELESS, kept=kept)


def tell(told: "asyncio.Future[T] | None", value: T) -> None:
    """Whoever waits for it has it now."""
    if told is not None and not told.done():
        told.set_result(value)


def _check_compatible(rejection: str | None) -> None:
    if rejection is not None:
        raise TransferFailedError(INCOMPATIBLE, rejection)


def _take(spec: TransferSpec, answer: bytes) -> None:
    """Whoever waits for the producer's answer has it now. Raises EngineCallError for one that is none."""
    if spec.on_answer is not None:
        try:
            spec.on_answer(answer)
        except ValueError as error:
            raise EngineCallError(spec.producer, "garbled", str(error), blame=Blame.NONE) from None
