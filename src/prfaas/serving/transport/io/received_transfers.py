"""Received transfers as threads share them: the transfer table behind one lock, and what of it the engine reads."""

import time
from collections.abc import Callable, Sequence
from threading import Condition, Lock

from prfaas.serving.transport.protocol.incoming import (
    ChunkPlace,
    FrameSink,
    IncomingTransfer,
    ProducerSession,
)
from prfaas.serving.transport.protocol.staging import StagedRegions, StagedTransfer
from prfaas.serving.transport.protocol.transfer_table import TransferTable
from prfaas.serving.transport.protocol.wire import Header, TransferStatus, WireError

_OVERLAP_WAIT_S = 5.0


class Arrival(StagedRegions):
    """A transfer whose verified bytes are read while others are still arriving; thread-safe.

    The staging stays in place until `give_back`, even if the transfer fails meanwhile. `ReceivedTransfers.state` still
    reports completion or failure, and `take` still hands over the complete transfer.
    """

    def __init__(
        self, of: "ReceivedTransfers", transfer: IncomingTransfer, on_change: Callable[[], None]
    ) -> None:
        """Made inside `of`; the transfer has its staging."""
        lease = transfer.lend(on_change)
        super().__init__(lease, transfer.region_starts, transfer.region_bytes)
        self.ticket = transfer.ticket
        """The transfer's ticket, with the transfer's own id."""
        self.region_starts = tuple(transfer.region_starts)
        self.lease_bytes, self.blocks = lease.nbytes, lease.blocks
        """Its place in the arena."""
        self._transfers = of
        self._transfer = transfer
        self._is_read = True

    def ends(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """The end of the verified bytes that begin at each (region, start in bytes)."""
        with self._transfers:
            return [self._transfer.covered_end(region, start) for region, start in starts]

    def covered(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The verified bytes of each region, as ascending ranges from their start to their end."""
        with self._transfers:
            return self._transfer.covered_ranges()

    def status(self) -> TransferStatus:
        """The transfer's phase and progress, regardless of whether the engine here has taken it."""
        with self._transfers:
            return self._transfer.status()

    @property
    def is_over(self) -> bool:
        """True if the transfer is complete or has failed."""
        return self._transfer.phase.terminal

    def give_back(self) -> None:
        """End reading; idempotent."""
        with self._transfers as table:
            if self._is_read:
                self._is_read = False
                self._lease.free()
                table.admit(time.monotonic())


class ReceivedTransfers:
    """The transfers of a receiver, for the engine; thread-safe. Who enters it uses the table under its lock."""

    def __init__(self, table: TransferTable) -> None:
        self.table = table
        """Without the lock, to look at."""
        self._lock = Lock()
        self._unpinned = Condition(self._lock)

    def __enter__(self) -> TransferTable:
        self._lock.acquire()
        return self.table

    def __exit__(self, *_: object) -> None:
        self._unpinned.notify_all()
        self._lock.release()

    def place_chunk(self, session: ProducerSession, connection: FrameSink, header: Header) -> ChunkPlace:
        """As of the table; waits until another connection no longer writes there."""
        now_s = time.monotonic()
        deadline_s = now_s + _OVERLAP_WAIT_S
        with self._lock:
            while (place := self.table.place_chunk(session, connection, header, now_s)) is None:
                now_s = time.monotonic()
                if not self._unpinned.wait(deadline_s - now_s):
                    end = header.offset + header.length_bytes
                    raise WireError(
                        f"DATA {header.offset}..{end} of region {header.region} came twice at once"
                    )
            return place

    def state(self, transfer_id: bytes) -> TransferStatus | None:
        """Status of a transfer, also for a while after it is over; None when the id is unknown.

        Cheap, and without the lock for a live one, since engines ask at every step.
        """
        if (transfer := self.table.live(transfer_id)) is not None:
            return transfer.status()
        with self as table:
            return table.state(transfer_id)

    def take(self, transfer_id: bytes, *, broken_tokens: int = 0) -> StagedTransfer | None:
        """The staged bytes of a COMPLETE transfer, once; the caller must free them. None otherwise.

        `broken_tokens`: as of the table.
        """
        with self as table:
            return table.take(transfer_id, time.monotonic(), self._free, broken_tokens=broken_tokens)

    def lend(self, transfer_id: bytes, on_change: Callable[[], None]) -> Arrival | None:
        """A transfer to read while it arrives, here or in other processes; None while it has no staging, or none left.

        Otherwise it is taken, dropped and broken as any other. `on_change` is called after each chunk and when it
        completes or fails, by the thread that knows of it: it must not block, nor call this object.
        """
        with self as table:
            transfer = table.live(transfer_id)
            if transfer is None or transfer.lease is None:
                return None
            return Arrival(self, transfer, on_change)

    def drop(self, transfer_id: bytes, reason: str, *, keep: bool = False) -> None:
        """As of the table."""
        with self as table:
            table.drop(transfer_id, reason, time.monotonic(), keep=keep)

    def report(self, transfer_id: bytes, status: TransferStatus) -> None:
        """As of the table."""
        with self as table:
            table.report(transfer_id, status, time.monotonic())

    def _free(self, staged: StagedTransfer) -> None:
        with self as table:
            staged.release()
            table.admit(time.monotonic())
