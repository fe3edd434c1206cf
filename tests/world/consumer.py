"""The consumer's process: the transfer table of the product, its connections, and an engine that takes what comes."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from prfaas.core.deployment import TransferLimits
from prfaas.serving.transport.protocol.handshake import ROLE_PRODUCER, PeerIdentity
from prfaas.serving.transport.protocol.incoming import (
    ChunkPlace,
    IncomingTransfer,
    ProducerFrame,
    ProducerSession,
)
from prfaas.serving.transport.protocol.liveness import (
    HEARTBEAT_BYTES,
    LONGEST_LOOK_S,
    LookClock,
    ProducerLiveness,
    TcpInfo,
)
from prfaas.serving.transport.protocol.options import ReceiverOptions
from prfaas.serving.transport.protocol.permissions import permitted_frames
from prfaas.serving.transport.protocol.staging import StagedTransfer, Staging, StagingLease
from prfaas.serving.transport.protocol.transfer_table import TransferTable
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    FrameType,
    Header,
    TransferPhase,
    TransferStatus,
    WireError,
    checksum,
    parse_control,
    ping,
    pong,
    read_body,
    unpack_header,
)

from .network import Connection, Events, Process

if TYPE_CHECKING:
    from .world import World

NAME = "c/0"
KEY = bytes(range(32))
SWEEP_S = 0.2
BLOCK_BYTES = 64
OVERLAP_WAIT_S = 5.0
LIMITS = TransferLimits(
    staging_wait_s=2.0,
    staging_ttl_s=4.0,
    silence_s=0.9,
    resume_s=1.0,
    progress_deadline_s=1.5,
)
OPTIONS = ReceiverOptions(
    limits=LIMITS, idle_deadline_s=6.0, keep_partial_s=2.0, tombstone_s=60.0, passed_for_s=0.5
)
_TRANSFER_FRAMES = {FrameType.OPEN, FrameType.END, FrameType.ABORT}


def kernel_counters(acked: int, received: int, in_flight: int) -> TcpInfo:
    return TcpInfo(
        rtt_s=0.01,
        retransmits=0,
        delivery_bits_per_s=0.0,
        bytes_acked=acked,
        bytes_received=received,
        data_segments_in=0,
        receive_mss=1460,
        in_flight=in_flight,
        notsent_bytes=0,
        busy_s=0.0,
        least_rtt_s=0.01,
        receive_rtt_s=0.01,
        receiver_limited_s=0.0,
        sent_bytes=acked,
        resent_bytes=0,
    )


class Layout:
    """Regions of one, two … bytes for each token; whole blocks can be gone on from, or only checkpoints."""

    BLOCK_TOKENS = 8

    def __init__(self, regions: int, *, has_checkpoints: bool) -> None:
        self.regions = regions
        self.has_checkpoints = has_checkpoints

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [(index + 1) * (num_tokens - skip_tokens) for index in range(self.regions)]

    def checkpoint_bytes(self, num_tokens: int) -> Sequence[int]:
        if not self.has_checkpoints:
            raise ValueError("there are no checkpoints")
        return [64]

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Sequence[int] = (),
    ) -> int:
        there = min(covered_end(index, 0) // (index + 1) for index in range(self.regions)) + skip_tokens
        if self.has_checkpoints:
            return max((end for end in checkpoints if skip_tokens < end <= there), default=0)
        whole = there - there % self.BLOCK_TOKENS
        return whole if whole > skip_tokens else 0


class Accepted:
    """A producer's connection, as the consumer serves it: a frame at a time, in order."""

    def __init__(
        self,
        consumer: "Consumer",
        connection: Connection,
        identity: PeerIdentity,
        answered: Callable[[bytes], None] | None,
    ) -> None:
        """`answered`: takes what this end says; None: it is no honest producer's connection."""
        self.consumer = consumer
        self.identity = identity
        self.is_honest = answered is not None
        self._answered = answered or (lambda _frame: None)
        self._connection = connection
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._place: ChunkPlace | None = None
        self._blocked: tuple[Header, float] | None = None
        self._is_over = False
        self._trouble = ""
        self.liveness = ProducerLiveness()
        self._permitted = permitted_frames(identity, NAME, is_here=False)
        self.session: ProducerSession = consumer.table.connected(identity, self)
        connection.server_ended = lambda: consumer.when_running(self._end)

    # The table's calls

    def post(self, frame: bytes) -> None:
        if not self._is_over:
            self._connection.to_client.send(len(frame), lambda: self._answered(frame))

    def shut(self) -> None:
        self._connection.shut(by_client=False)

    # What arrives

    def arrived(self, kind: str, data: bytes) -> None:
        self._inbox.append((kind, data))
        self.consumer.when_running(self.drain)

    def drain(self) -> None:
        while self._inbox and not self._is_over:
            try:
                if self._blocked is not None and not self._find_place(self._blocked[0]):
                    return
                kind, data = self._inbox.popleft()
                if kind == "payload":
                    self._take_payload(data)
                else:
                    self._take_frame(data)
            except WireError as error:
                self.consumer.world.closed_for(self, error)
                self._trouble = ""
                self.shut()
                self._end()

    def _take_frame(self, frame: bytes) -> None:
        header = unpack_header(frame[:HEADER_BYTES])
        world, table, now_s = self.consumer.world, self.consumer.table, self.consumer.events.now_s
        world.saw(header, table.state(header.transfer_id))
        if header.kind not in self._permitted:
            raise WireError(f"{self.identity.name} may not send {header.kind.name}")
        if header.kind is FrameType.DATA:
            self._blocked = (header, now_s + OVERLAP_WAIT_S)
            self._find_place(header)
        elif header.kind in _TRANSFER_FRAMES:
            body = parse_control(header, frame[HEADER_BYTES:])
            came = ProducerFrame(
                session=self.session,
                connection=self,
                header=header,
                body=body,
                now_s=now_s,
                unix_s=world.unix_s,
            )
            table.take_frame(came)
            world.check(header.transfer_id)
        elif header.kind is FrameType.PING:
            self.post(pong(header))
        elif header.kind is FrameType.PONG:
            self.liveness.heard(header.offset)

    def _find_place(self, header: Header) -> bool:
        """Whether the payload may be read now."""
        now_s = self.consumer.events.now_s
        assert self._blocked is not None
        until_s = self._blocked[1]
        self._place = self.consumer.table.place_chunk(self.session, self, header, now_s)
        if self._place is None:
            if now_s >= until_s:
                raise WireError("DATA came twice at once")
            self.consumer.events.after(0.05, self.drain)
            return False
        self._blocked = None
        if self._place.transfer is not None:
            self.consumer.world.placed(self._place, self)
        return True

    def _take_payload(self, payload: bytes) -> None:
        place = self._place
        assert place is not None
        self._place = None
        if place.transfer is not None and (place.transfer.lease is None or not place.transfer.lease.blocks):
            self.consumer.world.violated("a chunk is written where its transfer has no staging any more")
        at = 0
        for piece in place.pieces:
            piece[:] = payload[at : at + piece.nbytes]
            at += piece.nbytes
        is_right = checksum(payload) == place.header.checksum
        self.consumer.table.finish_chunk(place, self.consumer.events.now_s, verified=is_right)
        self.consumer.world.finished(place)

    def check(self, now_s: float, elapsed_s: float, awaited: set[tuple[str, str]]) -> None:
        """As `ReceiverConnection.check`."""
        if self._is_over:
            return
        inside_frame = self._place is not None
        if not (inside_frame or self.session.key in awaited):
            self.liveness.rest()
            return
        to_client, to_server = self._connection.to_client, self._connection.to_server
        info = kernel_counters(to_client.arrived_bytes, to_server.arrived_bytes, to_client.in_flight)
        found = self.liveness.check(info, now_s, elapsed_s, LIMITS, inside_frame=inside_frame)
        if self.liveness.new_bytes > HEARTBEAT_BYTES:
            self.session.progressed_at_s = now_s
        if isinstance(found, str):
            self._trouble = found
            self.shut()
        elif found:
            self.post(ping(found))

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        table, now_s = self.consumer.table, self.consumer.events.now_s
        if self._place is not None:
            # Part of the payload may have been written.
            for piece in self._place.pieces[:1]:
                piece[: piece.nbytes // 2] = bytes(piece.nbytes // 2)
            table.abandon_chunk(self._place, now_s)
            self._place = None
        table.disconnected(self.session, self, now_s - self.liveness.path_s, self._trouble)
        self.consumer.accepted.pop(self, None)
        self.consumer.world.check()


class Watcher:
    """A gateway's observer of one transfer: each status must follow from the one before."""

    def __init__(self, world: "World", transfer_id: bytes) -> None:
        self._world = world
        self._transfer_id = transfer_id
        self.statuses: list[TransferStatus] = []

    def post(self, frame: bytes) -> None:
        header = unpack_header(frame[:HEADER_BYTES])
        status = read_body(TransferStatus, parse_control(header, frame[HEADER_BYTES:]))
        order = {TransferPhase.WAITING: 0, TransferPhase.RECEIVING: 1}
        if self.statuses:
            before = self.statuses[-1].phase
            if before.terminal or order.get(status.phase, 2) < order.get(before, 2):
                self._world.violated(f"a watcher heard {status.phase} after {before}")
        self.statuses.append(status)

    def shut(self) -> None:
        """Nobody closes it here."""


class CountedStaging(Staging):
    """It remembers its leases, to compare them with what it counts as taken."""

    def __init__(self, blocks: int) -> None:
        super().__init__(memoryview(bytearray(blocks * BLOCK_BYTES)), BLOCK_BYTES)
        self.leases: list[StagingLease] = []

    def allocate(self, nbytes: int) -> StagingLease | None:
        lease = super().allocate(nbytes)
        if lease is not None:
            self.leases = [each for each in self.leases if each.blocks]
            self.leases.append(lease)
        return lease


class Consumer(Process):
    """One process of the consumer; after a restart there is another one, with other memory."""

    def __init__(
        self, world: "World", events: Events, rng: Random, staging_blocks: int, layout: Layout
    ) -> None:
        super().__init__(events)
        self.world = world
        self._rng = rng
        self.staging = CountedStaging(staging_blocks)
        self.layout = layout
        self.table = TransferTable(name=NAME, key=KEY, arena=self.staging, layout=layout, options=OPTIONS)
        self.accepted: dict[Accepted, Connection] = {}
        self.is_over = False
        self.seen: dict[bytes, TransferStatus] = {}
        """The last status of each transfer."""
        self.held: list[StagedTransfer] = []
        """Taken by the engine, and not freed."""
        self.followed: list[StagingLease] = []
        """Held by siblings."""
        self._clock, self._was_late = LookClock(events.now_s), False
        events.after(0.0, self._tick)

    def accept(
        self, connection: Connection, name: str, session: str, answered: Callable[[bytes], None] | None
    ) -> Accepted:
        made = Accepted(self, connection, PeerIdentity(name, ROLE_PRODUCER, session), answered)
        self.accepted[made] = connection
        return made

    def kill(self) -> None:
        """The process ends, whatever it does."""
        self.is_over = True
        for connection in list(self.accepted.values()):
            connection.reset()

    def _tick(self) -> None:
        if not self.is_over:
            self.when_running(self._sweep)
            self.events.after(SWEEP_S, self._tick)

    def _sweep(self) -> None:
        """As `Receiver._sweep`."""
        if self.is_over:
            return
        now_s = self.events.now_s
        elapsed_s = self._clock.elapsed_s(now_s)
        awaited = self.table.awaited()
        for each in list(self.accepted):
            each.check(now_s, elapsed_s, awaited)
        late = elapsed_s >= LONGEST_LOOK_S and not self._was_late
        if not late:
            self.table.sweep(now_s)
            self.world.check()
        self._was_late = late

    # The engine

    def serve(self, transfer_id: bytes, patience_s: float) -> None:
        """Poll a transfer until it is over, then take it, all or what can be used of it; drop it after a while."""
        self.when_running(lambda: self._poll(transfer_id, self.events.now_s + patience_s))

    def _poll(self, transfer_id: bytes, give_up_s: float) -> None:
        if self.is_over:
            return
        now_s, rng = self.events.now_s, self._rng
        status = self.table.state(transfer_id)
        if status is not None and status.phase is TransferPhase.COMPLETE and not status.taken:
            if rng.random() < 0.7:
                self._take(transfer_id, 0)
                return
        elif status is not None and status.phase is TransferPhase.FAILED:
            points = status.resume_points
            if points.tokens and not status.taken and rng.random() < 0.8:
                self._take(transfer_id, rng.choice(points.ends) if points.ends else points.tokens)
            return
        elif status is not None and status.phase is TransferPhase.RECEIVING and rng.random() < 0.2:
            self._read(transfer_id)
        if now_s > give_up_s:
            self.table.drop(transfer_id, "the engine gave up", now_s, keep=rng.random() < 0.3)
            self.world.given_up(transfer_id)
            self.world.check()
            return
        self.events.after(
            rng.uniform(0.02, 0.4), lambda: self.when_running(lambda: self._poll(transfer_id, give_up_s))
        )

    def _take(self, transfer_id: bytes, tokens: int) -> None:
        staged = self.table.take(transfer_id, self.events.now_s, self._free, broken_tokens=tokens)
        if staged is None:
            return
        self.held.append(staged)
        self.world.taken(transfer_id, staged, tokens)
        self.world.check()
        self.events.after(self._rng.uniform(0.0, 0.5), lambda: self.is_over or staged.free())

    def _free(self, staged: StagedTransfer) -> None:
        self.held.remove(staged)
        staged.release()
        self.table.admit(self.events.now_s)
        self.world.check()

    def _read(self, transfer_id: bytes) -> None:
        """Read while it arrives, by the engine or by a sibling's process."""
        transfer = self.table.live(transfer_id)
        if transfer is None or transfer.lease is None:
            return
        lease = transfer.lend(lambda: None)
        self.followed.append(lease)
        self.events.after(
            self._rng.uniform(0.0, 1.0), lambda: self.is_over or self._give_back(transfer, lease)
        )

    def _give_back(self, transfer: IncomingTransfer, lease: StagingLease) -> None:
        self.world.read(transfer)
        self.followed.remove(lease)
        lease.free()
        self.table.admit(self.events.now_s)
        self.world.check()
