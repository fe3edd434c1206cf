"""The slow timescale: thresholds searched again and roles changed, by the live system's own optimisers.

How busy the instances were between two evaluations of the roles.

An instance changes its role: it drains, then does the other thing.
"""

from collections.abc import Callable
from typing import Any

from prfaas.core.deployment import Role
from prfaas.core.planner import KvSize, PlanError, PlanProblem
from prfaas.core.scheduling import InstanceView
from prfaas.core.scheduling.allocation import Allocator, PdInstance, PdLoad, StageLoad
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.core.scheduling.threshold import Reason, ThresholdOptimiser
from prfaas.core.workload import LengthDistribution, WorkloadError
from prfaas.lab.simulator.instance import Engine
from prfaas.lab.simulator.world import World


class Usage:
    """Loads since the last call of `loads`: what `control.usage` measures."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s = world.events.now_s
        self._busy_s = dict.fromkeys(world.engines, 0.0)
        self._decoding_s = dict.fromkeys(world.engines, 0.0)
        self._share = dict.fromkeys(world.engines, 0.0)
        self._batch = dict.fromkeys(world.engines, 0.0)

    def loads(self) -> list[PdLoad]:
        """Every PD cluster with a healthy instance."""
        self._advance()
        view = self._world.view
        loads = []
        for cluster in view.clusters.values():
            if cluster.kind != "pd" or not any(instance.healthy for instance in cluster.instances):
                continue
            remote = [
                instance
                for (source, target), link in view.links.items()
                if target == cluster.name and link.up and view.clusters[source].kind == "prfaas"
                for instance in view.clusters[source].instances
                if instance.healthy and instance.prefills
            ]
            loads.append(
                PdLoad(
                    cluster.name,
                    tuple(self._instance(instance) for instance in cluster.instances),
                    self._prefill([i for i in cluster.instances if i.healthy and i.prefills]),
                    self._decode([i for i in cluster.instances if i.healthy and i.decodes]),
                    self._prefill(remote) if remote else None,
                    len(remote),
                )
            )
        return loads

    def _advance(self) -> None:
        now_s = self._world.events.now_s
        elapsed_s = max(now_s - self._since_s, 1e-9)
        self._since_s = now_s
        for name, engine in self._world.engines.items():
            busy_s = engine.busy_s(now_s)
            decoding_s = engine.clock.busy_slot_s if engine.clock is not None else 0.0
            self._share[name] = (busy_s - self._busy_s[name]) / elapsed_s
            self._batch[name] = (decoding_s - self._decoding_s[name]) / elapsed_s
            self._busy_s[name], self._decoding_s[name] = busy_s, decoding_s

    def _prefill(self, instances: list[InstanceView]) -> StageLoad:
        engines = [self._world.engines[instance.name] for instance in instances]
        share = sum(self._share[instance.name] for instance in instances) / max(len(instances), 1)
        pooled = {engine.cluster.name: len(engine.pool) for engine in engines}
        return StageLoad(share, sum(len(engine.queue) for engine in engines) + sum(pooled.values()))

    def _decode(self, instances: list[InstanceView]) -> StageLoad:
        slots = sum(instance.decode_slots for instance in instances)
        batch = sum(self._batch[instance.name] for instance in instances)
        clocks = [self._world.engines[instance.name].clock for instance in instances]
        return StageLoad(batch / max(slots, 1), sum(clock.waiting for clock in clocks if clock is not None))

    def _instance(self, view: InstanceView) -> PdInstance:
        engine = self._world.engines[view.name]
        busy = float(_prefills_open(engine) if view.prefills else view.decoding)
        return PdInstance(view.name, view.prefills, view.decodes, view.healthy, view.draining, busy)


def _prefills_open(engine: Engine) -> int:
    return len(engine.queue) + engine.at_work


# Both as in `control.roles`.
_TICK_S = 0.25
_DRAIN_LIMIT_S = 60.0


class Conversions:
    """At most one at a time; work that is still there after 60 s goes on beside the new."""

    def __init__(self, world: World, *, on_end: Callable[[], None]) -> None:
        self._world = world
        self._on_end = on_end
        self.is_busy = False
        self.history: list[dict[str, Any]] = []

    def begin(self, instance: str, to_role: Role, reason: str) -> None:
        """Start to convert an instance."""
        engine = self._world.engines[instance]
        engine.view.draining = True
        self.is_busy = True
        now_s = self._world.events.now_s
        self.history.append({"at_s": now_s, "instance": instance, "to_role": to_role, "reason": reason})
        self._world.set_free(engine)
        self._world.events.at(now_s + _TICK_S, self._tick, (engine, to_role, now_s))

    def _tick(self, change: tuple[Engine, Role, float]) -> None:
        engine, to_role, since_s = change
        view, now_s = engine.view, self._world.events.now_s
        if view.healthy and view.in_flight > 0 and now_s - since_s < _DRAIN_LIMIT_S:
            self._world.events.at(now_s + _TICK_S, self._tick, change)
            return
        view.draining = False
        self.is_busy = False
        self.history[-1]["drained_s"] = now_s - since_s
        if view.healthy:
            view.prefills, view.decodes = to_role == "prefill", to_role == "decode"
            if view.prefills:
                self._world.start_next(engine)
        self._on_end()


# As in `control.allocating`: the queues need two evaluations to show what a conversion did.
_COOL_DOWN_PERIODS = 2
# Fewer answers than this say nothing about their mean.
_ENOUGH_OUTPUTS = 20
# As in `control.thresholds`: what changes is left to settle before a threshold is searched for it.
_SETTLE_S = 1.0


class SlowLoops:
    """Does what `control.thresholds` and `control.allocating` do, as often, until `is_over`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scenario = scenario = world.scenario
        self.is_over = False
        self._optimiser = ThresholdOptimiser()
        self._moves: list[dict[str, Any]] = []
        control = scenario.control
        self._allocator = Allocator(cool_down_s=_COOL_DOWN_PERIODS * control.allocation_period_s)
        self._usage = Usage(world)
        self._conversions = Conversions(world, on_end=lambda: self.ask("roles"))
        self._kv_bytes = KvSize(scenario.kv_model)
        self._outputs = (0, 0)
        self._output_tokens = scenario.output_tokens
        if scenario.adapts:
            world.events.at(control.threshold_period_s, self._periodic)
        if scenario.allocation:
            world.events.at(control.allocation_period_s, self._allocate)

    def ask(self, reason: Reason) -> None:
        """Something changed that thresholds depend on."""
        if self._scenario.adapts and not self.is_over:
            self._world.events.at(self._world.events.now_s + _SETTLE_S, self._search, reason)

    def changes(self) -> dict[str, Any]:
        """What the loops did."""
        return {"threshold_changes": self._moves, "conversions": self._conversions.history}

    def _periodic(self, _argument: object) -> None:
        if self.is_over:
            return
        self._world.events.at(
            self._world.events.now_s + self._scenario.control.threshold_period_s, self._periodic
        )
        self._search("periodic")

    def _search(self, reason: Reason) -> None:
        world = self._world
        now_s = world.events.now_s
        lengths = world.window.lengths(now_s)
        if lengths is None or self.is_over:
            return
        try:
            problem = self._problem(lengths)
        except (PlanError, WorkloadError):
            return
        thresholds = world.view.threshold_tokens
        change = self._optimiser.propose(
            problem,
            {pd.name: self._prefill_instances(pd.name) for pd in problem.pd},
            dict(thresholds),
            sample_count=world.window.count(now_s),
            reason=reason,
        )
        if change is None:
            return
        for cluster, tokens in change.tokens.items():
            if tokens != thresholds.get(cluster):
                thresholds[cluster] = tokens
                self._moves.append({"at_s": now_s, "cluster": cluster, "tokens": tokens, "reason": reason})

    def _allocate(self, _argument: object) -> None:
        if self.is_over:
            return
        world = self._world
        now_s = world.events.now_s
        world.events.at(now_s + self._scenario.control.allocation_period_s, self._allocate)
        loads = self._usage.loads()
        lengths = world.window.lengths(now_s)
        if lengths is None or self._conversions.is_busy:
            return
        try:
            conversion = self._allocator.decide(loads, self._problem(lengths), now_s)
        except (PlanError, WorkloadError):
            return
        if conversion is not None:
            self._conversions.begin(conversion.instance, conversion.to_role, conversion.reason)

    def _problem(self, lengths: LengthDistribution) -> PlanProblem:
        world = self._world
        self._learn_outputs()
        clusters = []
        for cluster in self._scenario.clusters:
            view = world.view.clusters[cluster.name]
            healthy = sum(instance.healthy for instance in view.instances)
            step_s = 1.0 if cluster.decode_step_s is None else cluster.decode_step_s(cluster.decode_slots)
            clusters.append(
                ClusterFacts(
                    cluster.name, cluster.kind, healthy, cluster.curve, float(cluster.decode_slots), step_s
                )
            )
        links = [
            LinkFacts(link.source, link.target, link.capacity_bits_per_s if link.up else 0.0)
            for link in world.view.links.values()
        ]
        return problem_now(clusters, links, lengths, self._output_tokens, self._kv_bytes)

    def _learn_outputs(self) -> None:
        done, tokens = self._outputs
        answers = self._world.done - done
        if answers >= _ENOUGH_OUTPUTS:
            self._output_tokens = max((self._world.done_tokens - tokens) / answers, 1.0)
            self._outputs = (self._world.done, self._world.done_tokens)

    def _prefill_instances(self, cluster: str) -> int:
        """Those being converted count for what they will be."""
        return sum(
            instance.prefills != instance.draining and instance.healthy
            for instance in self._world.view.clusters[cluster].instances
        )
