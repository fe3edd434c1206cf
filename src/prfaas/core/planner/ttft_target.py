"""Operating points with their waits, and the best one that keeps a target for the time to the first token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prfaas.core.planner.loads import Split, work_of
from prfaas.core.planner.network import NetworkPlan, best_network
from prfaas.core.planner.operating_point import OperatingPoint, ServiceModel
from prfaas.core.planner.problem import PlanError, PlanProblem, TtftTarget
from prfaas.core.planner.role_latency import decode_queues
from prfaas.core.planner.ttft import ESTIMATE_LABEL, StageWork, TtftDistribution, TtftEstimate
from prfaas.core.planner.two_clusters import (
    best_of,
    best_point,
    merits,
    point_of,
    policies,
    settled,
    split_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

# Thresholds that are tried for every split; between two of them the limit of the target is found by bisection.
_GRID = 96
_BISECTIONS = 40
# With several clusters on a side roles are moved by one instance so often at most.
_ROLE_ROUNDS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operating point, and the work from which its waits follow."""

    problem: PlanProblem
    point: OperatingPoint
    work: StageWork
    network: NetworkPlan | None = None
    """Where it is from, if several clusters are on a side."""

    def waits(self, requests_per_s: float) -> TtftDistribution:
        """TTFT with waiting at a rate."""
        prefill = {roles.cluster: roles.prefill for roles in self.point.roles}
        return _distribution(self.problem, self.work, prefill, requests_per_s)

    def estimate(self, load: float) -> TtftEstimate:
        """TTFT with waiting at a share of Λ_max."""
        requests_per_s = load * self.point.lambda_max
        found = self.waits(requests_per_s)
        mean_s, p90_s = (found.mean_s(), found.quantile_s(0.9)) if found.is_finite else (None, None)
        return TtftEstimate(ESTIMATE_LABEL, load, requests_per_s, mean_s, p90_s, found.busiest_utilisation)

    @property
    def keeps_target(self) -> bool:
        """Whether the TTFT at the problem's load is within its target; True without one."""
        target = self.problem.ttft_target
        return target is None or _is_within(self.waits(self.problem.load * self.point.lambda_max), target)

    @property
    def comparable_rate(self) -> float:
        """Λ_max; where the target is not kept, that of which the problem's load is the most that keeps it."""
        target = self.problem.ttft_target
        if target is None or self.keeps_target:
            return self.point.lambda_max
        return self.rate_within(target) / self.problem.load

    def rate_within(self, target: TtftTarget) -> float:
        """The highest rate, at most Λ_max, at which the TTFT is within a target; 0 if it never is."""
        low, high = 0.0, self.point.lambda_max
        if high <= 0 or not _is_within(self.waits(0.0), target):
            return 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _is_within(self.waits(middle), target) else (low, middle)
        return low


def operation_at(problem: PlanProblem, point: OperatingPoint) -> Operation:
    """An operating point of two clusters with its work.

    Raises:
        PlanError: the problem has more than two clusters.
    """
    split = split_of(problem, point.cache_policy, "mean length")
    assert split is not None
    length = problem.workload.lengths.high
    if point.threshold_tokens is not None:
        length = point.threshold_tokens / split.own_share
    return Operation(problem, point, work_of(split, length, point.n_prefill))


def best_within_target(problem: PlanProblem, service: ServiceModel = "mean length") -> Operation:
    """The highest Λ_max whose TTFT, at the problem's load of it, keeps the problem's target.

    Of two clusters every split and threshold is looked at. Of more the roles near those of the highest Λ_max are, each
    with its best routes. Where nothing keeps the target it is the operation of the highest Λ_max.

    Raises:
        PlanError: the solver gave up.
    """
    if not problem.is_two_cluster:
        return _network_within_target(problem, service)
    best = operation_at(problem, best_point(problem, service))
    target = problem.ttft_target
    if target is None or best.point.lambda_max <= 0 or best.keeps_target:
        return best
    found = None
    for policy in policies(problem):
        split = split_of(problem, policy, service)
        if split is not None:
            here = _TargetSearch(split, target).best()
            if here is not None and (found is None or here.point.lambda_max > found.point.lambda_max):
                found = here
    return found or best


def _network_within_target(problem: PlanProblem, service: ServiceModel) -> Operation:
    best = around = _of_network(problem, best_network(problem, service))
    if best.keeps_target:
        return best
    seen = {around.point.roles}
    for _ in range(_ROLE_ROUNDS):
        near = []
        for roles in _neighbours(around.point):
            try:
                found = _of_network(problem, best_network(problem, service, roles))
            except PlanError:
                continue
            if found.point.roles not in seen:
                seen.add(found.point.roles)
                near.append(found)
        kept = [each for each in near if each.keeps_target]
        if kept:
            return max(kept, key=lambda each: each.point.lambda_max)
        if not near:
            break
        around = min(near, key=lambda each: each.waits(problem.load * each.point.lambda_max).mean_s())
    return best


