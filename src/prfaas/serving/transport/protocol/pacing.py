"""Pacing of a link: its bandwidth, divided over the connections that have something to send."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Protocol

import msgspec

from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.transport.protocol.wire import MAX_LINK_CHARS, MAX_PROBE_BYTES, FrameType

MAX_PACED_LINKS = 256
MAX_PACE_BITS_PER_S = 1 << 50
# Share of a link for background transfers while others are open: enough to keep their connections alive.
_BACKGROUND = 0.02
# A control plane probes with 0.6 s of twice what it believes in, every 0.9 s at most.
_PROBE_PAUSE_S, _LEAST_PROBE_BYTES, _UNPACED_PROBE_BITS_PER_S = 0.5, 64 << 10, 128e6
_NO_WORK: "tuple[tuple[Paced, ...], bool]" = ((), False)


_LinkName = Annotated[str, msgspec.Meta(max_length=MAX_LINK_CHARS)]
_Pace = Annotated[int, msgspec.Meta(ge=1, le=MAX_PACE_BITS_PER_S)]


class PaceOrder(msgspec.Struct, frozen=True, rename={"bits_per_s": "links"}):
    """A control plane's order to a sender, the fields of a PACE frame: its paces on links, and how long they hold."""

    kind: ClassVar[FrameType] = FrameType.PACE

    bits_per_s: Annotated[dict[_LinkName, _Pace], msgspec.Meta(max_length=MAX_PACED_LINKS)]
    """Goodput by the link's name; a link that is not named keeps its pace."""
    hold_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)]
    """Time without another order after which the sender returns to its standing share."""


class ProbeOrder(msgspec.Struct, frozen=True, rename={"nbytes": "bytes"}):
    """A control plane's order to send filler on a link, to measure what it carries: the fields of a PROBE frame."""

    kind: ClassVar[FrameType] = FrameType.PROBE

    link: _LinkName
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE_BYTES)]


class Paced(Protocol):
    """A connection whose send rate can be capped."""

    @property
    def least_bytes_per_s(self) -> float:
        """The rate at which a packet leaves within half a second: what left at a lower one holds up all behind it."""
        ...

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Cap the send rate, None: no cap; must not raise when the connection is gone."""


class LinkPacer:
    """Paces one sender on a link. Not thread-safe; time comes in.

    The pace is the control plane's last order, or the standing share once that order has expired; never more than the
    link's bandwidth.
    """

    def __init__(
        self,
        bandwidth_bits_per_s: float | None,
        share_bits_per_s: float | None = None,
    ) -> None:
        """
        Args:
            bandwidth_bits_per_s: of the whole link; None: the link is not paced, and never will be.
            share_bits_per_s: this sender's standing share; None: all of it.
        """
        self.bandwidth_bits_per_s = bandwidth_bits_per_s
        self.share_bits_per_s = bandwidth_bits_per_s if share_bits_per_s is None else share_bits_per_s
        self._ordered_bits_per_s: float | None = None
        self._ordered_until_s = 0.0
        self._probed_s = float("-inf")
        self._sharing: dict[object, tuple[tuple[Paced, ...], bool]] = {}

    @property
    def pace_bits_per_s(self) -> float | None:
        """The present pace of all connections together; None: not paced."""
        return self.share_bits_per_s if self._ordered_bits_per_s is None else self._ordered_bits_per_s

    def update(
        self, queue: object, connections: Sequence[Paced], now_s: float, *, background: bool = False
    ) -> None:
        """Divide again if the connections of one peer queue changed.

        Args:
            queue: the peer queue, as a key.
            connections: those of the queue that are up while it has work; none while it has no work.
            now_s: now.
            background: all its transfers are in the background.
        """
        expired = self._expire(now_s)
        work = (tuple(connections), background and bool(connections))
        if self._sharing.get(queue, _NO_WORK) == work and not expired:
            return
        if connections:
            self._sharing[queue] = work
        else:
            self._sharing.pop(queue, None)
        self._divide()

    def order(self, bits_per_s: float, hold_s: float, now_s: float) -> None:
        """Apply the control plane's order; ignored where the link is not paced."""
        if self.bandwidth_bits_per_s is None:
            return
        self._ordered_until_s = now_s + hold_s
        if bits_per_s != self._ordered_bits_per_s:
            self._ordered_bits_per_s = bits_per_s
            self._divide()

    def admit_probe(self, nbytes: int, now_s: float) -> int:
        """How much of a probe to send now: at most what the link carries in a second, and one in half a second."""
        if now_s - self._probed_s < _PROBE_PAUSE_S:
            return 0
        self._probed_s = now_s
        bits_per_s = self.bandwidth_bits_per_s or _UNPACED_PROBE_BITS_PER_S
        return min(nbytes, max(int(bits_per_s / BITS_PER_BYTE), _LEAST_PROBE_BYTES))

    def look(self, now_s: float) -> None:
        """Return to the standing share if the last order has expired."""
        if self._expire(now_s):
            self._divide()

    def set_bandwidth(self, bits_per_s: float, share_bits_per_s: float | None = None) -> None:
        """Set a paced link's bandwidth, which orders never exceed, and the standing share if one is given."""
        self.bandwidth_bits_per_s = bits_per_s
        if share_bits_per_s is not None:
            self.share_bits_per_s = share_bits_per_s
        self._divide()

    def _expire(self, now_s: float) -> bool:
        expired = self._ordered_bits_per_s is not None and now_s >= self._ordered_until_s
        if expired:
            self._ordered_bits_per_s = None
        return expired

    def _divide(self) -> None:
        pace_bits_per_s = self.pace_bits_per_s
        if self.bandwidth_bits_per_s is None or pace_bits_per_s is None:
            return
        usable_bits_per_s = min(self.bandwidth_bits_per_s, pace_bits_per_s)
        sharing = [each for those, background in self._sharing.values() if not background for each in those]
        behind = [each for those, background in self._sharing.values() if background for each in those]
        behind_bits_per_s = usable_bits_per_s * (_BACKGROUND if sharing else 1.0)
        standing_bits_per_s = min(self.share_bits_per_s or usable_bits_per_s, self.bandwidth_bits_per_s)
        standing_bytes_per_s = standing_bits_per_s / BITS_PER_BYTE / max(len(sharing) + len(behind), 1)
        for connections, bits_per_s in (
            (sharing, usable_bits_per_s - (behind_bits_per_s if behind else 0.0)),
            (behind, behind_bits_per_s),
        ):
            for connection in connections:
                # Whatever is ordered; but no more than the standing share, however narrow that is.
                least = min(connection.least_bytes_per_s, standing_bytes_per_s)
                connection.set_rate(int(max(bits_per_s / BITS_PER_BYTE / len(connections), least)))
