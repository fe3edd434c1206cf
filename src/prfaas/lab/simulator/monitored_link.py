"""A link as the simulated deployment uses it: the fluid that carries, and what policies are told of it."""

from prfaas.core.scheduling import LinkView
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.link import FluidLink

LOOK_S = 0.5
"""What policies read of a link is this old at most; live, telemetry comes ten times a second."""

# Egress is what was carried in about the last 2 s, as live.
_LOOKS = 4


class MonitoredLink:
    """Keeps a link's view as the live system does: bytes count against it from the moment they are promised."""

    __slots__ = ("_history", "carried_s", "fluid", "promised_bytes", "view")

    view: LinkView
    """What policies read."""
    fluid: FluidLink
    """What carries the transfers."""
    promised_bytes: int
    """Of requests that were accepted and whose KV has not arrived."""
    carried_s: float
    """When the link was last seen with any capacity."""

    def __init__(self, view: LinkView, fluid: FluidLink) -> None:
        self.view = view
        self.fluid = fluid
        self.promised_bytes = 0
        self._history = [(0.0, 0.0)] * _LOOKS
        self.carried_s = 0.0

    def promise(self, nbytes: int, now_s: float) -> None:
        """A request was accepted that will send so much."""
        view = self.view
        self.promised_bytes += nbytes
        start_s = view.drained_s if view.drained_s > now_s else now_s
        if view.capacity_bits_per_s > 0:
            view.drained_s = start_s + BITS_PER_BYTE * nbytes / view.capacity_bits_per_s

    def settle(self, nbytes: int, now_s: float) -> None:
        """A promise was kept, or given up."""
        view = self.view
        self.promised_bytes -= nbytes
        if view.capacity_bits_per_s > 0:
            drained_s = now_s + BITS_PER_BYTE * self.promised_bytes / view.capacity_bits_per_s
            if drained_s < view.drained_s:
                view.drained_s = drained_s

    def look(self, now_s: float) -> None:
        """Bring the view up to date, as telemetry would."""
        view, fluid = self.view, self.fluid
        capacity = fluid.capacity_bits_per_s
        view.up = capacity > 0
        if capacity > 0:
            if capacity != view.capacity_bits_per_s:
                view.drained_s = (
                    now_s + max(view.drained_s - now_s, 0.0) * view.capacity_bits_per_s / capacity
                )
                view.capacity_bits_per_s = capacity
            self.carried_s = now_s
        sent_bits = fluid.sent_bits
        since_s, before_bits = self._history.pop(0)
        self._history.append((now_s, sent_bits))
        if now_s > since_s:
            view.egress_bits_per_s = (sent_bits - before_bits) / (now_s - since_s)
