"""Staging shared by the ranks of one engine on one machine, so that KV that several ranks keep crosses the link once.

Each rank receives a share. Its siblings map its staging and learn over a local socket which bytes have arrived. The
lender keeps a transfer's staging until each reader has given it back or is gone. A reader gives it back at the end of
its load, or when it will not load it.
"""

import logging
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from prfaas.serving.transport.io.received_transfers import Arrival
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sockets import receive_exactly, shut
from prfaas.serving.transport.io.staging_memory import StagingArena, mapped_memory
from prfaas.serving.transport.protocol.options import ReceiverOptions
from prfaas.serving.transport.protocol.staging import MappedArena, StagedRegions, StagedTransfer
from prfaas.serving.transport.protocol.wire import TransferPhase

logger = logging.getLogger(__name__)

# To report every chunk takes a tenth of what loading it does.
_LOOK_S = 0.02
_TICK_S = 0.5
_HELLO_S = 60.0
_MOST_REFUSED = 1 << 12


_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame, behind the descriptor of the staging."""

    staging_bytes: int
    block_bytes: int


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """Report that a transfer has its staging."""

    transfer_id: bytes
    num_tokens: int = 0
    skip_tokens: int = 0
    lease_bytes: int = 0
    blocks: tuple[int, ...] = ()
    region_starts: tuple[int, ...] = ()
    region_bytes: tuple[int, ...] = ()


class Came(msgspec.Struct, frozen=True, tag="came"):
    """Progress of a lent transfer."""

    transfer_id: bytes
    covered: tuple[tuple[tuple[int, int], ...], ...]
    """Verified bytes, by region."""
    phase: TransferPhase
    reason: str = ""
    is_kept: bool = False
    """It has failed, and an engine can resume from what has come."""


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Report that a reader has begun to load a transfer, and so wants to know its progress."""

    transfer_id: bytes


class GaveBack(msgspec.Struct, frozen=True, tag="gave_back"):
    """Report that a reader is done with a transfer."""

    transfer_id: bytes


