"""The slow timescale: thresholds searched again, roles changed, hot prefixes copied, by the live system's own rules."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import Role
from prfaas.core.planner import KvSize, PlanError, PlanProblem
from prfaas.core.planner.from_deployment import link_sizes
from prfaas.core.scheduling.allocation import (
    COOL_DOWN_PERIODS,
    DRAIN_CHECK_S,
    Allocator,
    RoleDrain,
)
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, prefill_instances, problem_now
from prfaas.core.scheduling.rebalancing import Rebalancer, missed_prefix
from prfaas.core.scheduling.stage_utilisation import InstanceWork, StageUtilisation
from prfaas.core.scheduling.threshold import SETTLE_S, Reason, ThresholdOptimiser
from prfaas.core.workload.lengths import WorkloadError
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.world import World


def _work_of(world: World, name: str) -> InstanceWork:
    """What the simulated engine `name` has done, and what waits there."""
    engine, clock = world.engines[name], world.engines[name].clock
    return InstanceWork(
        busy_s=engine.busy_s(world.events.now_s),
        decoding_s=clock.busy_slot_s if clock is not None else 0.0,
        open_prefills=len(engine.queue) + engine.at_work,
        waiting_prefills=len(engine.queue),
        waiting_decodes=clock.waiting if clock is not None else 0,
    )


class Conversions:
    """At most one at a time; work that is still there after `DRAIN_LIMIT_S` goes on beside the new."""

    def __init__(self, world: World, *, on_end: Callable[[], None]) -> None:
        self._world = world
        self._on_end = on_end
        self.is_busy = False
        self.history: list[dict[str, Any]] = []

    def begin(self, instance: str, to_role: Role, reason: str) -> None:
        """Start to convert an instance."""
        engines = [
            self._world.engines[each] for each in self._world.engines[instance].view.group or (instance,)
        ]
        now_s = self._world.events.now_s
        drain = RoleDrain.begin([engine.view for engine in engines], to_role, now_s)
        self.is_busy = True
        self.history.append({"at_s": now_s, "instance": instance, "to_role": to_role, "reason": reason})
        for engine in engines:
            self._world.set_free(engine)
        self._world.events.at(now_s + DRAIN_CHECK_S, self._look, drain)

    def _look(self, drain: RoleDrain) -> None:
        now_s = self._world.events.now_s
        result = drain.conclude(now_s)
        if result is None:
            self._world.events.at(now_s + DRAIN_CHECK_S, self._look, drain)
            return
        self.is_busy = False
        self.history[-1]["drained_s"] = now_s - drain.since_s
        for view in drain.instances if result != "abandoned" else ():
            view.prefills, view.decodes = drain.to_role == "prefill", drain.to_role == "decode"
            if view.prefills:
                self._world.start_next(self._world.engines[view.name])
        self._on_end()


# Fewer answers than this say nothing about their mean.
_ENOUGH_OUTPUTS = 20


class SlowLoops:
    """Does what `control.thresholds` and `control.allocating` do, as often, until `is_over`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scenario = scenario = world.scenario
        self.is_over = False
        self._optimiser = ThresholdOptimiser()
        self._moves: list[dict[str, Any]] = []
        control = scenario.control
        self._allocator = Allocator(cool_down_s=COOL_DOWN_PERIODS * control.allocation_period_s)
        self._utilisation = StageUtilisation(
            world.view,
            lambda name: _work_of(world, name),
            lambda cluster: len(world.prefill_pools[cluster]),
            world.events.now_s,
        )
        self._conversions = Conversions(world, on_end=lambda: self.ask("roles"))
        self._kv_bytes = KvSize(scenario.sent_model)
        self._link_bytes = link_sizes(scenario.link_models)
        self._answers = self._answer_tokens = 0
        self._output_tokens = scenario.output_tokens
        self._step_s = {cluster.name: cluster.full_step_s or 1.0 for cluster in scenario.clusters}
        for link in world.links.values():
            link.on_change = lambda: self.ask("link")
        if scenario.adapts:
            world.events.at(control.threshold_period_s, self._periodic)
        if scenario.allocation:
            world.events.at(control.allocation_period_s, self._allocate)

    def ask(self, reason: Reason) -> None:
        """Something changed that thresholds depend on."""
        if self._scenario.adapts and not self.is_over:
            self._world.events.at(self._world.events.now_s + SETTLE_S, self._search, reason)

    def changes(self) -> dict[str, Any]:
        """The changes of thresholds and roles so far."""
        return {"threshold_changes": self._moves, "conversions": self._conversions.history}

    def _periodic(self, _argument: object) -> None:
        if self.is_over:
            return
        self._world.events.at(
            self._world.events.now_s + self._scenario.control.threshold_period_s, self._periodic
        )
        self._search("periodic")

    def _search(self, reason: Reason) -> None:
        world, now_s = self._world, self._world.events.now_s
        problem = None if self.is_over else self._problem()
        if problem is None:
            return
        thresholds = world.view.threshold_tokens
        change = self._optimiser.propose(
            problem,
            {pd.name: prefill_instances(world.view.clusters[pd.name].instances) for pd in problem.pd},
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
        loads, problem = self._utilisation.loads(now_s), self._problem()
        if problem is None or self._conversions.is_busy:
            return
        count = world.window.count(now_s)
        try:
            conversion = self._allocator.decide(loads, problem, now_s, sample_count=count)
        except PlanError:
            return
        if conversion is not None:
            self._conversions.begin(conversion.instance, conversion.to_role, conversion.reason)

    def _problem(self) -> PlanProblem | None:
        """What the planner has to solve now; None: nothing is known of prompts, or no plan is possible."""
        world = self._world
        lengths = world.window.lengths(world.events.now_s)
        if lengths is None:
            return None
        self._learn_outputs()
        clusters = []
        for cluster in self._scenario.clusters:
            view = world.view.clusters[cluster.name]
            healthy = sum(instance.healthy for instance in view.instances)
            clusters.append(
                ClusterFacts(
                    cluster.name,
                    cluster.kind,
                    healthy,
                    world.usual.get(cluster.name, cluster.curve),
                    float(cluster.decode_slots),
                    decode_step_s=self._step_s[cluster.name],
                    group_ranks=cluster.group_ranks,
                )
            )
        links = [
            LinkFacts(
                link.source,
                link.target,
                link.capacity_bits_per_s if link.up else 0.0,
                self._link_bytes.get(f"{link.source}->{link.target}"),
            )
            for link in world.view.links.values()
        ]
        try:
            return problem_now(clusters, links, lengths, self._output_tokens, self._kv_bytes)
        except (PlanError, WorkloadError):
            return None

    def _learn_outputs(self) -> None:
        ended = self._world.answers
        count, tokens = ended.count - self._answers, ended.tokens - self._answer_tokens
        if count < _ENOUGH_OUTPUTS:
            return
        self._answers, self._answer_tokens = ended.count, ended.tokens
        self._output_tokens = max(tokens / count, 1.0)


# So many prefixes that were missed are known by their blocks.
_MOST_WANTED = 4096

_Place = tuple[int, str]
"""The last block of a prefix, and the cluster that lacks it."""


@dataclass(slots=True)
class _Wanted:
    blocks: tuple[int, ...]
    target: str
    """The pool of the machine that missed it last."""


class HotCopies:
    """Copies between the clusters of a world with pools, in the background of their links.

    Args:
        world: Which must have pools.
        block_tokens: Of the traffic's prefix blocks.
    """

    def __init__(self, world: World, block_tokens: int) -> None:
        assert world.pools is not None
        self._world = world
        self._pools = world.pools
        self._block_tokens = block_tokens
        self._rebalancer = Rebalancer()
        self._wanted: OrderedDict[_Place, _Wanted] = OrderedDict()
        self._reports: list[dict[str, Any]] = []
        world.pools.on_place = self._note
        world.events.at(self._rebalancer.period_s, self._decide)

    def changes(self) -> dict[str, Any]:
        """The copies that were begun."""
        return {"prefix_copies": self._reports}

    def _note(self, job: Job) -> None:
        """A request was routed: note the prefix that its cluster lacks."""
        missed = missed_prefix(job.decision.pools, job.engine.name, self._world.view)
        if missed is None:
            return
        blocks = tuple(job.blocks[: missed.tokens // self._block_tokens])
        wanted = blocks[-1], missed.target.cluster
        self._wanted[wanted] = _Wanted(blocks, missed.target.name)
        self._wanted.move_to_end(wanted)
        if len(self._wanted) > _MOST_WANTED:
            self._wanted.popitem(last=False)
        new_tokens, now_s = missed.tokens - missed.held_tokens, self._world.events.now_s
        self._rebalancer.observe(blocks[-1], new_tokens, missed.num_bytes, wanted[1], missed.sources, now_s)

    def _decide(self, _argument: object) -> None:
        world = self._world
        now_s = world.events.now_s
        world.events.at(now_s + self._rebalancer.period_s, self._decide)
        for copy in self._rebalancer.decide(world.view.links.values(), now_s):
            wanted = self._wanted.pop((copy.key, copy.target), None)  # type: ignore[arg-type]
            if wanted is None:
                continue
            self._reports.append(
                {
                    "at_s": now_s,
                    "source": copy.source,
                    "target": copy.target,
                    "tokens": copy.tokens,
                    "bytes": copy.num_bytes,
                }
            )
            link = world.links[copy.source, copy.target]
            route = copy.source, wanted.target
            link.fluid.send(route, copy.num_bytes, self._arrived, wanted, background=True)

    def _arrived(self, wanted: _Wanted) -> None:
        self._pools.keep(wanted.target, wanted.blocks, len(wanted.blocks) * self._block_tokens)
