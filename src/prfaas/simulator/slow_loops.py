"""The slow timescale: thresholds searched again and roles changed, by the live system's own optimisers."""

from typing import Any

from prfaas.planner import KvSize, PlanError, PlanProblem
from prfaas.scheduling.allocation import Allocator
from prfaas.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.scheduling.threshold import Reason, ThresholdOptimiser
from prfaas.simulator.conversion import Conversions
from prfaas.simulator.usage import Usage
from prfaas.simulator.world import World
from prfaas.workload import LengthDistribution, WorkloadError

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
