"""Pacing of a link: its bandwidth, divided over the connections that have something to send."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.transport.wire import MAX_LINK_CHARS, MAX_PROBE_BYTES, WireError, count_field, text_field

MAX_PACED_LINKS = 256
MAX_PACE_BITS_PER_S = 1 << 50
MAX_HOLD_S = 60.0
# Share of a link for background transfers while others are open: enough to keep their connections alive.
_BACKGROUND = 0.02
_NO_WORK: "tuple[tuple[Paced, ...], bool]" = ((), False)


@dataclass(frozen=True, slots=True)
class PaceOrder:
    """A control plane's order to a sender: its paces on links, and how long they hold."""

    bits_per_s: Mapping[str, int]
    """Goodput by the link's name; a link that is not named keeps its pace."""
    hold_s: float
    """Time without another order after which the sender returns to its standing share."""

    def to_body(self) -> dict[str, Any]:
        """The fields of a PACE frame."""
        return {"links": dict(self.bits_per_s), "hold_ms": round(1000 * self.hold_s)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "PaceOrder":
        """Read the fields of a PACE frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        links = body.get("links")
        if not isinstance(links, dict) or len(links) > MAX_PACED_LINKS:
            raise WireError(f"field 'links' must be an object of at most {MAX_PACED_LINKS} links")
        for link in links:
            if len(link) > MAX_LINK_CHARS or count_field(links, link, MAX_PACE_BITS_PER_S) == 0:
                raise WireError(
                    f"the pace of a link must be above 0, its name at most {MAX_LINK_CHARS} characters"
                )
        hold_ms = count_field(body, "hold_ms", int(1000 * MAX_HOLD_S))
        return cls(links, hold_ms / 1000)


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """An observer's order to send filler on a link, to measure what it carries."""

    link: str
    nbytes: int

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "ProbeOrder":
        """Read the fields of a PROBE frame. Raises WireError if one is missing or absurd."""
        nbytes = count_field(body, "bytes", MAX_PROBE_BYTES)
        return cls(text_field(body, "link", MAX_LINK_CHARS), nbytes)


class Paced(Protocol):
    """A connection whose send rate can be capped."""

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Cap the send rate, None: no cap; must not raise when the connection is gone."""


class LinkPacer:
    """Paces one sender on a link. Lock order: a peer queue's lock, then this one.

    The pace is the control plane's last order, or the standing share once that order has expired; never more than the
    link's bandwidth.
    """

    def __init__(
        self,
        bandwidth_bits_per_s: float | None,
        share_bits_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            bandwidth_bits_per_s: of the whole link; None: the link is not paced, and never will be.
            share_bits_per_s: this sender's standing share; None: all of it.
            clock: seconds.
        """
        self.bandwidth_bits_per_s = bandwidth_bits_per_s
        self.share_bits_per_s = bandwidth_bits_per_s if share_bits_per_s is None else share_bits_per_s
        self._clock = clock
        self._ordered_bits_per_s: float | None = None
        self._ordered_until_s = 0.0
        self._lock = threading.Lock()
        self._sharing: dict[object, tuple[tuple[Paced, ...], bool]] = {}

    @property
    def pace_bits_per_s(self) -> float | None:
        """The present pace of all connections together; None: not paced."""
        return self.share_bits_per_s if self._ordered_bits_per_s is None else self._ordered_bits_per_s

    def update(self, queue: object, connections: Sequence[Paced], *, background: bool = False) -> None:
        """Divide again if the connections of one peer queue changed.

        Args:
            queue: the peer queue, as a key.
            connections: those of the queue that are up while it has work; none while it has no work.
            background: all its transfers are in the background.
        """
        with self._lock:
            expired = self._expire()
            work = (tuple(connections), background and bool(connections))
            if self._sharing.get(queue, _NO_WORK) == work and not expired:
                return
            if connections:
                self._sharing[queue] = work
            else:
                self._sharing.pop(queue, None)
            self._divide()

    def order(self, bits_per_s: float, hold_s: float) -> None:
        """Apply the control plane's order; ignored where the link is not paced."""
        with self._lock:
            if self.bandwidth_bits_per_s is None:
                return
            self._ordered_until_s = self._clock() + hold_s
            if bits_per_s != self._ordered_bits_per_s:
                self._ordered_bits_per_s = bits_per_s
                self._divide()

    def look(self) -> None:
        """Return to the standing share if the last order has expired."""
        with self._lock:
            if self._expire():
                self._divide()

    def set_bandwidth(self, bits_per_s: float, share_bits_per_s: float | None = None) -> None:
        """Set a paced link's bandwidth, which orders never exceed, and the standing share if one is given."""
        with self._lock:
            self.bandwidth_bits_per_s = bits_per_s
            if share_bits_per_s is not None:
                self.share_bits_per_s = share_bits_per_s
            self._divide()

    def _expire(self) -> bool:
        expired = self._ordered_bits_per_s is not None and self._clock() >= self._ordered_until_s
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
        for connections, bits_per_s in (
            (sharing, usable_bits_per_s - (behind_bits_per_s if behind else 0.0)),
            (behind, behind_bits_per_s),
        ):
            for connection in connections:
                connection.set_rate(int(bits_per_s / BITS_PER_BYTE / len(connections)))
