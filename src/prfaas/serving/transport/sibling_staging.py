"""Ranks of one engine on one machine read each other's staging: what several keep alike crosses the line once.

Each rank is sent a share of it. Its siblings map its staging, learn what has come over a local socket, and say when
they have read it. A lender keeps the staging of a transfer until each reader has said so, or is gone. A reader says so
at the end of its load, and at once or after a while of what it will not load.
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

from prfaas.serving.transport.arrival import FollowedTransfer
from prfaas.serving.transport.options import ReceiverOptions
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.sockets import shut
from prfaas.serving.transport.staging import (
    MappedArena,
    StagedRegions,
    StagedTransfer,
    StagingArena,
    mapped_memory,
)
from prfaas.serving.transport.wire import TransferPhase

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
_TICK_S = 0.5
_HELLO_S = 60.0
_MOST_REFUSED = 1 << 12


_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame, behind the descriptor of the staging."""

    staging_bytes: int
    block_bytes: int


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """A transfer has its staging."""

    transfer_id: bytes
    num_tokens: int
    skip_tokens: int
    lease_bytes: int
    blocks: tuple[int, ...]
    region_starts: tuple[int, ...]
    region_bytes: tuple[int, ...]


class Came(msgspec.Struct, frozen=True, tag="came"):
    """How far a transfer is that was lent."""

    transfer_id: bytes
    covered: tuple[tuple[tuple[int, int], ...], ...]
    """By region."""
    phase: TransferPhase
    reason: str = ""
    is_kept: bool = False
    """It has failed, and some of it can be used."""


class GaveBack(msgspec.Struct, frozen=True, tag="gave_back"):
    """A reader needs no more of it."""

    transfer_id: bytes


