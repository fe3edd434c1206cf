"""One engine prefills for another, which gets the KV: the request and the transfer, side by side.

The KV is pushed by our own transfer, or pulled by vLLM's NIXL connector inside a PD cluster that says so.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

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
    LEAVES_PART,
    LINK_SILENT,
    LINK_SLOW,
    PREEMPTED,
    HopFailedError,
    KeptPart,
    KvTransfers,
    StartedTransfer,
    TransferDone,
    TransferFailedError,
)
from prfaas.serving.tasks import end_all
from prfaas.serving.tracing import CANCELLED, AttributeValue, RequestSpans
from prfaas.serving.transport.protocol.handover import by_nixl, is_by_nixl, ticket_of
from prfaas.serving.transport.protocol.ticket import (
    TICKET_PARAMETER,
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
# While the decode engine has not begun to read by NIXL, that often it is looked whether it has.
_LOOK_S = 0.25

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
    uses: int = 1
    """Requests of the consumer that load it."""
    checkpoint_tokens: int = 0
    """How far its checkpoints are apart; 0: it has none."""
    background: bool = False
    """Whether it leaves a link to others: a prefix that is moved for a prefill, for which only an abundant link is
    worth it (section 3.4.3)."""
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
        members = plane.members
        producer, consumer = members.instance(spec.producer).cluster, members.instance(spec.consumer).cluster
        self._spec = spec
        self._links = plane.links
        self._resent_bytes = plane.links.resent_bytes(spec.producer, spec.consumer)
        purpose = "prefix" if spec.background else "request"
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


class PrefillHops:
    """What all hops share, and those that are under way: each hears at once what becomes of its instances."""

    def __init__(self, key: bytes, transfers: KvTransfers, tenants: Tenants, context: GatewayContext) -> None:
        """`key` seals tickets."""
        self.key = key
        self.transfers = transfers
        self.tenants = tenants
        self.context = context
        self.open: set[PushHop] = set()
        self._frozen: dict[str, str] = {}
        listeners = context.plane.listeners
        listeners.frozen.append(self._freeze)
        listeners.silent.append(self._silence)
        listeners.noticed.append(self._notice)

    def _freeze(self, name: str, reason: str | None) -> None:
        """An instance is frozen: nothing waits any longer for what it was to send or to receive. None: not any more."""
        if reason is None:
            self._frozen.pop(name, None)
            return
        self._frozen[name] = reason
        for hop in self.open:
            if name in (hop.spec.producer, hop.spec.consumer):
                hop.give_up()

    def _silence(self, producer: str, consumer: str, sentence: str) -> None:
        """The producer has given up its path to the consumer: nothing waits for what it was to send there."""
        for hop in self.open:
            if (producer, consumer) == (hop.spec.producer, hop.spec.consumer):
                hop.give_up(TransferFailedError(LINK_SILENT, f"{producer} to {consumer}: {sentence}"))

    def _notice(self, producer: str, notice_s: float) -> None:
        """The producer is taken away in so many seconds: what it would not have sent until then goes elsewhere now."""
        for hop in self.open:
            if hop.spec.producer == producer and (left_s := hop.spec.left_s()) > notice_s:
                sentence = f"{producer} is gone in {notice_s:g} s, and this would have taken {left_s:.1f} s"
                hop.give_up(TransferFailedError(PREEMPTED, sentence))

    def check_frozen(self, spec: TransferSpec) -> None:
        """Raises TransferFailedError where one of the two instances is frozen."""
        if spec.consumer in self._frozen:
            raise TransferFailedError(CONSUMER_FROZEN, f"{spec.consumer}: {self._frozen[spec.consumer]}")
        if spec.producer in self._frozen:
            raise TransferFailedError(FROZEN, f"{spec.producer}: {self._frozen[spec.producer]}")


class PushHop:
    """Has a producer prefill and send, reports it if it fails, and frees what it leaves in staging. `run` is all."""

    def __init__(
        self,
        hops: PrefillHops,
        spec: TransferSpec,
        request: ServingRequest,
        soon: "asyncio.Future[StartedTransfer] | None" = None,
    ) -> None:
        """`soon` gets the transfer some time (`transfer.decode_lead_s`) before all bytes are at the consumer, perhaps
        before the prefill's end: a request for the KV may be sent then. If the hop fails later, the consumer prefills
        such a request itself."""
        self.spec = spec
        self._hops = hops
        self._request = request
        self._soon = soon
        self._transfers = hops.transfers
        self._plane, self._options = hops.context.plane, hops.context.options
        self._ticket: Ticket
        self._sealed: str
        self._spans: HopTrace
        self._arrival: Arrival
        self._given_up: TransferFailedError | None = None

    def give_up(self, why: TransferFailedError | None = None) -> None:
        """Nothing waits for the transfer any longer. `why`: unless an instance is frozen."""
        self._given_up = why or self._given_up
        self._arrival.cancel()

    async def run(self, *, keeps: bool = False) -> TransferDone:
        """Prefill and move the KV, until all bytes are at the consumer.

        Raises:
            HopFailedError: the prefill or the transfer failed. What has arrived is freed, or kept as `keeps` allows.
        """
        spec, request, context = self.spec, self._request, self._hops.context
        # 1. A ticket that lets the producer write at the consumer, and the producer's request.
        size_bytes = len(spec.token_ids) * JSON_BYTES_PER_TOKEN
        body = await context.json_threads.run(size_bytes, self._sealed_request)
        self._spans = HopTrace(request.record.trace, spec, self._plane)
        try:
            with context.metrics.in_flight_transfers.track_inprogress():
                # 2. The producer prefills and sends; the consumer's ranks say when all bytes are there.
                return await self._prefill_and_transfer(body)
        except BaseException as error:
            # None: the client has left. No request will load what has arrived then either.
            failure = error if isinstance(error, EngineCallError | TransferFailedError) else None
            kept: KeptPart | None = None
            try:
                if keeps and failure is not None:
                    kept = await self._kept(failure)
            finally:
                if kept is None:
                    why = "the request was cancelled" if failure is None else str(failure)
                    self._transfers.abandon(self._ticket, why)
                word = CANCELLED if failure is None else failure.reason
                self._spans.failed(word, in_transfer=isinstance(failure, TransferFailedError))
            if failure is None:
                raise
            if failure.reason == INCOMPATIBLE:
                request.record.note(f"{spec.producer} and {spec.consumer} are incompatible: {failure}")
            raise self._report(failure, kept) from None

    async def _kept(self, failure: EngineCallError | TransferFailedError) -> KeptPart | None:
        """What has come although the producer, or its path, has failed; None: nothing that is of use."""
        if isinstance(failure, EngineCallError):
            leaves_part = not failure.is_clients_fault and failure.reason not in (FROZEN, OWN_RESOURCES)
        else:
            leaves_part = failure.reason in LEAVES_PART
        ticket = self._ticket
        tokens = await self._transfers.keep(ticket, str(failure)) if leaves_part else 0
        return KeptPart(ticket, self._sealed, 0, tokens) if tokens > ticket.skip_tokens else None

    def _sealed_request(self) -> bytes:
        """The producer's request, with a new ticket."""
        spec, request = self.spec, self._request
        self._ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer=spec.producer,
            consumer=spec.consumer,
            num_tokens=len(spec.token_ids),
            skip_tokens=spec.skip_tokens,
            prompt_digest=prompt_digest(spec.token_ids, request.salt, request.adapter, spec.media),
            expires_at_s=time.time() + self._options.ticket_lifetime_s,
            attributes=TransferAttributes(
                uses=spec.uses,
                service=self._hops.tenants.transfer_class(request.salt, background=spec.background),
                checkpoint_tokens=spec.checkpoint_tokens,
            ),
        )
        self._sealed = self._as_told(self._ticket.seal(self._hops.key))
        if spec.media:
            limit = "max_output_tokens" if request.endpoint is Endpoint.RESPONSES else "max_tokens"
            return media_prefill_body(request.body, self._sealed, limit, request.salt)
        return prefill_body(
            request.model,
            spec.token_ids,
            self._sealed,
            salt=request.salt,
            sealed_from=spec.sealed_from,
            sampling=spec.sampling,
        )

    def _as_told(self, sealed_ticket: str) -> str:
        """The ticket as the producer is told it."""
        return sealed_ticket

    async def _prefill(self, body: bytes) -> bytes:
        """The producer's answer. Raises EngineCallError."""
        producer = self._plane.members.instance(self.spec.producer)
        headers, timeout_s = self._spans.headers(self._request.headers), self._options.prefill_timeout_s
        endpoint = self._request.endpoint if self.spec.media else Endpoint.COMPLETIONS
        answer = await self._hops.context.client.call(producer, endpoint.path, body, headers, timeout_s)
        self._spans.prefilled(cached_tokens_of(answer))
        return answer

    async def _prefill_and_transfer(self, body: bytes) -> TransferDone:
        """The request and the transfer at the same time; the first to fail ends the other."""
        spec, clock = self.spec, time.perf_counter
        start_s, late_s = clock(), self._deadline_s()
        self._hops.check_frozen(spec)
        loop, waiting = asyncio.get_running_loop(), self._wait(self._options.prefill_timeout_s + late_s)
        # Two tasks and no group: each more costs every request some percent of the gateway's CPU time.
        prefilling = loop.create_task(self._prefill(body))
        self._arrival = arrival = loop.create_task(waiting)
        self._hops.open.add(self)
        arrival.add_done_callback(self._spans.arrived)
        try:
            await asyncio.wait((prefilling, arrival), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                # Raises what went wrong with it. If nothing did, only the prefill's answer is missing.
                self._arrived()
            answer = await prefilling
            prefill_s = clock() - start_s
            _take(spec, answer)
            started = self._started(answer)
            await self._wait_for_rest(late_s)
            moved = self._arrived()
            cached_tokens = moved.cached_tokens if started.cached_tokens is None else started.cached_tokens
            return TransferDone(
                ticket=self._ticket,
                sealed=started.sealed,
                cached_tokens=cached_tokens,
                moved=moved,
                prefill_s=prefill_s,
                transfer_s=clock() - start_s,
            )
        finally:
            self._hops.open.discard(self)
            await end_all(prefilling, arrival)

    def _wait(self, timeout_s: float) -> Coroutine[Any, Any, TransferredBytes]:
        """Waits for all bytes of the transfer. Raises TransferFailedError, at once where it can't be."""
        self._check_compatible()
        lead_s = self._hops.context.running.current.transfer.decode_lead_s if self._soon is not None else 0.0

        def soon(cached_tokens: int) -> None:
            tell(self._soon, StartedTransfer(self._ticket, self._sealed, cached_tokens))

        return self._transfers.wait(self._ticket, timeout_s, lead_s, soon)

    def _started(self, answer: bytes) -> StartedTransfer:
        """The transfer, now that the producer has answered."""
        return StartedTransfer(self._ticket, self._sealed, cached_tokens_of(answer))

    def _arrived(self) -> TransferredBytes:
        """What a transfer that is over has moved. Raises TransferFailedError."""
        if self._arrival.cancelled():
            spec = self.spec
            self._hops.check_frozen(spec)
            if self._given_up is not None:
                raise self._given_up
            raise TransferFailedError(FROZEN, f"{spec.producer} or {spec.consumer} was frozen for a moment")
        return self._arrival.result()

    async def _wait_for_rest(self, late_s: float) -> None:
        """The prefill has answered: see that the transfer ends in time. Raises TransferFailedError."""
        spec, arrival = self.spec, self._arrival
        if arrival.done():
            return
        if not await self._is_announced():
            await self._ask_consumer()
            if not arrival.done() and not self._transfers.announced(self._ticket):
                raise TransferFailedError(
                    "not-announced", f"{spec.producer} prefilled but opened no transfer to {spec.consumer}"
                )
        reason = "transfer-deadline" if self._link_bits_per_s() is None else LINK_SLOW
        await self._wait_until_late(late_s, reason, f"not complete {late_s:.0f} s after the prefill")

    async def _wait_until_late(self, late_s: float, reason: str, sentence: str) -> None:
        """Raises TransferFailedError with `reason` where the transfer takes longer than `late_s` from now on."""
        if not self._arrival.done():
            await asyncio.wait((self._arrival,), timeout=late_s)
        if not self._arrival.done():
            await self._ask_consumer()
            raise TransferFailedError(reason, sentence)

    async def _ask_consumer(self) -> None:
        """Before the producer is blamed for what a consumer has not told. Raises TransferFailedError."""
        consumer = self.spec.consumer
        if not await self._transfers.answers(consumer, _ASK_CONSUMER_S):
            raise TransferFailedError(CONSUMER_SILENT, f"the KV port of {consumer} does not answer")

    async def _is_announced(self) -> bool:
        """Wait for the transfer to be opened. Raises TransferFailedError as soon as it is known that it cannot be."""
        clock = self._plane.loop_clock
        until_s = clock() + self._options.announce_grace_s
        self._check_compatible()
        while not self._transfers.announced(self._ticket):
            left_s = until_s - clock()
            # Not asked at once: most transfers are announced in a moment, and this would hold them up.
            await asyncio.wait((self._arrival,), timeout=min(_ASK_PRODUCER_S, max(left_s, 0.0)))
            if self._arrival.done():
                break
            await self._plane.rank_stats.ask(self.spec.producer)
            self._check_compatible()
            if left_s <= 0:
                return False
        return True

    def _check_compatible(self) -> None:
        rejection = self._plane.compatibility.reason(self.spec.producer, self.spec.consumer)
        if rejection is not None:
            raise TransferFailedError(INCOMPATIBLE, rejection)

    def _deadline_s(self) -> float:
        """Seconds after the prefill's end at which a transfer is given up.

        A transfer that stands still ends earlier, by the receiver's own deadlines.
        """
        bandwidth_bits_per_s = self._link_bits_per_s() or math.inf
        return late_after_s(self.spec.kv_bytes, bandwidth_bits_per_s, self._options.transfer_grace_s)

    def _link_bits_per_s(self) -> float | None:
        """As the deployment file says; None inside of a cluster."""
        members = self._plane.members
        producer, consumer = members.instance(self.spec.producer), members.instance(self.spec.consumer)
        link = self._hops.context.running.current.link(producer.cluster, consumer.cluster)
        return None if link is None else link.bandwidth_bits_per_s

    def _report(
        self, failure: EngineCallError | TransferFailedError, kept: KeptPart | None
    ) -> HopFailedError:
        """Tell the control plane whom a failure blames: the producer, the consumer or nobody, never both."""
        spec, health = self.spec, self._plane.health
        logger.warning("prefill at %s for %s failed: %s", spec.producer, spec.consumer, failure)
        if isinstance(failure, EngineCallError):
            if not failure.is_clients_fault:
                accuse(self._plane, spec.producer, failure)
            hopeless = failure.is_clients_fault or failure.reason == OWN_RESOURCES
            return HopFailedError(failure.reason, hopeless=hopeless, kept=kept)
        if failure.reason == CONSUMER_SILENT:
            health.suspect(spec.consumer, str(failure))
        elif failure.reason not in BLAMES_NOBODY:
            health.suspect(spec.producer, str(failure))
        # No other producer could reach such a consumer either; it prefills, if it lives.
        return HopFailedError(failure.reason, hopeless=failure.reason in HOPELESS, kept=kept)


class PullHop(PushHop):
    """`PushHop`, for KV that is pulled.

    A transfer of ours leaves while the prefill runs, and the decode request follows. Here the decode request comes
    first: the producer hands over where its blocks lie, and the decode engine reads them when it takes the request.
    How far it is, it tells as it does of our transfers.
    """

    def _as_told(self, sealed_ticket: str) -> str:
        return by_nixl(sealed_ticket)

    def _wait(self, timeout_s: float) -> Coroutine[Any, Any, TransferredBytes]:
        return self._transfers.wait(self._ticket, timeout_s, pulled=True)

    def _started(self, answer: bytes) -> StartedTransfer:
        """What the producer's answer hands over to the consumer. Raises TransferFailedError."""
        try:
            text = orjson.loads(answer)["kv_transfer_params"][TICKET_PARAMETER]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not is_by_nixl(text) or ticket_of(text) != ticket_of(self._sealed):
            raise TransferFailedError(
                "not-announced",
                f"{self.spec.producer} prefilled but handed nothing over; it may run without NIXL",
            )
        started = StartedTransfer(self._ticket, text, cached_tokens_of(answer))
        tell(self._soon, started)
        return started

    async def _wait_for_rest(self, late_s: float) -> None:
        """The decode request is on its way: see that the read ends in time, once it has begun.

        Before that, the request waits for its turn at the decode engine as any other does. Raises TransferFailedError.
        """
        spec, arrival = self.spec, self._arrival
        while not arrival.done() and not self._transfers.announced(self._ticket, pulled=True):
            await asyncio.wait((arrival,), timeout=_LOOK_S)
        sentence = f"{spec.consumer} has read from {spec.producer} for {late_s:.0f} s"
        await self._wait_until_late(late_s, "transfer-deadline", sentence)


def tell(told: "asyncio.Future[T] | None", value: T) -> None:
    """Whoever waits for it has it now."""
    if told is not None and not told.done():
        told.set_result(value)


def _take(spec: TransferSpec, answer: bytes) -> None:
    """Whoever waits for the producer's answer has it now. Raises EngineCallError for one that is none."""
    if spec.on_answer is not None:
        try:
            spec.on_answer(answer)
        except ValueError as error:
            raise EngineCallError(spec.producer, "garbled", str(error), blame=Blame.NONE) from None
