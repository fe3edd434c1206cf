"""The live control plane of one gateway: everything that routing knows, kept up to date by its parts."""

import asyncio
import time
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from prfaas.core.deployment import AppliedDeployment, Instance
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.prefill_curves import PrefillCurves
from prfaas.core.prefix.digests import HeldEvent
from prfaas.core.prefix.hashing import seed_of
from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.serving.control.cluster_state import Clock, ClusterState, OnService, OpenPrefill
from prfaas.serving.control.compatibility import Compatibility
from prfaas.serving.control.deployed_view import DeployedView
from prfaas.serving.control.drains import InstanceDrains
from prfaas.serving.control.engine_monitor import EngineMonitor
from prfaas.serving.control.engine_reading import EngineReading
from prfaas.serving.control.experiment import Experiment
from prfaas.serving.control.health import HealthWatch
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.kv_events import EventFeed
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.members import Members
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.peer_lists import PeerListUpdates
from prfaas.serving.control.planning_inputs import KvShape, LiveFacts, prefill_curves, view_of
from prfaas.serving.control.pool_monitor import PoolMonitor
from prfaas.serving.control.prefill_admission import PrefillAdmission
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge, empty_index
from prfaas.serving.control.rank_stats import RankStats
from prfaas.serving.control.role_allocation import RoleAllocation, RoleChange, RoleChanges, stage_utilisation
from prfaas.serving.control.router import Router
from prfaas.serving.control.thresholds import Thresholds
from prfaas.serving.control.waits import PredictedWaits
from prfaas.serving.departed_series import DepartedSeries
from prfaas.serving.own_process import LoopClock
from prfaas.serving.pool.copier import PoolCopier
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import LoopFailures
from prfaas.serving.transport.io.observer import Observer

GAUGES_PERIOD_S = 1.0

P = TypeVar("P", bound=Part)


