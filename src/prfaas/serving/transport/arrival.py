"""A transfer whose verified bytes the engine reads while others are still arriving."""

from collections.abc import Callable, Sequence
from threading import Lock

from prfaas.serving.transport.incoming import IncomingTransfer
from prfaas.serving.transport.staging import StagedRegions, StagingLease
from prfaas.serving.transport.wire import TransferStatus


class Arrival(StagedRegions):
    """Lent by `TransferTable.lend`; thread-safe.

    The staging stays in place until `give_back`, even if the transfer fails meanwhile. The table's `state` still
    reports completion or failure, and its `take` still hands over the complete transfer.
    """

    def __init__(
        self,
        transfer: IncomingTransfer,
        lease: StagingLease,
        lock: Lock,
        on_change: Callable[[], None],
        admit: Callable[[], None],
    ) -> None:
        """Called under `lock`, which guards the transfer, as is `admit`, which lets waiting transfers in."""
        super().__init__(lease, transfer.region_starts, transfer.region_bytes)
        self._transfer = transfer
        self._lock = lock
        self._admit = admit
        transfer.lend(self, on_change)

    def ends(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """The end of the verified bytes that begin at each (region, start in bytes)."""
        with self._lock:
            return [self._transfer.covered_end(region, start) for region, start in starts]

    def give_back(self) -> None:
        """End reading; idempotent."""
        with self._lock:
            self._transfer.give_back(self)
            self._admit()


class FollowedTransfer:
    """A transfer whose staging other processes read: it stays in place until `give_back`, even if it fails here.

    Made by `TransferTable.follow`; thread-safe.
    """

    def __init__(
        self,
        transfer: IncomingTransfer,
        lease: StagingLease,
        lock: Lock,
        on_change: Callable[[], None],
        admit: Callable[[], None],
    ) -> None:
        """Arguments of `Arrival`, except that `admit` takes the lock itself."""
        self.ticket = transfer.ticket
        """The transfer's ticket, with the transfer's own id."""
        self.region_starts = tuple(transfer.region_starts)
        self.region_bytes = transfer.region_bytes
        self.lease_bytes, self.blocks = lease.nbytes, lease.blocks
        """Its place in the arena."""
        self._transfer = transfer
        self._lease: StagingLease | None = lease
        self._lock = lock
        self._admit = admit
        lease.share()
        transfer.follow(self, on_change)

    def covered(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The verified bytes of each region, as ascending ranges from their start to their end."""
        with self._lock:
            return self._transfer.covered_ranges()

    def status(self) -> TransferStatus:
        """The transfer's phase and progress, regardless of whether the engine here has taken it."""
        with self._lock:
            return self._transfer.status()

    @property
    def is_over(self) -> bool:
        """True if the transfer is complete or has failed."""
        return self._transfer.phase.terminal

    def give_back(self) -> None:
        """End reading by other processes; idempotent."""
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.free()
            self._admit()
