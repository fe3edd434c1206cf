"""The bytes of one link, as promised here and as measured."""

from itertools import count

_ids = count()


class LinkLoad:
    """Bytes of the open transfers of one link, accepted by prediction, sent by measurement.

    Bytes that the link is measured to deliver come off the oldest promises, and a transfer that ends takes its
    own with it. So nothing is left when nothing is open, however wrong the predictions were. Where other gateways use
    the link too, what it delivers comes off the promises of all, in proportion.
    """

    __slots__ = ("_measured_bytes", "_open", "_open_bytes", "_unsent_bytes", "others_bytes")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._open_bytes = 0
        self._unsent_bytes = 0
        self._measured_bytes = 0
        self.others_bytes = 0
        """What other gateways have promised to the link and is still to leave."""

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, nbytes: int) -> int:
        """Open a transfer of `nbytes` >= 0. Returns the number that `finish` takes."""
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
        """Note that the link delivered `nbytes` more, and that by its producers `measured_bytes` are still to leave."""
        if self._unsent_bytes:
            own_bytes = nbytes * self._unsent_bytes // (self._unsent_bytes + self.others_bytes)
            self._unsent_bytes = max(self._unsent_bytes - own_bytes, 0)
        self._measured_bytes = measured_bytes

    @property
    def promised_bytes(self) -> int:
        """Of what was promised here, what is still to leave."""
        return self._unsent_bytes

    @property
    def residual_bytes(self) -> int:
        """Still to leave: what was promised by all gateways, or what its producers report, if that is more."""
        return max(self._unsent_bytes + self.others_bytes, self._measured_bytes)
