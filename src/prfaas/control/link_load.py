"""The bytes that were promised to one link and have not left yet, as predicted."""

from itertools import count

_ids = count()


class LinkLoad:
    """Bytes of the open transfers of one link, accepted by prediction, sent by measurement.

    Bytes that the link is measured to deliver come off the oldest promises, and a transfer that ends takes its
    own with it: so nothing is left when nothing is open, whatever the predictions were worth.
    """

    __slots__ = ("_measured_bytes", "_open", "_open_bytes", "_unsent_bytes")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._open_bytes = 0
        self._unsent_bytes = 0
        self._measured_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, nbytes: int) -> int:
        """A transfer of `nbytes` >= 0 is opened; the answer is what `finish` wants."""
        transfer = next(_ids)
        self._open[transfer] = nbytes
        self._open_bytes += nbytes
        self._unsent_bytes += nbytes
        return transfer

    def finish(self, transfer: int) -> None:
        """The transfer is complete, or given up."""
        self._open_bytes -= self._open.pop(transfer)
        self._unsent_bytes = min(self._unsent_bytes, self._open_bytes)

    def delivered(self, nbytes: int, measured_bytes: int) -> None:
        """The link has delivered `nbytes` more, and its producers say that `measured_bytes` are still to leave."""
        self._unsent_bytes = max(self._unsent_bytes - nbytes, 0)
        self._measured_bytes = measured_bytes

    @property
    def residual_bytes(self) -> int:
        """Still to leave: what was promised here, or what producers know of, if that is more."""
        return max(self._unsent_bytes, self._measured_bytes)
