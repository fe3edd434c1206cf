"""Telemetry of links: reports of both ends, ten times a second, summed per link into the `View`.

`LinkBreaker` closes a link whose transfers fail, whatever its connections report.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from prfaas.core.backoff import Backoff
from prfaas.core.deployment import AppliedDeployment, Instance, Link
from prfaas.core.link.announced import AnnouncedLink
from prfaas.core.link.cost import LinkCost
from prfaas.core.link.meter import LinkMeter
from prfaas.core.link.samples import NOTHING_ARRIVED, ArrivalSample, SenderSample
from prfaas.core.scheduling.view import show
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import period_s
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import BackgroundTasks
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.pacing import ProbeOrder
from prfaas.serving.transport.protocol.wire import MAX_PROBE_BYTES, read_body

_FAILURES_TO_CLOSE = 3
_CLOSED = Backoff(10.0, 80.0)


class LinkBreaker:
    """Three failed transfers in a row close a link for 10 s. Then it is tried again.

    One more failure closes it for twice as long, up to 80 s. One success clears all earlier failures.
    """

    __slots__ = ("_closed_until_s", "_failures")

    def __init__(self) -> None:
        self._failures = 0
        self._closed_until_s = float("-inf")

    def failed(self, now_s: float) -> None:
        """A transfer failed. While the link is closed that is not counted: those transfers began before."""
        if not self.is_up(now_s):
            return
        self._failures += 1
        if self._failures >= _FAILURES_TO_CLOSE:
            self._closed_until_s = now_s + _CLOSED.pause_s(self._failures - _FAILURES_TO_CLOSE + 1)

    def succeeded(self) -> None:
        """A transfer came through."""
        self._failures = 0
        self._closed_until_s = float("-inf")

    def is_up(self, now_s: float) -> bool:
        return now_s >= self._closed_until_s


logger = logging.getLogger(__name__)

WANTED_S = 0.1
MOST_ASKED_PER_S = 250.0
# Answers that are due at once from one rank: a late one must not keep the next question back.
_MOST_DUE = 24
_ANSWER_S = 2.0
# A rank that doesn't answer is asked more rarely.
_RETRY_S = 2.0
_LATE_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _SenderTelemetry:
    links: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Telemetry:
    """The answer of a KV port; each entry is read as a sample of its kind."""

    sender: _SenderTelemetry
    arrivals: dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Rank:
    name: str
    """Of its instance, or a pool."""
    cluster: str
    number: int
    observer: Observer
    ask_again_s: float = 0.0
    due: int = 0


@dataclass(slots=True)
class KnownLink:
    """All that is known of one link."""

    meter: LinkMeter
    cost: LinkCost
    announced: AnnouncedLink
    breaker: LinkBreaker = field(default_factory=LinkBreaker)
    samples: dict[str, SenderSample] = field(default_factory=dict)
    """The newest word of each sender, by "instance/rank"."""
    arrivals: dict[str, ArrivalSample] = field(default_factory=dict)
    """What has come at each receiver, by "instance/rank"."""
    is_told: bool = False
    """A sender has spoken of it. One that is added while everything runs may be unknown to its engines before."""


class LinkMonitor(Part):
    """Asks every tensor-parallel rank at both ends of the links, and keeps the links of the state right.

    The word of a sender crosses the link that it speaks of. What arrives is counted at this end, where the gateway is.
    """

    def __init__(
        self,
        running: RunningDeployment,
        observer_of: Callable[[Instance, int], Observer],
        cluster_state: ClusterState,
        *,
        on_change: Callable[[str], None],
        on_answer: Callable[[str, int], None] = lambda _name, _rank: None,
        pool_ports: Mapping[str, Observer] = MappingProxyType({}),
    ) -> None:
        """`on_change` is called with the link's name when it goes down or comes back, or its capacity changes much.

        `on_answer(instance, rank)`: it has answered. `pool_ports`: of pools, by name; they send on links too.
        """
        self._running = running
        self._cluster_state = cluster_state
        self._clock = cluster_state.clock
        self._on_change = on_change
        self._on_answer = on_answer
        self.by_pair: dict[tuple[str, str], KnownLink] = {}
        """By the names of both clusters, the source first."""
        self._observer_of = observer_of
        self._pool_ports = pool_ports
        self._clusters: dict[str, str] = {}
        self._ranks: dict[str, _Rank] = {}
        self._follow()
        for link in self.by_pair.values():
            # Engines that are there at the start know these from their own file.
            link.is_told = True
        self._asked = BackgroundTasks()
        self.failures = self._counted = 0

    def follow(self, _before: AppliedDeployment, _now: AppliedDeployment) -> None:
        """Ask other ranks, and take links for as wide and as dear as the file says.

        A link that is added is used once a sender has spoken of it: until then its engines may not know it.
        """
        self._follow()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.ask()
            pause_s = period_s(WANTED_S, len(self._ranks), MOST_ASKED_PER_S) / 2
            # Answers take a fraction of the period; a slower one counts in the next round.
            await asyncio.sleep(pause_s)
            self.conclude()
            await asyncio.sleep(pause_s)

    def ask(self) -> None:
        """Ask every rank, without waiting for answers: only what has failed is asked more rarely."""
        now_s = self._clock()
        for name, rank in self._ranks.items():
            if rank.due < _MOST_DUE and now_s >= rank.ask_again_s:
                rank.due += 1
                self._asked.start(self._ask(name, rank))

    def conclude(self) -> None:
        """Update the links with the answers so far, and probe those that are believed slow and have no work."""
        now_s = self._clock()
        for pair, link in self.by_pair.items():
            try:
                self._conclude(pair, link, now_s)
            except Exception as error:
                # Down until a round succeeds, with what is reported from then on.
                self._cluster_state.view.links[pair].up = False
                link.samples.clear()
                link.arrivals.clear()
                self.loop_failures.note("LinkMonitor", error, "->".join(pair))

    def _conclude(self, pair: tuple[str, str], link: KnownLink, now_s: float) -> None:
        believed_since_s = now_s - link.meter.silence_s
        for of_ends in (link.samples, link.arrivals):
            for name in [name for name, each in of_ends.items() if each.at_s < believed_since_s]:
                del of_ends[name]
        carried_bytes = link.meter.observe(link.samples, link.arrivals, now_s)
        self._update_link(pair, link, carried_bytes, now_s)
        probe_bytes = link.meter.probe_bytes(now_s)
        if probe_bytes:
            self._probe(pair, link.samples, probe_bytes)

    def samples(self, pair: tuple[str, str]) -> Mapping[str, SenderSample]:
        """The newest word of each sender of a link, by "instance/rank"."""
        return self.by_pair[pair].samples

    def resent_bytes(self, producer: str, consumer: str) -> int | None:
        """Bytes that the kernels of `producer` have sent again on the link to `consumer`, by its last word.

        They are all transfers' together, and start again with the process. None: both are in one cluster, or the
        producer has said nothing lately.
        """
        # Either may have left the deployment while a request of theirs goes on.
        pair = (self._clusters.get(producer, ""), self._clusters.get(consumer, ""))
        told = [
            sample.resent_bytes_total
            for name, sample in (self.by_pair[pair].samples if pair in self.by_pair else {}).items()
            if name.rpartition("/")[0] == producer
        ]
        return sum(told) if told else None

    def failed(self, pair: tuple[str, str]) -> None:
        """A transfer over a link failed, and neither end is known to be dead."""
        if pair in self.by_pair:
            self.by_pair[pair].breaker.failed(self._clock())

    def succeeded(self, pair: tuple[str, str]) -> None:
        """A transfer over a link was completed."""
        if pair in self.by_pair:
            self.by_pair[pair].breaker.succeeded()

    def state(self, now_s: float) -> Json:
        """All links."""
        return {"links": {link.name: self._state(link, now_s) for link in self._running.current.links}}

    def write_gauges(self, metrics: ControlMetrics, now_s: float) -> None:
        """Write the gauges of links."""
        for name, link in self.state(now_s)["links"].items():
            metrics.link_up.labels(name).set(link["up"])
            metrics.link_configured.labels(name).set(link["configured_bits_per_s"])
            metrics.link_capacity.labels(name).set(link["capacity_bits_per_s"])
            metrics.link_egress.labels(name).set(link["egress_bits_per_s"])
            metrics.link_queued_bytes.labels(name).set(link["queued_bytes"])
            metrics.link_drain_seconds.labels(name).set(link["drain_s"])
            metrics.link_rtt_seconds.labels(name).set(link["rtt_s"])
            metrics.link_queue_rtt_seconds.labels(name).set(link["queue_rtt_s"])
            metrics.link_retransmit_ratio.labels(name).set(link["retransmit_ratio"])
            metrics.link_congestion.labels(name).set(link["congestion"])
            metrics.link_age_seconds.labels(name).set(link["age_s"])
        metrics.telemetry_failures.labels("links").inc(self.failures - self._counted)
        self._counted = self.failures

    async def close(self) -> None:
        """End what is being asked; the observers are those of whoever made them."""
        await self._asked.cancel()

    def _state(self, link: Link, now_s: float) -> Json:
        pair = (link.source, link.target)
        view, meter = self._cluster_state.view.links[pair], self.by_pair[pair].meter
        return {
            "source": link.source,
            "target": link.target,
            "up": view.up,
            "configured_bits_per_s": link.bandwidth_bits_per_s,
            "capacity_bits_per_s": round(view.capacity_bits_per_s),
            "egress_bits_per_s": round(view.egress_bits_per_s),
            "delivery_bits_per_s": round(meter.delivery_bits_per_s),
            "utilisation": round(view.utilisation, 4),
            "queued_bytes": meter.queued_bytes,
            "residual_bytes": self._cluster_state.residual_bytes(pair),
            "drain_s": round(max(view.drained_s - now_s, 0.0), 4),
            "transfers": self._cluster_state.transfers_open(pair),
            "rtt_s": round(view.rtt_s, 6),
            "retransmit_ratio": round(view.retransmit_ratio, 6),
            "connections_up": meter.connections_up,
            "carried_bytes": meter.carried_bytes,
            "egress_per_gb": link.egress_per_gb,
            "egress_cost": round(self.by_pair[pair].cost.total(meter.carried_bytes), 6),
            "congestion": round(view.congestion, 4),
            "condition": view.condition,
            "queue_rtt_s": round(meter.network.rtt_s, 6),
            "age_s": round(max(now_s - view.seen_s, 0.0), 3),
        }

    def _follow(self) -> None:
        deployment = self._running.current
        self._have(deployment.links, deployment.control.silence_s)
        self._clusters = {instance.name: instance.cluster for instance in deployment.instances}
        self._clusters |= {pool.name: pool.cluster for pool in deployment.pools}
        ends = {cluster for pair in self.by_pair for cluster in pair}
        pools = [pool for pool in deployment.pools if pool.cluster in ends and pool.name in self._pool_ports]
        ranks = {
            (instance.name, rank): instance
            for instance in deployment.instances
            if instance.cluster in ends
            for rank in range(instance.kv_ranks)
        }
        self._ranks = {
            f"{name}/{rank}": self._ranks.get(f"{name}/{rank}")
            or _Rank(name, instance.cluster, rank, self._observer_of(instance, rank))
            for (name, rank), instance in ranks.items()
        } | {
            f"{pool.name}/0": self._ranks.get(f"{pool.name}/0")
            or _Rank(pool.name, pool.cluster, 0, self._pool_ports[pool.name])
            for pool in pools
        }
        for link in deployment.links:
            found = self.by_pair[link.source, link.target]
            found.meter.reconfigure(link.bandwidth_bits_per_s, deployment.control.silence_s)
            found.cost.reprice(link.egress_per_gb, found.meter.carried_bytes)

    def _have(self, links: Sequence[Link], silence_s: float) -> None:
        """Begin with links that are new, and forget those that are gone."""
        before, self.by_pair = self.by_pair, {}
        for link in links:
            pair, meter = (
                (link.source, link.target),
                LinkMeter(link.bandwidth_bits_per_s, self._clock(), silence_s),
            )
            fresh = KnownLink(meter, LinkCost(link.egress_per_gb), AnnouncedLink(meter.capacity_bits_per_s))
            self.by_pair[pair] = before.get(pair, fresh)

    async def _ask(self, name: str, rank: _Rank) -> None:
        asked_s = self._clock()
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await rank.observer.telemetry()
            if name in self._ranks:
                self._on_answer(rank.name, rank.number)
                self._take(name, rank, answer, asked_s)
        except TimeoutError:
            # Its answer may still be on its way.
            self.failures += 1
            rank.ask_again_s = self._clock() + _LATE_RETRY_S
        except (OSError, ValueError) as error:
            self.failures += 1
            rank.ask_again_s = self._clock() + _RETRY_S
            logger.debug("no link telemetry from %s: %s", name, error)
        finally:
            rank.due -= 1

    def _take(self, name: str, rank: _Rank, answer: Mapping[str, Any], asked_s: float) -> None:
        told = read_body(_Telemetry, answer)
        for pair, link in self.by_pair.items():
            report = told.sender.links.get("->".join(pair))
            if report is not None:
                # Taken at some time after the question, which came without delay: the way here is the full one.
                link.samples[name] = SenderSample.of_report(report, asked_s)
                link.is_told = True
        now_s, target = self._clock(), rank.cluster
        arrived = {pair: NOTHING_ARRIVED for pair in self.by_pair if pair[1] == target}
        for producer, report in told.arrivals.items():
            pair = (self._clusters.get(producer.partition("/")[0], ""), target)
            if pair in arrived:
                arrived[pair] += ArrivalSample.of_report(report, now_s)
        for pair, arrival in arrived.items():
            self.by_pair[pair].arrivals[name] = ArrivalSample(at_s=now_s, **msgspec.to_builtins(arrival))

    def _probe(self, pair: tuple[str, str], samples: Mapping[str, SenderSample], nbytes: int) -> None:
        able = [
            self._ranks[name]
            for name, sample in samples.items()
            if sample.connections_up and name in self._ranks
        ]
        for rank in able:
            self._asked.start(self._ask_probe(rank, f"{pair[0]}->{pair[1]}", nbytes // len(able)))

    async def _ask_probe(self, rank: _Rank, link: str, nbytes: int) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await rank.observer.order(ProbeOrder(link, min(nbytes, MAX_PROBE_BYTES)))

    def _update_link(self, pair: tuple[str, str], known: KnownLink, carried_bytes: int, now_s: float) -> None:
        link, meter = self._cluster_state.view.links[pair], known.meter
        capacity = meter.capacity_bits_per_s
        self._cluster_state.set_link(
            pair,
            delivered_bytes=carried_bytes,
            measured_bytes=meter.open_bytes,
            capacity_bits_per_s=capacity,
        )
        show(meter, link, now_s)
        up = known.is_told and meter.is_up(now_s) and known.breaker.is_up(now_s)
        if up != link.up:
            link.up = up
            logger.warning("link %s->%s is %s", *pair, "up" if up else "down: not used")
        if known.announced.is_due(capacity, up, now_s):
            self._on_change(f"{pair[0]}->{pair[1]}")
