"""A transfer whose verified bytes the engine reads while others are still arriving."""

from collections.abc import Callable, Sequence
from threading import Lock

from prfaas.serving.transport.incoming import IncomingTransfer
from prfaas.serving.transport.staging import StagedRegions, StagingLease
from prfaas.serving.transport.wire import TransferStatus


class Arrival(StagedRegions):
    """Lent by `Receiver.lend`; thread-safe.

    The staging stays in place until `give_back`, also when the transfer fails meanwhile. Whether it has completed
    or failed is what `Receiver.state` says, and `Receiver.take` hands over a complete one as ever.
    """

    def __init__(
        self,
        transfer: IncomingTransfer,
        lease: StagingLease,
        lock: Lock,
        on_change: Callable[[], None],
        admit: Callable[[], None],
    ) -> None:
        """Called under `lock`, which guards the transfer; `admit` lets waiting transfers in, under it too."""
        super().__init__(lease, transfer.region_starts, transfer.region_bytes)
        self._transfer = transfer
        self._lock = lock
        self._admit = admit
        transfer.lend(self, on_change)

    def ends(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """For each (region, start in bytes): where the verified bytes from there on end."""
        with self._lock:
            return [self._transfer.covered_end(region, start) for region, start in starts]

    def give_back(self) -> None:
        """Nothing is read any more; idempotent."""
        with self._lock:
            self._transfer.give_back(self)
            self._admit()


class FollowedTransfer:
    """A transfer whose staging other processes read: it stays in place until `give_back`, whatever becomes of it here.

    Made by `Receiver.follow`; thread-safe.
    """

    def __init__(
        self,
        transfer: IncomingTransfer,
        lease: StagingLease,
        lock: Lock,
        on_change: Callable[[], None],
        admit: Callable[[], None],
    ) -> None:
        """Arguments as of `Arrival`, but that `admit` takes the lock itself."""
        self.ticket = transfer.ticket
        """With the transfer's own id."""
        self.region_starts = tuple(transfer.region_starts)
        self.region_bytes = transfer.region_bytes
        self.lease_bytes, self.blocks = lease.nbytes, lease.blocks
        """Where it lies in the arena."""
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
        """What has become of it; whether an engine has taken it here plays no part."""
        with self._lock:
            return self._transfer.status()

    def give_back(self) -> None:
        """Nobody reads it any more; idempotent."""
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.free()
            self._admit()
