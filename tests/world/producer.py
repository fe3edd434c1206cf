"""The producer's process: the peer queue of the product, connections that send what it gives them, and an engine."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from prfaas.core.deployment import TransferLimits
from prfaas.serving.transport.protocol.chunk_source import BytesSource, ChunkSource, SourceGone
from prfaas.serving.transport.protocol.in_flight import ControlJob, InFlightWindow
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.outgoing import Carrier, Chunk, OutgoingTransfer, PeerAnswer
from prfaas.serving.transport.protocol.pacing import LinkPacer
from prfaas.serving.transport.protocol.peer_queue import PeerQueue
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    FrameType,
    WireError,
    checksum,
    pack_header,
    unpack_header,
)

from .consumer import LIMITS, NAME, Accepted, kernel_counters
from .network import Connection, Events, Process

if TYPE_CHECKING:
    from .world import World

OPTIONS = SenderOptions(
    limits=TransferLimits(
        staging_wait_s=LIMITS.staging_wait_s,
        silence_s=LIMITS.silence_s,
        resume_s=LIMITS.resume_s,
        progress_deadline_s=LIMITS.progress_deadline_s,
    ),
    accept_margin_s=1.0,
    transfer_deadline_s=3.0,
    backoff_min_s=0.05,
    backoff_max_s=0.4,
    chunk_bytes=256,
    min_chunk_bytes=32,
)


class Sending:
    """One connection of the queue: up, or waiting to be tried again."""

    def __init__(self, producer: "Producer", number: int) -> None:
        self.number = number
        self.chunk_bytes = producer.rng.choice((32, 100, 256))
        self.least_bytes_per_s = 0.0
        self._producer = producer
        self._backoff_s = OPTIONS.backoff_min_s
        self.connection: Connection | None = None
        self.accepted: Accepted | None = None
        self.window: InFlightWindow | None = None
        self._reading: Chunk | None = None
        self.dies_in_chunk = False
        """The path of its connection dies between the header and the payload of the next chunk."""
        self._is_writing = False
        self._looks = False
        producer.events.after(producer.rng.uniform(0.0, 0.05), self._connect)

    # The queue's calls

    def set_rate(self, bytes_per_s: int | None) -> None:
        """The network's rate is what counts here."""

    def shut(self) -> None:
        if self.connection is not None:
            self.connection.shut(by_client=True)

    def _connect(self) -> None:
        producer = self._producer
        if producer.is_over:
            return
        connection = producer.world.connect(producer)
        if connection is None:
            self._retry("nobody listens", PeerAnswer.CLOSED)
            return
        connection.client_ended = lambda: producer.when_running(self._broken)
        self.connection = connection
        producer.events.after(
            2 * producer.delay_s, lambda: producer.when_running(lambda: self._up(connection))
        )

    def _up(self, connection: Connection) -> None:
        producer = self._producer
        if self.connection is not connection or producer.is_over:
            return
        accepted = producer.world.accept(producer, connection, self.answered) if connection.is_open else None
        if accepted is None:
            self.connection = None
            self._retry("no answer", PeerAnswer.NOTHING)
            return
        self.accepted = accepted
        self._backoff_s = OPTIONS.backoff_min_s
        self.window = InFlightWindow(connection=self)
        producer.queue.connected(self.window, producer.events.now_s)
        producer.wake()
        self.pump()

    def _retry(self, trouble: str, answer: PeerAnswer) -> None:
        producer = self._producer
        producer.queue.unreachable(trouble, answer, producer.events.now_s)
        producer.wake()
        producer.events.after(self._backoff_s, lambda: producer.when_running(self._connect))
        self._backoff_s = min(2 * self._backoff_s, OPTIONS.backoff_max_s)

    def _broken(self) -> None:
        """The reader learns of the end; the writer a little later."""
        producer, window = self._producer, self.window
        if producer.is_over:
            return
        if window is None:
            if self.connection is not None:
                self.connection = None
                self._retry("connection lost", PeerAnswer.NOTHING)
            return
        producer.queue.close_window(window)
        producer.wake()
        producer.events.after(
            producer.rng.uniform(0.0, 0.05), lambda: producer.when_running(lambda: self._gone(window))
        )

    def _gone(self, window: InFlightWindow) -> None:
        producer = self._producer
        if producer.is_over or self.window is not window:
            return
        self._read_done()
        self._is_writing = False
        self.window = self.connection = self.accepted = None
        producer.queue.disconnected(window, "connection lost", producer.events.now_s)
        producer.wake()
        producer.world.check()
        producer.events.after(OPTIONS.backoff_min_s, lambda: producer.when_running(self._connect))

    # The writer

    def pump(self) -> None:
        """Send the next frame, if there is one and nothing is being sent."""
        producer, window, connection = self._producer, self.window, self.connection
        if window is None or connection is None or self._is_writing or producer.is_over:
            return
        job = producer.queue.next_job(window, producer.events.now_s)
        if job is None:
            if producer.queue.busy and not self._looks:
                self._looks = True
                producer.events.after(producer.queue.heartbeat_s, lambda: producer.when_running(self._look))
            return
        self._is_writing = True
        if isinstance(job, ControlJob):
            taken_at_s = self._send(connection, "frame", job.frame)
        else:
            sent_at_s = self._send_chunk(connection, job)
            if sent_at_s is None:
                self._is_writing = False
                producer.events.after(0.0, lambda: producer.when_running(self.pump))
                return
            taken_at_s = sent_at_s
        producer.world.check(job.transfer.transfer_id)
        producer.events.at(taken_at_s, lambda: producer.when_running(lambda: self._written(window)))

    def _look(self) -> None:
        self._looks = False
        self.pump()

    def _send_chunk(self, connection: Connection, chunk: Chunk) -> float | None:
        producer = self._producer
        error, payload = "", b""
        try:
            out = bytearray(chunk.nbytes)
            chunk.source.read_into(chunk.start - chunk.base, memoryview(out))
            payload = bytes(out)
        except SourceGone as gone:
            error = f"source gone: {gone}"
        if error or producer.rng.random() < 0.5:
            # A copy: the engine's memory is free at once.
            if not producer.queue.read_done(chunk, producer.events.now_s, error):
                producer.wake()
                return None
            producer.wake()
        else:
            self._reading = chunk
        header = pack_header(
            FrameType.DATA,
            chunk.transfer.transfer_id,
            region=chunk.region,
            offset=chunk.start,
            length_bytes=len(payload),
            payload_checksum=checksum(payload),
        )
        taken_at_s = self._send(connection, "frame", header)
        if self.dies_in_chunk:
            self.dies_in_chunk = False
            events, arrives_at_s = producer.events, taken_at_s + producer.delay_s
            events.at(arrives_at_s, lambda: connection.freeze(1e9))
            events.at(
                arrives_at_s + producer.rng.choice((0.001, 0.1)), lambda: connection.shut(by_client=True)
            )
        return self._send(connection, "payload", producer.world.maybe_damaged(producer, payload))

    def _send(self, connection: Connection, kind: str, data: bytes) -> float:
        accepted = self.accepted
        assert accepted is not None
        return connection.to_server.send(len(data), lambda: accepted.arrived(kind, data))

    def _written(self, window: InFlightWindow) -> None:
        if self.window is not window or self.connection is None:
            return
        way, events = self.connection.to_server, self._producer.events
        if way.frozen_until_s > events.now_s and way.in_flight:
            # Its socket takes nothing.
            events.after(0.2, lambda: self._producer.when_running(lambda: self._written(window)))
            return
        self._read_done()
        self._is_writing = False
        self.pump()

    def _read_done(self) -> None:
        chunk, self._reading = self._reading, None
        if chunk is not None:
            self._producer.queue.read_done(chunk, self._producer.events.now_s)
            self._producer.wake()

    # The reader

    def answered(self, frame: bytes) -> None:
        self._producer.when_running(lambda: self._take(frame))

    def _take(self, frame: bytes) -> None:
        producer, window = self._producer, self.window
        if window is None or window.closed or producer.is_over:
            return
        header = unpack_header(frame[:HEADER_BYTES])
        producer.world.heard(producer, header)
        try:
            producer.queue.take_frame(window, header, frame[HEADER_BYTES:], producer.events.now_s)
        except WireError as error:
            producer.world.violated(f"the consumer's {header.kind.name} was refused: {error}")
        producer.wake()
        producer.world.check(header.transfer_id)


