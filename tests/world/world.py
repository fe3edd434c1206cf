"""A world of producers, a consumer and a gateway's observers, made from one seed: its faults, and what must hold."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from prfaas.core.link.send_order import order_of_checkpoint
from prfaas.serving.transport.protocol.incoming import ChunkPlace, IncomingTransfer
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.outgoing import OutgoingTransfer, SendPhase
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import Ticket, TransferAttributes, TransferClass, checkpoint_id
from prfaas.serving.transport.protocol.wire import (
    FrameType,
    Header,
    TransferPhase,
    TransferStatus,
    WireError,
    checksum,
    pack_control,
    pack_header,
)

from .consumer import BLOCK_BYTES, KEY, Accepted, Consumer, Layout, Watcher
from .network import Connection, Events
from .producer import Producer

FAULTS_END_S = 5.0
LAST_OPEN_S = 12.0
END_S = 17.0
# Of all pairs: what is nobody's fault.
_FAULTS_OF_ONE = ("reset", "freeze", "dead", "dies_in_chunk", "server_shuts")
_FAULTS_OF_ONE += ("producer_stops", "producer_restarts")
_FAULTS_OF_ALL = ("consumer_stops", "consumer_restarts", "clock_jumps", "refuses", "abandons", "stranger")
_HARMLESS = {"reset", "server_shuts", "stranger", "refuses"}
_SELDOM = 8
_ORDER = {SendPhase.OPENING: 0, SendPhase.SENDING: 1, SendPhase.COMPLETE: 2, SendPhase.FAILED: 2}
UNKNOWN = "unknown"
Coverage = Counter[tuple[str, str, str]]
"""How often a side has met a frame of a kind in a phase of its transfer."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(eq=False)
class Sent:
    """One transfer: what was to be sent, and what has been seen of it."""

    producer: Producer
    transfer: OutgoingTransfer
    content: list[bytes]
    opened_at_s: float
    sealed: str
    is_last: bool = False
    """Opened long after the last fault: it must complete."""
    is_spoiled: bool = False
    """Its engine gives it up, or has lost what it was to send."""
    phase: SendPhase = SendPhase.OPENING
    verified_bytes: int = 0
    was_complete: bool = False
    """At the consumer."""
    watchers: list[Watcher] = field(default_factory=list)


