"""A link of the simulated deployment: the fluid that carries, and the view of it that policies read."""

from collections.abc import Callable

from prfaas.core.link.announced import AnnouncedLink
from prfaas.core.link.meter import LinkMeter
from prfaas.core.link.samples import ArrivalSample, SenderSample
from prfaas.core.scheduling.view import LinkView, show
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.link import FluidLink
from prfaas.lab.simulator.transfer import KvMoves

LOOK_S = 0.5
"""What policies read of a link that is as it was is this old at most; live, telemetry comes ten times a second."""
WATCH_S = 0.1
"""Period of the looks of a link that is not as it is believed to be, as live."""

# Egress is what was carried in about the last 2 s, as live.
_LOOKS = 4
_AS_BELIEVED = 0.1
_CONNECTIONS = 4
_SEGMENT_BYTES = 1000
# Senders that send so much more than the network carries fill its queue.
_QUEUES_FROM = 1.2
# BBR sends what was delivered at most in so many round trips (N. Cardwell et al., "BBR", ACM Queue 2016).
_REMEMBERED_ROUND_TRIPS = 10


class MonitoredLink:
    """Keeps a link's view as the live system does: bytes count against it from the moment they are promised.

    The view's capacity is what the live meter believes. It gets samples of the fluid, ten times a second while the
    link is not what it is believed to be. While it is, nothing could be learned, and nothing is computed.
    A network that carries less than its senders send holds as many bytes as the configured bandwidth carries in a
    round trip, and drops what is more: that gives the round trips and retransmissions of the samples. Senders send no
    more than their pace, nor than what they have seen delivered: so they send too much after a fall, for ten round
    trips, and not for ever. Between transfers and probes they remember.
    """

    view: LinkView
    """The link for policies."""
    fluid: FluidLink
    """Carries the transfers."""
    kv: KvMoves
    """The KVCache that crosses it."""
    meter: LinkMeter
    """Gives the view its numbers while the link is watched."""
    on_change: Callable[[], None]
    """Called when thresholds should be searched again."""
    promised_bytes: int
    """Of requests that were accepted and whose KV has not arrived."""
    carried_s: float
    """When the link was last seen with any capacity."""

    def __init__(
        self, view: LinkView, fluid: FluidLink, kv: KvMoves, events: Events, silence_s: float
    ) -> None:
        """`view` at rest, its capacity as configured; not heard for `silence_s` it is down."""
        self.view = view
        self.kv = kv
        self.fluid = fluid
        self.meter = LinkMeter(view.capacity_bits_per_s, events.now_s, silence_s)
        fluid.paced_bits_per_s = view.capacity_bits_per_s
        self.on_change = lambda: None
        self.promised_bytes = 0
        self.carried_s = 0.0
        self._events = events
        self._announced = AnnouncedLink(view.capacity_bits_per_s)
        self._history = [(0.0, 0.0)] * _LOOKS
        self._is_watched = False
        self._sent_bytes = self._resent_bytes = 0.0
        self._delivered_bits_per_s = view.capacity_bits_per_s
        self._excess_s = 0.0
        self._rtt_s = view.rtt_s
        self._sender = self._report(events.now_s, view.capacity_bits_per_s, view.rtt_s, False)

    @property
    def configured_bits_per_s(self) -> float:
        """The bandwidth that the deployment file gives."""
        return self.meter.configured_bits_per_s

    def promise(self, nbytes: int, now_s: float) -> None:
        """A request was accepted that will send so much."""
        view = self.view
        self.promised_bytes += nbytes
        start_s = view.drained_s if view.drained_s > now_s else now_s
        view.drained_s = start_s + BITS_PER_BYTE * nbytes / view.capacity_bits_per_s

    def settle(self, nbytes: int, now_s: float) -> None:
        """A promise was kept, or given up."""
        view = self.view
        self.promised_bytes -= nbytes
        drained_s = now_s + BITS_PER_BYTE * self.promised_bytes / view.capacity_bits_per_s
        if drained_s < view.drained_s:
            view.drained_s = drained_s

    def look(self, now_s: float) -> None:
        """Bring the view up to date, as telemetry would."""
        if self._is_watched:
            return
        view, fluid = self.view, self.fluid
        capacity = fluid.capacity_bits_per_s
        is_exact = view.up and capacity == view.capacity_bits_per_s == self._announced.bits_per_s
        if not (is_exact or self._is_as_believed(capacity)):
            self._is_watched = True
            self.meter.seen_s = now_s
            self._watch(None)
            return
        self.carried_s = now_s
        sent_bits = fluid.sent_bits
        since_s, before_bits = self._history.pop(0)
        self._history.append((now_s, sent_bits))
        if now_s > since_s:
            view.egress_bits_per_s = (sent_bits - before_bits) / (now_s - since_s)

    def _watch(self, _argument: object) -> None:
        """One look of the live meter, and the next one in a tenth of a second until the link is what it seems."""
        view, fluid, meter, now_s = self.view, self.fluid, self.meter, self._events.now_s
        capacity = fluid.capacity_bits_per_s
        is_full = fluid.is_full
        if capacity > 0:
            self.carried_s = now_s
            self._renew_report(capacity, is_full, now_s)
        arrived = int(fluid.sent_bits / BITS_PER_BYTE)
        segments = arrived // _SEGMENT_BYTES
        arrival = ArrivalSample(
            at_s=now_s, bytes_total=arrived, segments_total=segments, mss_bytes=_SEGMENT_BYTES
        )
        meter.observe({"": self._sender}, {"": arrival}, now_s)
        self._show(now_s)
        fluid.paced_bits_per_s = min(meter.pace_bits_per_s, meter.configured_bits_per_s)
        probe_bytes = meter.probe_bytes(now_s)
        if probe_bytes:
            fluid.fill(probe_bytes)
        if self._is_as_believed(capacity) and not meter.congestion:
            self._is_watched = False
            self._history = [(now_s, fluid.sent_bits)] * _LOOKS
            view.seen_s = float("inf")
            return
        self._events.at(now_s + WATCH_S, self._watch)

    def _renew_report(self, capacity_bits_per_s: float, is_full: bool, now_s: float) -> None:
        """Renew the senders' report."""
        fluid, configured = self.fluid, self.meter.configured_bits_per_s
        pace = min(self.meter.pace_bits_per_s, configured)
        sent_bytes = fluid.sent_bits / BITS_PER_BYTE
        excess = self._excess(pace, capacity_bits_per_s) if is_full else 1.0
        rtt_s = self._rtt_s
        if excess > _QUEUES_FROM:
            self._resent_bytes += (excess - 1) * (sent_bytes - self._sent_bytes)
            rtt_s *= 1 + configured / capacity_bits_per_s
        self._sent_bytes = sent_bytes
        self._sender = self._report(now_s, pace, rtt_s, is_full)

    def _report(self, now_s: float, pace_bits_per_s: float, rtt_s: float, is_full: bool) -> SenderSample:
        """The report of all senders together."""
        open_bytes = int(self.fluid.residual_bytes)
        return SenderSample(
            at_s=now_s,
            pace_bits_per_s=pace_bits_per_s,
            queued_bytes=open_bytes if is_full else 0,
            waiting_bytes=0,
            open_bytes=open_bytes,
            acked_bytes_total=0,
            unsent_bytes=_SEGMENT_BYTES if is_full else 0,
            filled_connections=_CONNECTIONS if is_full else 0,
            delivery_bits_per_s=0.0,
            rtt_s=rtt_s,
            least_rtt_s=self._rtt_s,
            sent_bytes_total=int(self._sent_bytes + self._resent_bytes),
            resent_bytes_total=int(self._resent_bytes),
            busy_s_total=0.0,
            receiver_limited_s_total=0.0,
            connections_up=_CONNECTIONS,
            connections=_CONNECTIONS,
        )

    def _excess(self, pace_bits_per_s: float, capacity_bits_per_s: float) -> float:
        """How much more is sent than carried while the link is full, as a ratio: congestion control takes time."""
        if capacity_bits_per_s < self._delivered_bits_per_s:
            self._excess_s += WATCH_S
        if (
            capacity_bits_per_s >= self._delivered_bits_per_s
            or self._excess_s > _REMEMBERED_ROUND_TRIPS * self._sender.rtt_s
        ):
            self._delivered_bits_per_s = capacity_bits_per_s
            self._excess_s = 0.0
        return min(pace_bits_per_s, self._delivered_bits_per_s) / capacity_bits_per_s

    def _show(self, now_s: float) -> None:
        view, meter = self.view, self.meter
        believed = meter.capacity_bits_per_s
        if believed != view.capacity_bits_per_s:
            view.drained_s = now_s + max(view.drained_s - now_s, 0.0) * view.capacity_bits_per_s / believed
            view.capacity_bits_per_s = believed
        rtt_s = view.rtt_s
        show(meter, view, now_s)
        view.rtt_s = rtt_s
        view.up = meter.is_up(now_s)
        if self._announced.is_due(believed, view.up, now_s):
            self.on_change()

    def _is_as_believed(self, capacity_bits_per_s: float) -> bool:
        """Whether the meter's belief is right, and has been announced."""
        view = self.view
        off = capacity_bits_per_s - view.capacity_bits_per_s
        capped = capacity_bits_per_s >= self.meter.configured_bits_per_s
        right = abs(off) <= _AS_BELIEVED * view.capacity_bits_per_s or (
            capped and off > 0 and not self.meter.is_slow
        )
        return view.up and right and abs(self._announced.bits_per_s / view.capacity_bits_per_s - 1) <= 0.3