def _of_network(problem: PlanProblem, network: NetworkPlan) -> Operation:
    return Operation(problem, network.point, network.work, network)


def _neighbours(point: OperatingPoint) -> Iterator[dict[str, int]]:
    """Prefill instances by PD cluster if one instance changed its role."""
    prefill = {roles.cluster: roles.prefill for roles in point.roles}
    for roles in point.roles:
        if roles.decode > 0:
            yield prefill | {roles.cluster: roles.prefill + 1}
        if roles.prefill > 0:
            yield prefill | {roles.cluster: roles.prefill - 1}


class _TargetSearch:
    """The best threshold and split with two routes."""

    def __init__(self, split: Split, target: TtftTarget) -> None:
        self._split, self._target = split, target
        self._splits = range(split.pd.instances + 1)

    def best(self) -> Operation | None:
        """None if nothing keeps the target."""
        lengths = self._lengths()
        rates = [each for each, _ in merits(self._split, self._split.loads(lengths), self._splits)]
        works = [work_of(self._split, settled(self._split.problem, float(each)), 1) for each in lengths]
        # Where not even a prefill that never waits is in time, no split helps.
        hopeful = [_is_within(TtftDistribution(work.pools, 0.0), self._target) for work in works]
        # What lies between a length and its better neighbour may be as good as that one.
        ranked = sorted(
            (
                (max(float(rates[n][j]) for j in (i - 1, i, i + 1) if 0 <= j < len(lengths)), i, n)
                for n in self._splits
                for i in range(len(lengths))
                if hopeful[i] and rates[n][i] > 0
            ),
            reverse=True,
        )
        load = self._split.problem.load
        found = None
        for most, i, n in ranked:
            if found is not None and most <= found.point.lambda_max:
                break
            if self._is_within(works[i], n, load * float(rates[n][i])):
                length = self._edge(lengths, rates[n], i, n)
                point = point_of(self._split, length, n)
                if found is None or point.lambda_max > found.point.lambda_max:
                    found = Operation(self._split.problem, point, work_of(self._split, length, n))
        return found

    def _lengths(self) -> "FloatArray":
        """Ascending: quantiles, and the threshold of each split's highest Λ."""
        import numpy as np

        distribution = self._split.problem.workload.lengths
        if self._split.remote is None:
            return np.array([distribution.high])
        peaks = [best_of(self._split, range(n, n + 1))[1] for n in self._splits]
        quantiles = [distribution.quantile(k / _GRID) for k in range(1, _GRID)]
        return np.unique(np.array([0.0, distribution.high, *quantiles, *peaks]))

    def _edge(self, lengths: "FloatArray", rates: "FloatArray", index: int, n_prefill: int) -> float:
        """The length between a good one and its neighbour of a higher Λ, up to which the target is kept."""
        good = float(lengths[index])
        if self._split.problem.workload.lengths.atoms() is not None:
            return good
        near = [j for j in (index - 1, index + 1) if 0 <= j < len(lengths) and rates[j] > rates[index]]
        if not near:
            return good
        bad = float(lengths[max(near, key=lambda j: float(rates[j]))])
        for _ in range(_BISECTIONS):
            middle = (good + bad) / 2
            good, bad = (middle, bad) if self._keeps(middle, n_prefill) else (good, middle)
        return good

    def _keeps(self, length: float, n_prefill: int) -> bool:
        import numpy as np

        count = range(n_prefill, n_prefill + 1)
        rate = float(merits(self._split, self._split.loads(np.array([length])), count)[0][0][0])
        return self._is_within(work_of(self._split, length, 1), n_prefill, self._split.problem.load * rate)

    def _is_within(self, work: StageWork, n_prefill: int, requests_per_s: float) -> bool:
        """`work` is that of one prefill instance of the PD cluster."""
        name = self._split.pd.name
        pools = tuple(
            replace(pool, instances=n_prefill) if pool.name == name else pool for pool in work.pools
        )
        problem = self._split.problem
        found = _distribution(problem, replace(work, pools=pools), {name: n_prefill}, requests_per_s)
        return _is_within(found, self._target)


def _distribution(
    problem: PlanProblem, work: StageWork, prefill: Mapping[str, int], requests_per_s: float
) -> TtftDistribution:
    decode = decode_queues(problem, prefill, work, requests_per_s)
    return TtftDistribution(work.pools, requests_per_s, decode)


def _is_within(found: TtftDistribution, target: TtftTarget) -> bool:
    if target.statistic == "mean":
        return found.mean_s() <= target.seconds
    return found.at_most(target.seconds) >= 0.9