class World:
    """`run` lets all happen that a seed plans; it raises `Violation` after the first event that breaks a rule."""

    def __init__(self, seed: int, coverage: "Coverage | None" = None) -> None:
        self.rng = rng = Random(seed)
        self.events = Events()
        self.coverage: Coverage = Counter() if coverage is None else coverage
        self.log: list[str] = []
        self.violation = ""
        self.unix_offset_s = 1e6
        self.sent: dict[bytes, Sent] = {}
        self._refuses_until_s = 0.0
        self._global_faults = False
        self._dropped: set[bytes] = set()
        self._ids = self._checks = 0
        self.kinds = rng.sample(_FAULTS_OF_ONE + _FAULTS_OF_ALL, rng.choice((0, 1, 2, 3, 5)))
        self._damage = rng.choice((0.0, 0.0, 0.02, 0.3)) if self.kinds else 0.0
        self.layout = Layout(rng.choice((1, 2, 3)), has_checkpoints=rng.random() < 0.3)
        self._max_tokens = rng.choice((8, 60, 300))
        most_blocks = sum(self.layout.region_bytes(self._max_tokens, 0)) // BLOCK_BYTES + 4
        self._staging_blocks = most_blocks * rng.choice((1, 1, 2, 6))
        self.restarts = 0
        self.consumer = Consumer(self, self.events, Random(rng.random()), self._staging_blocks, self.layout)
        self.producers = [self._start(f"p{number}/0") for number in range(rng.choice((1, 1, 2)))]
        self._faulty = {self.producers[0].name}
        for _ in range(rng.choice((1, 2, 4))):
            self.events.at(rng.uniform(0.0, 4.0), self._open_somewhere)
        if self.kinds:
            self.events.at(rng.uniform(0.0, 1.5), self._fault)
        for number in range(len(self.producers)):
            self.events.at(LAST_OPEN_S, lambda n=number: self._open(self.producers[n], is_last=True))  # type: ignore[misc]

    @property
    def unix_s(self) -> float:
        return self.events.now_s + self.unix_offset_s

    def run(self) -> None:
        try:
            while self.events.step(END_S):
                if self.violation:
                    break
            else:
                self._check_end()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"at {self.events.now_s:.3f} s: {error!r}") from error
        if self.violation:
            raise Violation(self.violation)

    def violated(self, what: str) -> None:
        raise Violation(f"at {self.events.now_s:.3f} s: {what}")

    def note(self, what: str) -> None:
        self.log.append(f"{self.events.now_s:8.3f} {what}")

    # Transfers

    def _start(self, name: str) -> Producer:
        self._ids += 1
        return Producer(self, self.events, name, f"s{self._ids}", self.rng.choice((1, 2, 3)))

    def is_faulty(self, producer: Producer) -> bool:
        return bool(self.kinds) and producer.name in self._faulty and self.events.now_s < FAULTS_END_S

    def _open_somewhere(self) -> None:
        self._open(self.rng.choice(self.producers))

    def _open(self, producer: Producer, *, is_last: bool = False) -> None:
        rng = self.rng
        self._ids += 1
        # The last ones have the time that is left, however slow the link is.
        tokens = rng.randint(1, min(self._max_tokens, 60) if is_last else self._max_tokens)
        attributes = TransferAttributes(service=TransferClass(background=rng.random() < 0.1))
        ticket = Ticket(
            transfer_id=self._ids.to_bytes(16),
            producer=producer.name.partition("/")[0],
            consumer="c",
            num_tokens=tokens,
            skip_tokens=0,
            prompt_digest=bytes(16),
            expires_at_s=self.unix_s + 30.0,
            attributes=attributes,
        )
        sealed = ticket.seal(KEY)
        sizes = tuple(self.layout.region_bytes(tokens, 0))
        offer = Offer(ticket=sealed, regions=sizes)
        owner = self._begin(producer, ticket.transfer_id, offer, attributes.service, None, is_last=is_last)
        self.note(f"{producer.name} opens {self._ids} of {sizes}")
        sent = self.sent[ticket.transfer_id]
        if rng.random() < 0.5:
            watcher = Watcher(self, ticket.transfer_id)
            sent.watchers.append(watcher)
            self.events.after(rng.uniform(0.0, 0.3), lambda: self._watch(ticket.transfer_id, watcher))
        patience_s = 4.5 if is_last else rng.choice((0.5, 3.0, 8.0)) if self.kinds else 20.0
        self.consumer.serve(ticket.transfer_id, patience_s)
        checkpoints = self.layout.has_checkpoints and rng.random() < 0.7 and not is_last
        producer.prefill(owner, sent.content, lambda: None)
        if checkpoints:
            for end in sorted({rng.randrange(1, tokens + 1) for _ in range(3)} - {tokens}):
                self.events.after(
                    rng.uniform(0.0, 1.0),
                    lambda e=end: producer.when_running(lambda: self._checkpoint(producer, owner, offer, e)),  # type: ignore[misc]
                )

    def _begin(
        self,
        producer: Producer,
        transfer_id: bytes,
        offer: Offer,
        service: TransferClass,
        owner: OutgoingTransfer | None,
        *,
        is_last: bool = False,
    ) -> OutgoingTransfer:
        now_s = self.events.now_s
        transfer = OutgoingTransfer(transfer_id, offer, service, owner)
        producer.queue.open(transfer, now_s)
        producer.transfers.append(transfer)
        content = [self.rng.randbytes(size) for size in offer.regions]
        self.sent[transfer_id] = Sent(producer, transfer, content, now_s, offer.ticket, is_last)
        producer.wake()
        return transfer

    def _checkpoint(self, producer: Producer, owner: OutgoingTransfer, offer: Offer, tokens: int) -> None:
        transfer_id = checkpoint_id(owner.transfer_id, tokens)
        if producer.is_over or owner.phase.terminal or transfer_id in self.sent:
            return
        told = Offer(ticket=offer.ticket, regions=(64,), checkpoint=tokens)
        made = self._begin(producer, transfer_id, told, owner.service, owner)
        if not made.phase.terminal:
            made.place = order_of_checkpoint(owner.place, made.place)
        producer.prefill(made, self.sent[transfer_id].content, lambda: None)

    def _watch(self, transfer_id: bytes, watcher: Watcher) -> None:
        consumer, lead_s = self.consumer, self.rng.choice((0.0, 1.0))
        watcher.statuses.clear()
        consumer.when_running(lambda: consumer.table.watch(watcher, transfer_id, lead_s, self.events.now_s))

    def given_up(self, transfer_id: bytes) -> None:
        self._dropped.add(transfer_id)

    # Connections

    def connect(self, producer: Producer) -> Connection | None:
        if self.events.now_s < self._refuses_until_s:
            return None
        return Connection(self.events, producer.rate_bytes_per_s, producer.delay_s)

    def accept(
        self, producer: Producer, connection: Connection, answered: Callable[[bytes], None]
    ) -> Accepted | None:
        if self.events.now_s < self.consumer.stopped_until_s:
            return None
        return self.consumer.accept(connection, producer.name, producer.session, answered)

    def maybe_damaged(self, producer: Producer, payload: bytes) -> bytes:
        if payload and self.is_faulty(producer) and self.rng.random() < self._damage:
            at = self.rng.randrange(len(payload))
            return payload[:at] + bytes([payload[at] ^ 0x40]) + payload[at + 1 :]
        return payload

    # Faults

    def _fault(self) -> None:
        rng, now_s = self.rng, self.events.now_s
        if now_s > FAULTS_END_S:
            return
        kind = rng.choice(self.kinds)
        self.note(kind)
        self._global_faults |= kind in ("consumer_stops", "consumer_restarts", "clock_jumps", "refuses")
        getattr(self, f"_{kind}")(self.producers[0])
        self.events.after(rng.expovariate(1.0 / rng.choice((0.05, 0.5, 1.5))), self._fault)

    def _one(self, producer: Producer) -> list[Connection]:
        up = [each.connection for each in producer.connections if each.connection is not None]
        return up if self.rng.random() < 0.3 else up[: self.rng.randint(0, len(up))]

    def _reset(self, producer: Producer) -> None:
        for connection in self._one(producer):
            connection.reset()

    def _freeze(self, producer: Producer) -> None:
        seconds = self.rng.choice((0.05, 0.5, 2.0))
        for connection in self._one(producer):
            connection.freeze(seconds)

    def _dead(self, producer: Producer) -> None:
        for connection in self._one(producer):
            connection.freeze(1e9)

    def _dies_in_chunk(self, producer: Producer) -> None:
        """The consumer is left inside a frame; the producer gives the connection up, which the consumer never hears."""
        self.rng.choice(producer.connections).dies_in_chunk = True

    def _server_shuts(self, producer: Producer) -> None:
        for accepted in list(self.consumer.accepted):
            if accepted.identity.name == producer.name and self.rng.random() < 0.5:
                accepted.shut()

    def _producer_stops(self, producer: Producer) -> None:
        producer.stopped_until_s = self.events.now_s + self.rng.choice((0.1, 0.8, 2.5))

    def _producer_restarts(self, producer: Producer) -> None:
        producer.kill()
        self.producers[0] = self._start(producer.name)

    def _consumer_stops(self, _: Producer) -> None:
        self.consumer.stopped_until_s = self.events.now_s + self.rng.choice((0.1, 0.8, 2.5))

    def _consumer_restarts(self, _: Producer) -> None:
        self.consumer.kill()
        self.restarts += 1
        self.consumer = Consumer(
            self, self.events, Random(self.rng.random()), self._staging_blocks, self.layout
        )

    def _clock_jumps(self, _: Producer) -> None:
        self.unix_offset_s += self.rng.choice((-100.0, -1.0, 20.0, 100.0))

    def _refuses(self, _: Producer) -> None:
        self._refuses_until_s = self.events.now_s + self.rng.choice((0.1, 1.0))

    def _abandons(self, _: Producer) -> None:
        if self.sent:
            transfer_id = self.rng.choice(list(self.sent))
            keep = self.rng.random() < 0.5
            self._dropped.add(transfer_id)
            self.consumer.when_running(
                lambda: self.consumer.table.drop(transfer_id, "abandoned", self.events.now_s, keep=keep)
            )
            self.check()

    def _stranger(self, _: Producer) -> None:
        """Another engine with the key sends what is another's: a replayed OPEN, chunks, an END, an ABORT."""
        if not self.sent or self.events.now_s < self.consumer.stopped_until_s:
            return
        rng = self.rng
        transfer_id, sent = rng.choice(list(self.sent.items()))
        connection = Connection(self.events, 1e5, 0.001)
        accepted = self.consumer.accept(connection, "q/0", "x", None)
        payload = rng.randbytes(8)
        size = len(sent.content[0])
        frames = {
            FrameType.OPEN: pack_control(
                FrameType.OPEN, transfer_id, {"ticket": sent.sealed, "regions": list(map(len, sent.content))}
            ),
            FrameType.END: pack_control(
                FrameType.END, transfer_id, {"total_bytes": sent.transfer.total_bytes, "overlapped_bytes": 0}
            ),
            FrameType.ABORT: pack_control(FrameType.ABORT, transfer_id, {"reason": "another's"}),
        }
        if self.consumer.table.state(transfer_id) is None:
            # Of an ABORT that comes before its OPEN nothing says whose the transfer is.
            del frames[FrameType.ABORT]
        for kind in rng.sample((*frames, FrameType.DATA), 2):
            if kind in frames:
                connection.to_server.send(100, lambda f=frames[kind]: accepted.arrived("frame", f))  # type: ignore[misc]
            else:
                header = pack_header(
                    kind,
                    transfer_id,
                    region=rng.choice((0, 7)),
                    offset=rng.choice((0, max(size - 8, 0), size)),
                    length_bytes=8,
                    payload_checksum=checksum(payload),
                )
                connection.to_server.send(56, lambda h=header: accepted.arrived("frame", h))  # type: ignore[misc]
                connection.to_server.send(8, lambda: accepted.arrived("payload", payload))
        self.events.after(0.5, lambda: connection.shut(by_client=True))

    # What must hold

    def saw(self, header: Header, status: TransferStatus | None) -> None:
        self.coverage["consumer", header.kind.name, UNKNOWN if status is None else status.phase.value] += 1

    def heard(self, producer: Producer, header: Header) -> None:
        sent = self.sent.get(header.transfer_id)
        self.coverage[
            "producer", header.kind.name, UNKNOWN if sent is None else sent.transfer.phase.value
        ] += 1

    def closed_for(self, accepted: Accepted, error: WireError) -> None:
        if accepted.is_honest:
            self.violated(f"an honest producer's connection was closed: {error}")

    def placed(self, place: ChunkPlace, accepted: Accepted) -> None:
        if not accepted.is_honest:
            self.violated("a stranger's chunk got a place")
        if sum(piece.nbytes for piece in place.pieces) != place.header.length_bytes:
            self.violated("a chunk's place is not as long as the chunk")

    def finished(self, place: ChunkPlace) -> None:
        transfer = place.transfer
        if transfer is not None:
            transfer_id = transfer.ticket.transfer_id
            sent = self.sent[transfer_id]
            sent.verified_bytes = max(sent.verified_bytes, transfer.received_bytes)
            if transfer.received_bytes != sum(
                end - start for each in transfer.covered_ranges() for start, end in each
            ):
                self.violated("the bytes that have come are counted wrongly")
            self.read(transfer)
        self.check(place.header.transfer_id)

    def read(self, transfer: IncomingTransfer) -> None:
        """All that counts as verified is what was sent."""
        if transfer.lease is None:
            return
        content = self.sent[transfer.ticket.transfer_id].content
        for region, ranges in enumerate(transfer.covered_ranges()):
            for start, end in ranges:
                there = b"".join(transfer.lease.views(transfer.region_starts[region] + start, end - start))
                if there != content[region][start:end]:
                    self.violated(f"bytes {start}..{end} of region {region} are not those that were sent")

    def taken(self, transfer_id: bytes, staged: StagedTransfer, tokens: int) -> None:
        sent = self.sent[transfer_id]
        content = sent.content
        for region, nbytes in enumerate(staged.region_bytes):
            whole = min((region + 1) * tokens, nbytes) if tokens else nbytes
            if b"".join(staged.region_views(region, 0, whole)) != content[region][:whole]:
                self.violated(f"the engine took wrong bytes of region {region}")
        if not tokens and not sent.was_complete:
            self.violated("the engine took what was not complete")
        if staged.checkpoint is not None:
            its = self.sent[checkpoint_id(transfer_id, tokens)]
            if b"".join(staged.checkpoint.region_views(0, 0, 64)) != its.content[0]:
                self.violated("the engine took a wrong checkpoint")

    def check(self, touched: bytes = b"") -> None:
        """After each event; of transfers those that it may have touched, or all: those that are over more seldom."""
        consumer = self.consumer
        held = [block for lease in consumer.staging.leases for block in lease.blocks]
        if len(held) != consumer.staging.used_blocks or len(held) != len(set(held)):
            self.violated(
                f"{consumer.staging.used_blocks} blocks of staging are taken, leases have {sorted(held)}"
            )
        self._checks += 1
        for transfer_id in (touched,) if touched in self.sent else tuple(self.sent):
            sent = self.sent[transfer_id]
            if sent.phase.terminal and transfer_id != touched and self._checks % _SELDOM:
                continue
            status = consumer.table.state(transfer_id)
            self._check_status(transfer_id, sent, status)
            transfer = sent.transfer
            if _ORDER[transfer.phase] < _ORDER[sent.phase] or (
                sent.phase.terminal and transfer.phase is not sent.phase
            ):
                self.violated(f"a producer's transfer is {transfer.phase} after {sent.phase}")
            if transfer.acked_bytes > sent.verified_bytes:
                self.violated(
                    f"{transfer.acked_bytes} bytes are acknowledged, {sent.verified_bytes} were verified"
                )
            if transfer.phase is SendPhase.COMPLETE and not sent.was_complete:
                self.violated("a transfer is complete at its producer alone")
            sent.phase = transfer.phase

    def _check_status(self, transfer_id: bytes, sent: Sent, status: TransferStatus | None) -> None:
        seen = self.consumer.seen
        before = seen.get(transfer_id)
        if status is None:
            if before is not None:
                self.violated(f"a transfer is forgotten that was {before.phase}")
            return
        if status.phase is TransferPhase.COMPLETE:
            sent.was_complete = True
            if status.received_bytes != status.total_bytes:
                self.violated("a transfer is complete without all its bytes")
        if before is not None and before.phase.terminal and status.phase is not before.phase:
            expired = before.phase is TransferPhase.COMPLETE and not before.taken
            if not (expired and status.phase is TransferPhase.FAILED):
                self.violated(f"a transfer is {status.phase} after {before.phase}")
        for other in self.producers:
            if other.name != sent.producer.name and other.name in status.reason:
                self.violated(f"a transfer of {sent.producer.name} failed for {other.name}: {status.reason}")
        seen[transfer_id] = status

    def _check_end(self) -> None:
        table, staging = self.consumer.table, self.consumer.staging
        table.sweep(self.events.now_s)
        if self.consumer.held or self.consumer.followed:
            return
        if staging.used_blocks:
            self.violated(f"{staging.used_blocks} blocks of staging are never given back")
        stats = table.stats()
        if any(stats["transfers"].values()):
            self.violated(f"transfers never end at the consumer: {stats['transfers']}")
        for producer in self.producers:
            queue = producer.queue.stats()
            if queue["transfers"] or queue["in_flight_chunks"] or queue["queued_bytes"]:
                self.violated(f"transfers of {producer.name} never end: {queue}")
            if any(each.reading for each in producer.transfers):
                self.violated(f"memory of {producer.name} is read for ever")
            if any(each.window is None for each in producer.connections):
                self.violated(f"a connection of {producer.name} does not come back")
        for transfer_id, sent in self.sent.items():
            self._check_fate(transfer_id, sent)

    def _check_fate(self, transfer_id: bytes, sent: Sent) -> None:
        """Those that no fault could touch are complete."""
        excused = transfer_id in self._dropped or "staging" in sent.transfer.reason or sent.is_spoiled
        excused = excused or sent.transfer.owner is not None
        is_quick = sent.producer.rate_bytes_per_s >= 1e5 and sent.producer.delay_s <= 0.02
        # On a slow link an OPEN waits behind chunks, and then for staging, longer than its producer does.
        if not is_quick and not sent.is_last and "did not accept" in sent.transfer.reason:
            excused = True
        healthy = not self.kinds or (sent.producer.name not in self._faulty and not self._global_faults)
        # Connections that are lost, and come back in time, cost no transfer.
        carried = (
            is_quick
            and _HARMLESS.issuperset(self.kinds)
            and not any(why in sent.transfer.reason for why in ("unreachable", "connection to", "damaged"))
        )
        if (sent.is_last or healthy or carried) and not excused and not sent.was_complete:
            self.violated(
                f"transfer {int.from_bytes(transfer_id)} of {sent.producer.name} is not complete, though nothing "
                f"was wrong with it: {sent.transfer.phase}, {sent.transfer.reason!r}"
            )
        for watcher in sent.watchers:
            said = watcher.statuses
            if said and not said[-1].phase.terminal and not self.restarts:
                self.violated("a watcher never heard of a transfer's end")
