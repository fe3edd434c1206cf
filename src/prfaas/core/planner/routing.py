"""Routes at given roles: the requests of each path, and the use of every resource."""

from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.core.arrays import FloatArray, np
from prfaas.core.planner.linear_programs import BinnedLengths, Programme
from prfaas.core.planner.operating_point import Stage, StageKind
from prfaas.core.planner.problem import Path, PdCluster, PlanProblem, PrfaasCluster
from prfaas.core.units import BITS_PER_BYTE

_BINS = 64
_PARTS = 4
_MOST_DIVIDED_BINS = 24
_MOST_BINS = 160
_ROUNDS = 8
_SETTLED = 1e-6
# Flows below this part of a bin are the solver's rounding.
_NOTHING = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class RoutingPlan:
    """Routes at given roles: the part of every bin of lengths that goes by each path."""

    problem: PlanProblem
    paths: tuple[Path, ...]
    lengths: BinnedLengths
    shares: FloatArray
    """Parts of all requests; (bins × paths)."""
    prefill: Mapping[str, int]
    """Prefill instances by PD cluster."""

    @property
    def mass(self) -> FloatArray:
        """The part of all requests that goes by each path."""
        mass: FloatArray = self.shares.sum(axis=0)
        return mass

    def mean_length(self, path: int) -> float:
        """The mean prompt of a path that is used, in tokens."""
        flows = self.shares[:, path]
        return float((flows * self.lengths.bins.lengths).sum() / flows.sum())

    def prefill_work_s(self, cluster: PrfaasCluster | PdCluster) -> float:
        """Seconds of prefill in a cluster per request of the whole system."""
        return sum(
            float((self.shares[:, k] * self.lengths.means(cluster.prefill_s, path.share)).sum())
            for k, path in enumerate(self.paths)
            if path.prefill == cluster.name and self.mass[k] > 0
        )

    def stages(self) -> tuple[Stage, ...]:
        """All stages with the request rates at which they are full; utilisations are 0 here."""
        problem, prefill = self.problem, self.prefill
        stages = []
        for cluster in problem.clusters:
            work = self.prefill_work_s(cluster)
            kind: StageKind = "pd prefill" if cluster.name in prefill else "prfaas prefill"
            capacity = prefill.get(cluster.name, cluster.instances) / work if work > 0 else None
            stages.append(Stage(f"{cluster.name} prefill", kind, capacity, 0.0))
        for link in problem.links:
            bits = self.link_bits(link.name)
            capacity = link.bandwidth_bits_per_s / bits if bits > 0 else None
            stages.append(Stage(f"{link.name} link", "link", capacity, 0.0))
        for pd in problem.pd:
            share = self.decode_part(pd)
            rate = (pd.instances - prefill[pd.name]) * pd.decode_rate(problem.workload.output_tokens)
            stages.append(Stage(f"{pd.name} decode", "pd decode", rate / share if share > 0 else None, 0.0))
        return tuple(stages)

    def decode_part(self, pd: PdCluster) -> float:
        """The part of all requests that a cluster decodes."""
        return sum(float(self.mass[k]) for k, path in enumerate(self.paths) if path.decode == pd.name)

    def rate(self) -> float:
        """Λ_max: the rate at which the first stage is full."""
        return min(stage.capacity for stage in self.stages() if stage.capacity is not None)

    def link_bits(self, link: str) -> float:
        """Bits that cross a link per request of the whole system."""
        total, kv_bytes = 0.0, self.problem.kv_bytes_over(link)
        for k, path in enumerate(self.paths):
            for transfer in path.transfers:
                if transfer.link == link and self.mass[k] > 0:
                    sizes = self.lengths.means(kv_bytes, transfer.share)
                    total += float((self.shares[:, k] * sizes).sum())
        return total * BITS_PER_BYTE


def best_routing(
    problem: PlanProblem,
    paths: tuple[Path, ...],
    prefill: Mapping[str, int],
    spread: Mapping[str, float] | None = None,
) -> RoutingPlan | None:
    """The best routes for given roles; None if nothing can flow.

    Args:
        problem: What is planned.
        paths: Those that may be used.
        prefill: Prefill instances by PD cluster.
        spread: The part of the requests of every length that decodes in each PD cluster, as a gateway spreads them
            (sums to 1). Routes are fair then: where one cluster is the limit, the others are balanced among
            themselves. None: any request may decode anywhere.
    """
    distribution = problem.workload.lengths
    lengths = BinnedLengths.of(distribution, distribution.bins(_BINS))
    best: tuple[float, RoutingPlan] | None = None
    before = 0.0
    for _ in range(_ROUNDS):
        programme = Programme(problem, paths, lengths)
        shares = programme.shares(prefill) if spread is None else programme.fair_shares(prefill, spread)
        if shares is None:
            return None
        routing = RoutingPlan(problem, paths, lengths, cleaned(lengths, shares), prefill)
        rate = routing.rate()
        # Later rounds are more exact, so a tie goes to them.
        if best is None or rate >= best[0] * (1 - _SETTLED):
            best = (rate, routing)
        if abs(rate - before) <= _SETTLED * rate:
            break
        before = rate
        divided = np.flatnonzero((routing.shares > 0).sum(axis=1) > 1)
        # Equal clusters may share every bin; dividing them all would only cost time.
        if len(divided) <= _MOST_DIVIDED_BINS and len(lengths.bins.weights) <= _MOST_BINS:
            lengths = lengths.divided(divided, _PARTS)
    assert best is not None
    return best[1]


def cleaned(lengths: BinnedLengths, shares: FloatArray) -> FloatArray:
    """Flows without the solver's rounding: tiny ones are 0, and those of each bin sum to it exactly."""
    weights = lengths.bins.weights[:, None]
    kept = np.where(shares > _NOTHING * weights, shares, 0.0)
    result: FloatArray = kept * weights / kept.sum(axis=1, keepdims=True)
    return result