Frame = Hello | Lent | Came | GaveBack
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Raises OSError: the other side is gone."""
    body = msgspec.msgpack.encode(frame)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def frame_of(sock: socket.socket) -> Frame:
    """The next one.

    Raises:
        OSError: the other side is gone.
        EOFError: it has closed the socket.
        MsgspecError: it sent something else.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _DECODER.decode(_exactly(sock, length))


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    got = bytearray()
    while len(got) < nbytes:
        piece = sock.recv(nbytes - len(got))
        if not piece:
            raise EOFError
        got += piece
    return bytes(got)


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
        """When it has ended, or was read last."""
        self.given_back = False

    def came(self, came: Came) -> None:
        """The lender tells how far it is."""
        self._covered, self._is_kept, self.reason = came.covered, came.is_kept, came.reason
        self.phase = came.phase

    def covered_end(self, region: int, start: int) -> int:
        """Where the verified bytes of a region from `start` on end, as far as the lender has told."""
        return next((end for first, end in self._covered[region] if first <= start < end), start)

    def ends(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """As `Arrival.ends`."""
        return [self.covered_end(region, start) for region, start in starts]

    def wanted_for_s(self, options: ReceiverOptions) -> float:
        """How long after its end a load may still come."""
        if self.phase is TransferPhase.COMPLETE:
            return options.limits.staging_ttl_s
        return options.keep_partial_s if self._is_kept else 0.0


@dataclass(slots=True, eq=False)
class _Loan:
    """A transfer of this rank that siblings read."""

    followed: FollowedTransfer
    readers: set[int]
    told: tuple[object, ...] = ()


@dataclass(slots=True)
class _Begun:
    """A transfer that has no staging yet."""

    readers: Collection[int]
    since_s: float = field(default_factory=time.monotonic)


class SiblingStaging:
    """What this rank lends its siblings, and borrows of them; thread-safe.

    One thread tells them what has come, one for each reads what they tell.
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
        self._receiver = receiver
        self._sockets = dict(sockets)
        self._options = options
        self.on_change: Callable[[], None] = lambda: None
        """Called when a sibling has told something; must not block."""
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
        """A transfer of this rank is opened of which siblings read some."""
        if readers:
            with self._lock:
                if transfer_id not in self._loans:
                    self._begun.setdefault(transfer_id, _Begun(readers))
            self._wake.set()

    def is_begun(self, transfer_id: bytes) -> bool:
        """Whether siblings are still to be lent it: who takes it before that takes it from them."""
        return transfer_id in self._begun

    def _publish(self) -> None:
        while not self._closing:
            waits_s = _LOOK_S if self._begun else _TICK_S if self._loans or self._borrowed else None
            self._wake.wait(waits_s)
            self._wake.clear()
            try:
                self._lend_begun()
                self._tell_loans()
                self._expire()
            except Exception:
                logger.exception("telling siblings of transfers failed")

    def _lend_begun(self) -> None:
        with self._lock:
            begun = dict(self._begun)
        for transfer_id, each in begun.items():
            followed = self._receiver.follow(transfer_id, partial(self._note_change, transfer_id))
            if followed is None:
                self._give_up(transfer_id, each)
                continue
            ticket = followed.ticket
            lent = Lent(
                transfer_id,
                ticket.num_tokens,
                ticket.skip_tokens,
                followed.lease_bytes,
                followed.blocks,
                followed.region_starts,
                followed.region_bytes,
            )
            with self._lock:
                self._begun.pop(transfer_id, None)
                self._loans[transfer_id] = _Loan(followed, set(each.readers) & self._sockets.keys())
            for rank in each.readers:
                self._send(rank, lent)
            self._note_change(transfer_id)
            # Whoever waits for `is_begun`.
            self.on_change()

    def _note_change(self, transfer_id: bytes) -> None:
        """Under the lock of the receiver's table."""
        self._changed.add(transfer_id)
        self._wake.set()

    def _give_up(self, transfer_id: bytes, begun: _Begun) -> None:
        """Tell the readers of a transfer that will have no staging."""
        state = self._receiver.state(transfer_id)
        is_over = state is not None and state.phase is TransferPhase.FAILED
        if not is_over and time.monotonic() - begun.since_s < self._options.limits.staging_wait_s:
            return
        with self._lock:
            self._begun.pop(transfer_id, None)
        reason = "it never came" if state is None else state.reason
        for rank in begun.readers:
            self._send(rank, Lent(transfer_id, 0, 0, 0, (), (), ()))
            self._send(rank, Came(transfer_id, (), TransferPhase.FAILED, reason))

    def _tell_loans(self) -> None:
        changed = set(self._changed)
        self._changed -= changed
        with self._lock:
            loans = [(each, self._loans[each]) for each in changed if each in self._loans]
        for transfer_id, loan in loans:
            # The status first: all that had come when a transfer was complete is covered.
            status, covered = loan.followed.status(), loan.followed.covered()
            if (status.phase, covered) == loan.told:
                continue
            loan.told = (status.phase, covered)
            came = Came(transfer_id, covered, status.phase, status.reason, status.usable_tokens > 0)
            for rank in tuple(loan.readers):
                self._send(rank, came)
            if not loan.readers:
                self._end_loan(transfer_id)

    def _end_loan(self, transfer_id: bytes, rank: int | None = None) -> None:
        with self._lock:
            loan = self._loans.get(transfer_id)
            if loan is None:
                return
            if rank is not None:
                loan.readers.discard(rank)
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
            if lent.uses_left is None:
                lent.uses_left = uses
            lent.readers += 1
            return lent

    def release(self, lent: LentTransfer, *, used: bool = True) -> None:
        """A load that has claimed it reads no more of it; `used`: its request won't ask again."""
        with self._lock:
            lent.readers -= 1
            if used:
                lent.uses_left = (lent.uses_left or 1) - 1
            lent.since_s = time.monotonic()
        self._give_back_unwanted(lent)

    def refuse(self, lender: int, transfer_id: bytes) -> None:
        """A request will not load a transfer, which may still come."""
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
        """Whether it was given back, or its lender is gone."""
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
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            if not self._closing:
                logger.info("rank %d shares its staging no more: %s", rank, error or "it has ended")
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
                    known.came(frame)
                    known.since_s = time.monotonic()
            self._wake.set()
        elif isinstance(frame, GaveBack):
            self._end_loan(frame.transfer_id, rank)
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