Frame = Hello | Lent | Came | Follow | GaveBack
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Send one frame. Raises OSError: the other side is gone."""
    body = msgspec.msgpack.encode(frame)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def frame_of(sock: socket.socket) -> Frame:
    """Receive the next frame.

    Raises:
        OSError: the other side is gone.
        ValueError: it sent something else.
    """
    head = bytearray(_LENGTH.size)
    receive_exactly(sock, memoryview(head))
    body = bytearray(*_LENGTH.unpack(head))
    receive_exactly(sock, memoryview(body))
    return _DECODER.decode(body)


class LentTransfer(StagedRegions):
    """A sibling's transfer, read here while it arrives and once it is complete."""

    checkpoint: StagedTransfer | None = None
    """None: layers that have checkpoints travel to each rank."""

    def __init__(self, lent: Lent, arena: MappedArena, lender: int) -> None:
        lease = arena.lease(lent.lease_bytes, lent.blocks)
        super().__init__(lease, lent.region_starts, lent.region_bytes)
        self.lender = lender
        self.transfer_id = lent.transfer_id
        self.num_tokens = lent.num_tokens
        self.skip_tokens = lent.skip_tokens
        self.phase = TransferPhase.RECEIVING
        self.reason = ""
        self._covered: tuple[tuple[tuple[int, int], ...], ...] = ((),) * len(lent.region_bytes)
        self._is_kept = False
        self.readers = 0
        """Loads that read it at this moment."""
        self.uses_left: int | None = None
        """Requests that have not loaded it yet; None: none has come."""
        self.since_s = 0.0
        """When it ended, or was last read."""
        self.given_back = False

    def update(self, came: Came) -> None:
        """Apply the lender's report."""
        self._covered, self._is_kept, self.reason = came.covered, came.is_kept, came.reason
        self.phase = came.phase

    def covered_end(self, region: int, start: int) -> int:
        """End of the verified bytes of a region that begin at `start`, by the lender's last report."""
        return next((end for first, end in self._covered[region] if first <= start < end), start)

    def ends(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """Ends of verified bytes, as `Arrival.ends`."""
        return [self.covered_end(region, start) for region, start in starts]

    def wanted_for_s(self, options: ReceiverOptions) -> float:
        """How long after its end a load may still come."""
        if self.phase is TransferPhase.COMPLETE:
            return options.limits.staging_ttl_s
        return options.keep_partial_s if self._is_kept else 0.0


@dataclass(slots=True, eq=False)
class _Loan:
    """A transfer of this rank that siblings read."""

    followed: Arrival
    readers: dict[int, bool]
    """Whether each of them has begun to load it."""


@dataclass(slots=True)
class _Begun:
    """A transfer that has no staging yet."""

    readers: Collection[int]
    since_s: float = field(default_factory=time.monotonic)


class SiblingStaging:
    """Lends this rank's staging to its siblings, and borrows theirs; thread-safe.

    1. As lender: `begin` names a transfer's readers. A thread (`_publish`) lends it once it has staging,
       reports its end to all of them, and its progress to those that load it.
    2. As reader: `claim` begins to read a lent transfer, `release` ends that; `refuse` says that it is not wanted.
       When all requests have read it, it is given back.
    3. One thread per sibling (`_read`) takes its frames.
    """

    def __init__(
        self,
        arena: StagingArena,
        arena_fd: int,
        receiver: Receiver,
        sockets: Mapping[int, socket.socket],
        options: ReceiverOptions,
        map_memory: Callable[[int, int], memoryview] = mapped_memory,
    ) -> None:
        """Shakes hands with all siblings, which must do so too.

        Args:
            arena: the staging of this rank.
            arena_fd: of its memory (`staging.shared_memory`).
            receiver: stages there.
            sockets: to each sibling, by its rank; closed by `close`.
            options: of the receiver, for how long transfers wait for staging and for a load.
            map_memory: maps a sibling's staging.

        Raises:
            OSError: a sibling is gone, or its memory can't be mapped.
        """
        self._transfers = receiver.transfers
        self._sockets = dict(sockets)
        self._options = options
        self.on_change: Callable[[], None] = lambda: None
        """Called when a sibling has reported something; must not block."""
        self._lock = threading.Lock()
        self._send_locks = {rank: threading.Lock() for rank in sockets}
        self._begun: dict[bytes, _Begun] = {}
        self._loans: dict[bytes, _Loan] = {}
        self._changed: set[bytes] = set()
        self._borrowed: dict[tuple[int, bytes], LentTransfer] = {}
        self._refused: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._wake = threading.Event()
        self._closing = False
        hello = Hello(arena.total_bytes, arena.block_bytes)
        for rank, each in self._sockets.items():
            each.settimeout(_HELLO_S)
            socket.send_fds(each, [b"\0"], [arena_fd])
            self._send(rank, hello)
        self._arenas = {rank: arena_of(each, map_memory) for rank, each in self._sockets.items()}
        for each in self._sockets.values():
            each.settimeout(None)
        self._threads = [threading.Thread(target=self._publish, name="prfaas-lend", daemon=True)]
        self._threads += [
            threading.Thread(target=self._read, args=(rank,), name=f"prfaas-borrow-{rank}", daemon=True)
            for rank in self._sockets
        ]
        for thread in self._threads:
            thread.start()

    # The lender

    def begin(self, transfer_id: bytes, readers: Collection[int]) -> None:
        """Lend a transfer of this rank, once it has staging, to `readers`."""
        if readers:
            with self._lock:
                if transfer_id not in self._loans:
                    self._begun.setdefault(transfer_id, _Begun(readers))
            self._wake.set()

    def is_begun(self, transfer_id: bytes) -> bool:
        """True if a transfer is still to be lent; taking it before that would take it from the siblings."""
        return transfer_id in self._begun

    def _publish(self) -> None:
        while not self._closing:
            with self._lock:
                looks = self._begun or any(any(loan.readers.values()) for loan in self._loans.values())
            self._wake.wait(_LOOK_S if looks else _TICK_S if self._borrowed else None)
            self._wake.clear()
            try:
                self._lend_begun()
                self._report_loans()
                self._expire()
            except Exception:
                logger.exception("reporting transfers to siblings failed")

    def _lend_begun(self) -> None:
        with self._lock:
            begun = dict(self._begun)
        for transfer_id, each in begun.items():
            followed = self._transfers.lend(transfer_id, partial(self._note_change, transfer_id))
            if followed is None:
                self._give_up(transfer_id, each)
                continue
            ticket = followed.ticket
            lent = Lent(
                transfer_id=transfer_id,
                num_tokens=ticket.num_tokens,
                skip_tokens=ticket.skip_tokens,
                lease_bytes=followed.lease_bytes,
                blocks=followed.blocks,
                region_starts=followed.region_starts,
                region_bytes=followed.region_bytes,
            )
            with self._lock:
                self._begun.pop(transfer_id, None)
                readers = set(each.readers) & self._sockets.keys()
                self._loans[transfer_id] = _Loan(followed, dict.fromkeys(readers, False))
            for rank in each.readers:
                self._send(rank, lent)
            self._note_change(transfer_id)
            # A caller may wait for `is_begun`.
            self.on_change()

    def _note_change(self, transfer_id: bytes) -> None:
        """Under the lock of the receiver's table. An end is reported at once, progress when the thread looks next."""
        self._changed.add(transfer_id)
        loan = self._loans.get(transfer_id)
        if loan is None or loan.followed.is_over:
            self._wake.set()

    def _give_up(self, transfer_id: bytes, begun: _Begun) -> None:
        """Report to the readers that a transfer will have no staging."""
        state = self._transfers.state(transfer_id)
        is_over = state is not None and state.phase is TransferPhase.FAILED
        if not is_over and time.monotonic() - begun.since_s < self._options.limits.staging_wait_s:
            return
        with self._lock:
            self._begun.pop(transfer_id, None)
        reason = "it never came" if state is None else state.reason
        for rank in begun.readers:
            self._send(rank, Lent(transfer_id))
            self._send(rank, Came(transfer_id, (), TransferPhase.FAILED, reason))

    def _report_loans(self) -> None:
        changed = set(self._changed)
        self._changed -= changed
        with self._lock:
            loans = [(each, self._loans[each]) for each in changed if each in self._loans]
        for transfer_id, loan in loans:
            is_over = loan.followed.is_over
            told = [rank for rank, loads in tuple(loan.readers.items()) if loads or is_over]
            if told:
                # The status first: all that had come when a transfer was complete is covered.
                status, covered = loan.followed.status(), loan.followed.covered()
                came = Came(transfer_id, covered, status.phase, status.reason, status.usable_tokens > 0)
                for rank in told:
                    self._send(rank, came)
            elif not loan.readers:
                self._end_loan(transfer_id)

    def _end_loan(self, transfer_id: bytes, rank: int | None = None) -> None:
        with self._lock:
            loan = self._loans.get(transfer_id)
            if loan is None:
                return
            if rank is not None:
                loan.readers.pop(rank, None)
            if loan.readers:
                return
            del self._loans[transfer_id]
        loan.followed.give_back()

    # The reader

    def claim(self, lender: int, transfer_id: bytes, uses: int) -> LentTransfer | None:
        """Begin to read a transfer, which `release` must end; None: it has not come, or never will (`is_refused`).

        `uses`: requests that load it.
        """
        with self._lock:
            lent = self._borrowed.get((lender, transfer_id))
            if lent is None:
                return None
            is_first = lent.uses_left is None
            if is_first:
                lent.uses_left = uses
            lent.readers += 1
        if is_first and not lent.phase.terminal:
            self._send(lender, Follow(transfer_id))
        return lent

    def release(self, lent: LentTransfer, *, used: bool = True) -> None:
        """End a load's `claim`; `used`: its request won't load it again."""
        with self._lock:
            lent.readers -= 1
            if used:
                lent.uses_left = (lent.uses_left or 1) - 1
            lent.since_s = time.monotonic()
        self._give_back_unwanted(lent)

    def refuse(self, lender: int, transfer_id: bytes) -> None:
        """Note that a request will not load a transfer, which may still come."""
        with self._lock:
            lent = self._borrowed.get((lender, transfer_id))
            if lent is None:
                self._refused[lender, transfer_id] = None
                while len(self._refused) > _MOST_REFUSED:
                    self._refused.popitem(last=False)
                return
            lent.uses_left = (lent.uses_left or 1) - 1
        self._give_back_unwanted(lent)

    def is_refused(self, lender: int, transfer_id: bytes) -> bool:
        """True if it was given back, or its lender is gone."""
        with self._lock:
            return (lender, transfer_id) in self._refused or lender not in self._sockets

    def _give_back_unwanted(self, lent: LentTransfer, *, late: bool = False) -> None:
        with self._lock:
            if lent.readers or lent.given_back or not (late or lent.uses_left == 0):
                return
            lent.given_back = True
            key = (lent.lender, lent.transfer_id)
            self._borrowed.pop(key, None)
            self._refused[key] = None
        self._send(lent.lender, GaveBack(lent.transfer_id))

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            late = [
                lent
                for lent in self._borrowed.values()
                if lent.phase.terminal and now_s - lent.since_s > lent.wanted_for_s(self._options)
            ]
        for lent in late:
            self._give_back_unwanted(lent, late=True)

    # The sockets

    def _read(self, rank: int) -> None:
        sock = self._sockets[rank]
        try:
            while True:
                self._take(rank, frame_of(sock))
        except (OSError, ValueError) as error:
            if not self._closing:
                logger.info("rank %d shares its staging no more: %s", rank, error)
        self._lose(rank)

    def _take(self, rank: int, frame: Frame) -> None:
        if isinstance(frame, Lent):
            key, lent = (rank, frame.transfer_id), LentTransfer(frame, self._arenas[rank], rank)
            with self._lock:
                refused = key in self._refused
                if not refused:
                    self._borrowed[key] = lent
            if refused:
                self._send(rank, GaveBack(frame.transfer_id))
        elif isinstance(frame, Came):
            with self._lock:
                known = self._borrowed.get((rank, frame.transfer_id))
                if known is not None:
                    known.update(frame)
                    known.since_s = time.monotonic()
            if frame.phase.terminal:
                self._wake.set()
        elif isinstance(frame, Follow):
            with self._lock:
                loan = self._loans.get(frame.transfer_id)
                if loan is not None and rank in loan.readers:
                    loan.readers[rank] = True
            self._changed.add(frame.transfer_id)
            self._wake.set()
            return
        elif isinstance(frame, GaveBack):
            self._end_loan(frame.transfer_id, rank)
            return
        self.on_change()

    def _lose(self, rank: int) -> None:
        with self._lock:
            self._sockets.pop(rank).close()
            gone = [transfer_id for transfer_id, loan in self._loans.items() if rank in loan.readers]
            for (lender, _), lent in self._borrowed.items():
                if lender == rank and not lent.phase.terminal:
                    lent.reason, lent.phase = f"rank {rank} is gone", TransferPhase.FAILED
        for transfer_id in gone:
            self._end_loan(transfer_id, rank)
        self.on_change()

    def _send(self, rank: int, frame: Frame) -> None:
        sock = self._sockets.get(rank)
        if sock is None:
            return
        try:
            with self._send_locks[rank]:
                send_frame(sock, frame)
        except OSError:
            # The thread that reads from it finds it gone.
            shut(sock)

    def close(self) -> None:
        """End all threads, give back what is lent; idempotent."""
        self._closing = True
        self._wake.set()
        for sock in tuple(self._sockets.values()):
            shut(sock)
        for thread in self._threads:
            thread.join(timeout=10)
        with self._lock:
            loans, self._loans = list(self._loans.values()), {}
        for loan in loans:
            loan.followed.give_back()


def arena_of(sock: socket.socket, map_memory: Callable[[int, int], memoryview]) -> MappedArena:
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if len(fds) != 1:
        raise OSError("a sibling rank sent no memory")
    hello = frame_of(sock)
    if not isinstance(hello, Hello):
        raise OSError("a sibling rank sent no greeting")
    return MappedArena(map_memory(fds[0], hello.staging_bytes), hello.block_bytes)