class ShortLived(BytesSource):
    """Memory that the engine may take away."""

    is_gone = False

    def read_into(self, start: int, out: memoryview) -> None:
        if self.is_gone:
            raise SourceGone("preempted")
        super().read_into(start, out)


class Producer(Process):
    """One process of a producer; after a restart there is another one."""

    def __init__(self, world: "World", events: Events, name: str, session: str, connections: int) -> None:
        super().__init__(events)
        self.world = world
        self.rng = Random(world.rng.random())
        self.name = name
        self.session = session
        self.is_over = False
        self.rate_bytes_per_s = self.rng.choice((2_000.0, 10_000.0, 100_000.0))
        self.delay_s = self.rng.choice((0.001, 0.02, 0.1))
        peer = Peer(name=NAME, host="h", port=1, link="wan", connections=connections)
        self.queue = PeerQueue(peer, OPTIONS, LinkPacer(None), events.now_s)
        self.transfers: list[OutgoingTransfer] = []
        self.connections = [Sending(self, number) for number in range(connections)]
        self._is_woken = False
        events.after(0.0, self._tick)

    def wake(self) -> None:
        """After a call of the queue: whom it lets go on looks for a job soon."""
        if self.queue.ready and not self._is_woken:
            self._is_woken = True
            self.events.after(0.0, lambda: self.when_running(self._woken))

    def _woken(self) -> None:
        self._is_woken, self.queue.ready = False, 0
        order = list(self.connections)
        self.rng.shuffle(order)
        for each in order:
            each.pump()

    def kill(self) -> None:
        """The process ends, whatever it does."""
        self.is_over = True
        for each in self.connections:
            if each.connection is not None:
                each.connection.reset()

    def _tick(self) -> None:
        if not self.is_over:
            self.when_running(self._supervise)
            self.events.after(2 * OPTIONS.sample_s, self._tick)

    def _supervise(self) -> None:
        """As `Sender._supervise_once`."""
        if self.is_over or not self.queue.busy:
            return
        infos = {}
        for each in self.connections:
            if each.window is not None and each.connection is not None:
                to_server, to_client = each.connection.to_server, each.connection.to_client
                infos[each] = kernel_counters(
                    to_server.arrived_bytes, to_client.arrived_bytes, to_server.in_flight
                )
        by_carrier: dict[Carrier, object] = dict(infos)
        for carrier in self.queue.apply_deadlines(self.events.now_s, by_carrier):  # type: ignore[arg-type]
            carrier.shut()
        self.wake()
        self.world.check()

    # The engine

    def put(
        self, transfer: OutgoingTransfer, region: int, offset: int, source: ChunkSource, *, urgent: bool
    ) -> None:
        self.queue.put(transfer, region, offset, source, urgent=urgent)
        self.wake()

    def end(self, transfer: OutgoingTransfer) -> None:
        self.queue.end(transfer, self.events.now_s)
        self.wake()

    def abort(self, transfer: OutgoingTransfer, reason: str) -> None:
        self.queue.fail(transfer, reason, self.events.now_s)
        self.wake()

    def prefill(self, transfer: OutgoingTransfer, content: list[bytes], done: Callable[[], None]) -> None:
        """Put the content in pieces as a prefill makes it, then end; seldom give up, or lose what was computed."""
        rng = self.rng
        pieces = []
        for region, data in enumerate(content):
            cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3)))})
            pieces += [(region, start, end) for start, end in pairwise(cuts)]
        rng.shuffle(pieces)
        ends_after = len(pieces) if rng.random() < 0.8 else rng.randrange(len(pieces) + 1)
        fate = rng.random()
        pause_s = rng.choice((0.0, 0.01, 0.1, 0.4))
        at_s = 0.0
        for index, (region, start, end) in enumerate(pieces):
            at_s += rng.uniform(0.0, pause_s)
            source = ShortLived(content[region][start:end])
            if self.world.is_faulty(self) and fate < 0.03:
                source.is_gone = index == len(pieces) - 1
                self.world.sent[transfer.transfer_id].is_spoiled = True
            urgent = rng.random() < 0.2
            self._later(
                at_s, lambda r=region, s=start, src=source, u=urgent: self.put(transfer, r, s, src, urgent=u)
            )  # type: ignore[misc]
            if index + 1 == ends_after:
                self._later(at_s, lambda: self.end(transfer))
        if not ends_after or not pieces:
            self._later(0.0, lambda: self.end(transfer))
        if self.world.is_faulty(self) and fate > 0.95:
            self.world.sent[transfer.transfer_id].is_spoiled = True
            self._later(rng.uniform(0.0, at_s + 0.3), lambda: self.abort(transfer, "preempted"))
        self._later(at_s, done)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.events.after(seconds, lambda: self.when_running(lambda: None if self.is_over else call()))
