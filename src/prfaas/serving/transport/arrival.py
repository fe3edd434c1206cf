"""A transfer whose verified bytes the engine reads while others are still arriving."""

from collections.abc import Callable, Sequence
from threading import Lock

from prfaas.serving.transport.incoming import IncomingTransfer
from prfaas.serving.transport.staging import StagedRegions, StagingLease


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
