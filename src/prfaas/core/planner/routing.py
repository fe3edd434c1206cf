"""Routes at given roles: the requests of each path, and the use of every resource."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.core.arrays import FloatArray, np
from prfaas.core.planner.linear_programs import BinnedLengths, Programme, Resource
from prfaas.core.planner.operating_point import ServiceModel, Stage, StageKind
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

    def prefill_work_s(self, cluster: PrfaasCluster | PdCluster, service: ServiceModel) -> float:
        """Seconds of prefill in a cluster per request of the whole system.

        With "mean length" the representative request is that of all clusters with the same curve: how equal
        clusters share their requests must make no difference.
        """
        work = self._work_by_length([cluster])
        if service == "by length" or work <= 0:
            return work
        equal = [
            other
            for other in self.problem.clusters
            if type(other) is type(cluster) and other.prefill_s == cluster.prefill_s
        ]
        return work * self._work_at_mean(equal) / self._work_by_length(equal)

    def stages(self, service: ServiceModel) -> tuple[Stage, ...]:
        """All stages with the request rates at which they are full; utilisations are 0 here."""
        problem, prefill = self.problem, self.prefill
        stages = []
        for cluster in problem.clusters:
            work = self.prefill_work_s(cluster, service)
            kind: StageKind = "pd prefill" if cluster.name in prefill else "prfaas prefill"
            capacity = prefill.get(cluster.name, cluster.instances) / work if work > 0 else None
            stages.append(Stage(f"{cluster.name} prefill", kind, capacity, 0.0))
        for link in problem.links:
            bits = self.link_bits(link.name, service)
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

    def rate(self, service: ServiceModel) -> float:
        """Λ_max: the rate at which the first stage is full."""
        return min(stage.capacity for stage in self.stages(service) if stage.capacity is not None)

    def scales(self) -> dict[Resource, float]:
        """The paper's work of each resource, at the mean length, over the work by length; where it has any."""
        scales: dict[Resource, float] = {}
        for cluster in self.problem.clusters:
            work = self.prefill_work_s(cluster, "by length")
            if work > 0:
                scales["prefill", cluster.name] = self.prefill_work_s(cluster, "mean length") / work
        for link in self.problem.links:
            bits = self.link_bits(link.name, "by length")
            if bits > 0:
                scales["link", link.name] = self.link_bits(link.name, "mean length") / bits
        return scales

    def _paths_from(self, clusters: Sequence[PrfaasCluster | PdCluster]) -> list[int]:
        names = {cluster.name for cluster in clusters}
        return [k for k, path in enumerate(self.paths) if path.prefill in names and self.mass[k] > 0]

    def _work_by_length(self, clusters: Sequence[PrfaasCluster | PdCluster]) -> float:
        curve = clusters[0].prefill_s
        used = self._paths_from(clusters)
        works = [self.shares[:, k] * self.lengths.means(curve, self.paths[k].share) for k in used]
        return sum(float(work.sum()) for work in works)

    def _work_at_mean(self, clusters: Sequence[PrfaasCluster | PdCluster]) -> float:
        used = self._paths_from(clusters)
        requests = float(self.mass[used].sum())
        computed = sum(float(self.mass[k]) * self.mean_length(k) * self.paths[k].share for k in used)
        return requests * float(clusters[0].prefill_s(np.array([computed / requests]))[0])

    def link_bits(self, link: str, service: ServiceModel) -> float:
        """Bits that cross a link per request of the whole system."""
        total, kv_bytes = 0.0, self.problem.kv_bytes_over(link)
        for k, path in enumerate(self.paths):
            mass = float(self.mass[k])
            for transfer in path.transfers:
                if transfer.link != link or mass <= 0:
                    continue
                if service == "mean length":
                    mean = np.array([transfer.share * self.mean_length(k)])
                    total += mass * float(kv_bytes(mean)[0])
                else:
                    sizes = self.lengths.means(kv_bytes, transfer.share)
                    total += float((self.shares[:, k] * sizes).sum())
        return total * BITS_PER_BYTE


def best_routing(
    problem: PlanProblem,
    paths: tuple[Path, ...],
    prefill: Mapping[str, int],
    service: ServiceModel,
    spread: Mapping[str, float] | None = None,
) -> tuple[RoutingPlan, dict[Resource, float]] | None:
    """The best routes for given roles.

    Args:
        problem: What is planned.
        paths: Those that may be used.
        prefill: Prefill instances by PD cluster.
        service: How long a stage works on what it gets.
        spread: The part of the requests of every length that decodes in each PD cluster, as a gateway spreads them
            (sums to 1). Routes are fair then: where one cluster is the limit, the others are balanced among
            themselves. None: any request may decode anywhere.

    Returns:
        The routes and the scales that they were found with; None if nothing can flow.
    """
    distribution = problem.workload.lengths
    lengths = BinnedLengths.of(distribution, distribution.bins(_BINS))
    scales: dict[Resource, float] = {}
    best: tuple[float, RoutingPlan, dict[Resource, float]] | None = None
    before = 0.0
    for _ in range(_ROUNDS):
        programme = Programme(problem, paths, lengths, scales)
        shares = programme.shares(prefill) if spread is None else programme.fair_shares(prefill, spread)
        if shares is None:
            return None
        routing = RoutingPlan(problem, paths, lengths, cleaned(lengths, shares), prefill)
        rate = routing.rate(service)
        # Later rounds are more exact, so a tie goes to them.
        if best is None or rate >= best[0] * (1 - _SETTLED):
            best = (rate, routing, scales)
        if abs(rate - before) <= _SETTLED * rate:
            break
        before = rate
        if service == "mean length":
            scales = routing.scales()
        divided = np.flatnonzero((routing.shares > 0).sum(axis=1) > 1)
        # Equal clusters may share every bin; dividing them all would only cost time.
        if len(divided) <= _MOST_DIVIDED_BINS and len(lengths.bins.weights) <= _MOST_BINS:
            lengths = lengths.divided(divided, _PARTS)
    assert best is not None
    return best[1], best[2]


def cleaned(lengths: BinnedLengths, shares: FloatArray) -> FloatArray:
    """Flows without the solver's rounding: tiny ones are 0, and those of each bin sum to it exactly."""
    weights = lengths.bins.weights[:, None]
    kept = np.where(shares > _NOTHING * weights, shares, 0.0)
    result: FloatArray = kept * weights / kept.sum(axis=1, keepdims=True)
    return result