class LivePlane:
    """A view, and the parts that keep it right. It belongs to one running event loop.

    The gateway asks the parts that have a name here: `router.route` decides, `admission.admit` waits for an instance,
    `prefilling` and `waits.decoding` account for what is open, `health.suspect` hears of failures. The other parts are
    only run; `part` finds one. Before `run` no engine is asked anything, and requests are routed by the deployment file
    alone.
    """

    def __init__(
        self,
        members: Members,
        registry: CollectorRegistry,
        kv_model: KvModel | None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Put the parts together.

        Args:
            members: the instances and pools of the deployment, with the connections to them.
            registry: gets the `prfaas_control_*` metrics.
            kv_model: of the deployment's model, as `planning_inputs.kv_model_of` loads it; None: unknown.
            clock: seconds that never go back.
        """
        running, current = members.running, members.running.current
        metrics, curves = ControlMetrics(registry), prefill_curves(current)
        view = view_of(current, kv_model, curves, clock())
        state = ClusterState(view, clock=clock, on_service=_measured(curves, metrics, clock))
        self.cluster_state, self.members = state, members
        self.listeners = listeners = Listeners()
        self.loop_clock, self.loop_failures = LoopClock(), LoopFailures()
        engines = EngineMonitor(running, members.http, state, listeners)
        self.prefixes, feed = _prefixes(members, state, kv_model, metrics)
        copier = PoolCopier(running, members.key, members.pool_ports)
        hot_prefixes = HotPrefixes(state, copier, metrics=metrics)
        self.experiment = Experiment(running, members.key)
        self.router = Router(running, state, self.prefixes, hot_prefixes, self.experiment, metrics)
        self.admission = PrefillAdmission(
            state,
            batch_tokens=current.engine.max_num_batched_tokens,
            reusable_at=self.prefixes.reusable_at,
        )
        self.waits = PredictedWaits(state, engines.meters, seats=current.engine.max_num_seqs)
        self.drains = InstanceDrains(state, self.admission, engines.meters, listeners)
        self.health = HealthWatch(
            members, state, listeners, loop_clock=self.loop_clock, stuck_s=engines.stuck_s
        )
        self.compatibility = Compatibility(state, listeners.silent.tell)
        self.rank_stats = RankStats(running, members.kv_ports, listeners)
        peer_lists = PeerListUpdates(running, members.kv_ports)
        facts = LiveFacts(running, kv_model, state, curves, engines.meters)
        shape = KvShape(running, state, facts, self.prefixes, is_known=kv_model is not None)
        listeners.told += [self.compatibility.hear, peer_lists.hear, self.drains.hear]
        listeners.told.append(lambda name, _rank, stats: shape.learn_stats(name, stats))
        self.thresholds = Thresholds(
            running,
            facts,
            LengthWindow(current.control.window_s),
            clock=clock,
            on_change=lambda cluster, reason: metrics.threshold_changes.labels(cluster, reason).inc(),
        )
        self.links = LinkMonitor(
            running,
            lambda instance, rank: members.kv_ports[instance.name][rank],
            state,
            on_change=self.thresholds.ask_for_link,
            on_answer=self.health.liveness.heard_kv,
            pool_ports=members.pool_ports,
        )
        pools = PoolMonitor(running, members.pool_ports, state, engines.meters)
        # In the order in which they join; they leave in the other one.
        self.parts: list[Part] = [DeployedView(running, state, curves), members, engines, pools, self.links]
        self.parts += [_budget(members, state, self.links), self.compatibility, self.experiment, self.router]
        self.parts += [self.thresholds, self._roles(facts, engines, metrics), feed, self.prefixes]
        self.parts += [hot_prefixes, self.admission, self.health, self.drains, peer_lists, self.rank_stats]
        self.parts.append(GaugeWriter(self.parts, metrics, running, clock))
        self._connect(engines, pools, feed, metrics)

    def _roles(self, facts: LiveFacts, engines: EngineMonitor, metrics: ControlMetrics) -> RoleAllocation:
        state = self.cluster_state

        def on_end(change: RoleChange) -> None:
            metrics.conversions.labels(change.cluster, change.to_role, change.outcome).inc()
            for name in state.together(change.instance):
                self.listeners.changed.tell(name)

        return RoleAllocation(
            self.members.running,
            facts,
            stage_utilisation(state, engines.meters, self.admission.waiting),
            self.thresholds.window,
            RoleChanges(state, on_begin=self.admission.changed, on_end=on_end),
        )

    def _connect(
        self, engines: EngineMonitor, pools: PoolMonitor, feed: EventFeed, metrics: ControlMetrics
    ) -> None:
        """Have the parts hear of each other, and count what happens."""
        listeners = self.listeners

        def on_read(instance: Instance, reading: EngineReading) -> None:
            meter = engines.meters[instance.name]
            self.health.liveness.heard_http(instance.name)
            self.prefixes.learn(instance, reading)
            pools.learn(instance, meter)
            self.waits.learn(instance.name, meter)

        def on_healthy(name: str, healthy: bool) -> None:
            if not healthy:
                metrics.suspicions.labels(name).inc()
            listeners.changed.tell(name)

        listeners.told.append(lambda name, _rank, stats: self.prefixes.learn_stats(name, stats))
        listeners.read.append(on_read)
        listeners.healthy.append(on_healthy)
        listeners.lost_cache += [feed.lost, self.drains.ended]
        listeners.restarted += [lambda name: feed.lost(name, "new-process"), self.drains.restarted]
        listeners.changed += [self.admission.changed, lambda _name: self.thresholds.ask("roles")]
        listeners.noticed.append(lambda name, _notice_s: metrics.notices.labels(name).inc())
        listeners.observed.append(
            lambda tokens: self.thresholds.window.add(tokens, self.cluster_state.clock())
        )

    def part(self, kind: type[P]) -> P:
        """The part of a kind. Raises StopIteration where there is none."""
        return next(part for part in self.parts if isinstance(part, kind))

    @contextmanager
    def prefilling(self, decision: Decision) -> Iterator[OpenPrefill]:
        """While a prefill elsewhere and its transfers are under way.

        An exit after `OpenPrefill.measured` is a measurement of service time. One without it tells nothing: neither
        a measurement nor a failure. An exit by an exception marks the way as failed.
        """
        state = self.cluster_state
        pair = (state.instance(decision.prefill).cluster, state.instance(decision.decode).cluster)
        try:
            with state.prefilling(decision) as prefill:
                yield prefill
        except Exception:
            # The producer is suspected, lives and answers: so the link failed. After a client's fault it is no suspect.
            if self.health.has_failed(decision.prefill):
                self.links.failed(pair)
            raise
        if prefill.is_measured:
            self.links.succeeded(pair)

    def observe(self, num_tokens: int, uncached_tokens: int) -> None:
        """One request as the scheduler's statistics should see it; called once per request."""
        self.listeners.observed.tell(min(uncached_tokens, num_tokens))

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Have all parts follow the file, so that no decision sees half of a change. Nothing here waits.

        Raises:
            DeploymentError: the file's policy can't be made.
        """
        names = tuple(self.cluster_state.names)
        wanted = {instance.name: instance for instance in now.running.instances}
        for instance in wanted.values():
            if instance.name not in names:
                for part in self.parts:
                    part.join(instance)
        for part in self.parts:
            part.follow(before, now)
        for name in names:
            if name not in wanted:
                for part in reversed(self.parts):
                    part.leave(name)
        for name in wanted:
            self.admission.changed(name)

    def state(self) -> dict[str, Any]:
        """The deployment as it is now, ready for JSON: what `GET /prfaas/state` answers and `prfaas status` shows.

        Ages and waits in seconds, sizes in bytes, lengths in tokens; None for what is not known yet. No prompts, no
        keys, no addresses.
        """
        now_s = self.cluster_state.clock()
        told: Json = {}
        for part in self.parts:
            _lay(part.state(now_s), told)
        holders = [told["pools"], *(cluster["instances"] for cluster in told["clusters"].values())]
        # Few parts say something of single instances.
        telling = [part for part in self.parts if type(part).state_of is not Part.state_of]
        for each in holders:
            for name in each:
                for part in telling:
                    each[name] |= part.state_of(name, now_s)
        return {"fleet": None} | told

    async def run(self) -> None:
        """All loops, until cancelled. One that raises is begun again."""
        keep = self.loop_failures.keep
        async with asyncio.TaskGroup() as group:
            group.create_task(keep("LoopClock", self.loop_clock.run))
            for part in self.parts:
                part.loop_failures = self.loop_failures
                group.create_task(keep(type(part).__name__, part.run))

    async def close(self) -> None:
        """Give back connections and threads, after `run` has ended."""
        for part in reversed(self.parts):
            await part.close()


class GaugeWriter(Part):
    """Has all parts write their gauges, so that a scrape finds them ready."""

    def __init__(
        self, parts: Sequence[Part], metrics: ControlMetrics, running: RunningDeployment, clock: Clock
    ) -> None:
        self._parts = parts
        self._metrics = metrics
        self._running = running
        self._clock = clock
        self._departed = DepartedSeries(metrics.labelled)
        self._counted: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(GAUGES_PERIOD_S)

    def write(self) -> None:
        """Everything, as it is now. The series of who has left go."""
        for part in self._parts:
            with self.spared(type(part).__name__):
                part.write_gauges(self._metrics, self._clock())
        for loop, count in (self.loop_failures.counts - self._counted).items():
            self._metrics.loop_failures.labels(loop).inc(count)
        self._counted = self.loop_failures.counts.copy()
        current = self._running.current
        instances, pools = ([each.name for each in holders] for holders in (current.instances, current.pools))
        self._departed.keep("cluster", [cluster.name for cluster in current.clusters])
        # Pools have KV events too, in series with this label.
        self._departed.keep("instance", [*instances, *pools])
        self._departed.keep("pool", pools)
        self._departed.keep("link", [link.name for link in current.links])


def _measured(curves: Mapping[str, PrefillCurves], metrics: ControlMetrics, clock: Clock) -> OnService:
    """Corrects the curve of a cluster by every measured prefill."""

    def on_service(cluster: str, tokens: int, reused_tokens: int, seconds: float) -> None:
        ratio = curves[cluster].add(tokens, reused_tokens, seconds, clock())
        metrics.service_ratio.labels(cluster).observe(ratio)

    return on_service


def _prefixes(
    members: Members, state: ClusterState, kv_model: KvModel | None, metrics: ControlMetrics
) -> tuple[PrefixKnowledge, EventFeed]:
    """Who holds what, and the events that tell it."""
    current, seed = members.running.current, seed_of(members.key)
    prefixes = PrefixKnowledge(empty_index(seed, kv_model), state)

    def apply(name: str, events: Sequence[HeldEvent]) -> None:
        with metrics.index_apply_seconds.time():
            prefixes.apply(name, events)
        metrics.events.labels(name).inc(len(events))

    def drop(name: str, reason: str) -> None:
        prefixes.drop(name, reason)
        metrics.drops.labels(name, reason).inc()

    def port_of(name: str) -> Observer | None:
        # Of an instance, the first rank tells for all.
        ports = members.kv_ports.get(name)
        return members.pool_ports.get(name) if ports is None else ports[0]

    instances, pools = ([each.name for each in holders] for holders in (current.instances, current.pools))
    return prefixes, EventFeed([*instances, *pools], port_of, apply=apply, drop=drop)


def _budget(members: Members, state: ClusterState, links: LinkMonitor) -> LinkBudget:
    pools: dict[str, tuple[Observer, ...]] = {name: (port,) for name, port in members.pool_ports.items()}
    senders = ChainMap(members.kv_ports, pools)
    return LinkBudget(members.running, senders, state.view.links, links.samples, clock=state.clock)


def _lay(part: Json, over: Json) -> None:
    """Put what a part tells into the whole, level by level."""
    for name, value in part.items():
        if isinstance(value, dict) and isinstance(over.get(name), dict):
            _lay(value, over[name])
        else:
            over[name] = value
