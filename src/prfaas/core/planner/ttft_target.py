"""Operating points with their waits, and the best one that keeps a target for the time to the first token."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from prfaas.core.arrays import FloatArray, np
from prfaas.core.planner.loads import Split, pools_of_parts, work_of
from prfaas.core.planner.network import NetworkPlan, best_network
from prfaas.core.planner.operating_point import OperatingPoint, ServiceModel
from prfaas.core.planner.problem import PlanError, PlanProblem, TtftTarget
from prfaas.core.planner.ttft import (
    ESTIMATE_LABEL,
    StageWork,
    TtftDistribution,
    TtftEstimate,
    decode_queues,
)
from prfaas.core.planner.two_clusters import (
    best_of,
    best_point,
    merits,
    point_of,
    policies,
    settled,
    split_of,
)

# Thresholds that are tried for every split, and so often more of them beside the best one.
_GRID = 192
_ZOOMS, _ZOOM_POINTS = 2, 25
# Of lengths, to compare thresholds by; the one that is taken is worked out by finer bins.
_BINS = 3000
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
    """The network plan that it comes from, if several clusters are on a side."""

    def waits(self, requests_per_s: float) -> TtftDistribution:
        """TTFT with waiting at a rate."""
        return self._waits(self.problem, requests_per_s)

    def estimate(self, load: float) -> TtftEstimate:
        """TTFT with waiting at a share of Λ_max."""
        requests_per_s = load * self.point.lambda_max
        return _estimate(self.waits(requests_per_s), load, requests_per_s)

    def rest_estimate(self, load: float) -> TtftEstimate | None:
        """Time until decode instances have the KV and a slot; None where the TTFT waits for those."""
        if self.problem.first_token == "decode":
            return None
        requests_per_s = load * self.point.lambda_max
        found = self._waits(replace(self.problem, first_token="decode"), requests_per_s)
        return _estimate(found, load, requests_per_s)

    def _waits(self, problem: PlanProblem, requests_per_s: float) -> TtftDistribution:
        prefill = {roles.cluster: roles.prefill for roles in self.point.roles}
        return _distribution(problem, self.work, prefill, requests_per_s)

    @property
    def keeps_target(self) -> bool:
        """True if the TTFT at the problem's load is within its target, or there is none."""
        target = self.problem.ttft_target
        return target is None or _is_within(self.waits(self.problem.load * self.point.lambda_max), target)

    @property
    def comparable_rate(self) -> float:
        """The Λ_max to compare by; where it misses the target, the highest one whose load meets it."""
        target = self.problem.ttft_target
        if target is None or self.keeps_target:
            return self.point.lambda_max
        load, high = self.problem.load, self.point.lambda_max
        return _most(lambda rate: _is_within(self.waits(load * rate), target), high)

    def slowed(self) -> "Operation":
        """The same roles and routes, at `comparable_rate`."""
        return replace(self, point=_at_rate(self.point, self.comparable_rate))

    def rate_within(self, target: TtftTarget) -> float:
        """The highest rate, at most Λ_max, at which the TTFT is within a target; 0 if it never is."""
        return _most(lambda rate: _is_within(self.waits(rate), target), self.point.lambda_max)


def operation_at(problem: PlanProblem, point: OperatingPoint) -> Operation:
    """An operating point of two clusters with its work.

    Raises:
        PlanError: the problem has more than two clusters.
    """
    split = split_of(problem, point.cache_policy, "mean length")
    assert split is not None
    length = problem.workload.lengths.highest_threshold
    if point.threshold_tokens is not None:
        length = point.threshold_tokens / split.own_share
    return Operation(problem, point, work_of(split, length, point.n_prefill))


def best_within_target(problem: PlanProblem, service: ServiceModel = "by length") -> Operation:
    """The highest rate whose TTFT, at the problem's load of it, keeps the problem's target.

    Roles and routes may be able to carry more than that rate: then it is their Λ_max here, and no stage is full.

    Of two clusters every split and threshold is looked at. Of more the roles near those of the highest Λ_max are, each
    with its best routes. Where nothing keeps the target it is the operation of the highest Λ_max.

    Raises:
        PlanError: the solver gave up, or several clusters are to be planned for by the mean length.
    """
    if not problem.is_two_cluster:
        if service == "mean length":
            raise PlanError("the paper's T(E[L]) is defined for one PrfaaS cluster and one PD cluster")
        return _network_within_target(problem)
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


def _network_within_target(problem: PlanProblem) -> Operation:
    best = around = _of_network(problem, best_network(problem))
    if best.keeps_target:
        return best
    seen = {around.point.roles}
    fastest = best.slowed()
    for _ in range(_ROLE_ROUNDS):
        near = []
        for roles in _neighbours(problem, around.point):
            try:
                network = best_network(problem, roles)
            except PlanError:
                continue
            if network.point.roles not in seen:
                seen.add(network.point.roles)
                near.append(_of_network(problem, network).slowed())
        if not near:
            break
        around = max(near, key=lambda each: each.point.lambda_max)
        fastest = max(fastest, around, key=lambda each: each.point.lambda_max)
    return fastest if fastest.point.lambda_max > 0 else best


def _of_network(problem: PlanProblem, network: NetworkPlan) -> Operation:
    return Operation(problem, network.point, network.work, network)


def _neighbours(problem: PlanProblem, point: OperatingPoint) -> Iterator[dict[str, int]]:
    """Prefill instances by PD cluster if one instance or group changed its role."""
    prefill = {roles.cluster: roles.prefill for roles in point.roles}
    step = {pd.name: pd.group_ranks for pd in problem.pd}
    for roles in point.roles:
        if roles.decode >= step[roles.cluster]:
            yield prefill | {roles.cluster: roles.prefill + step[roles.cluster]}
        if roles.prefill >= step[roles.cluster]:
            yield prefill | {roles.cluster: roles.prefill - step[roles.cluster]}


class _TargetSearch:
    """The best threshold and split with two routes."""

    def __init__(self, split: Split, target: TtftTarget) -> None:
        self._split, self._target = split, target
        self._splits = split.pd.splits

    def best(self) -> Operation | None:
        """None if nothing keeps the target."""
        lengths = self._lengths()
        best = self._best_of(lengths)
        for _ in range(_ZOOMS):
            if best[0] <= 0 or len(lengths) == 1:
                break
            index = int(np.searchsorted(lengths, best[1]))
            near = lengths[max(index - 1, 0)], lengths[min(index + 1, len(lengths) - 1)]
            lengths = np.unique(np.append(np.linspace(*near, _ZOOM_POINTS), best[1]))
            best = max(best, self._best_of(lengths))
        rate, length, n_prefill = best
        if rate <= 0:
            return None
        work = work_of(self._split, length, n_prefill)
        found = Operation(self._split.problem, point_of(self._split, length, n_prefill), work).slowed()
        return found if found.point.lambda_max > 0 else None

    def _best_of(self, lengths: FloatArray) -> tuple[float, float, int]:
        """The highest rate that meets the target, with the length and split that reach it."""
        rates, _ = merits(self._split, self._split.loads(lengths), self._splits)
        works = self._works(lengths)
        # Where not even a prefill that never waits is in time, no split helps.
        first_token = self._split.problem.first_token
        hopeful = [
            _is_within(TtftDistribution(work.pools, 0.0, (), first_token), self._target) for work in works
        ]
        ranked = sorted(
            (
                (float(rates[row][i]), i, n)
                for row, n in enumerate(self._splits)
                for i in range(len(lengths))
                if hopeful[i] and rates[row][i] > 0
            ),
            reverse=True,
        )
        best: tuple[float, float, int] = (0.0, 0.0, 0)
        for full, i, n in ranked:
            if full <= best[0]:
                break
            rate = self._rate(works[i], n, full, above=best[0])
            if rate > best[0]:
                best = (rate, float(lengths[i]), n)
        return best

    def _works(self, lengths: FloatArray) -> list[StageWork]:
        """With one prefill instance, by bins that all lengths share: enough to compare them."""
        distribution = self._split.problem.workload.lengths
        bins = distribution.bins(_BINS, tuple(map(float, lengths)))
        parts = {self._split.pd.name: 1.0}
        works = []
        for length in lengths:
            threshold = settled(self._split.problem, float(length))
            short, long = bins.divided(distribution.parts_beyond(bins, threshold))
            works.append(StageWork(pools_of_parts(self._split, short, long, 1), {}, parts))
        return works

    def _lengths(self) -> FloatArray:
        """Ascending: quantiles, and the threshold of each split's highest Λ."""
        distribution = self._split.problem.workload.lengths
        if self._split.remote is None:
            return np.array([distribution.highest_threshold])
        peaks = [best_of(self._split, range(n, n + 1))[1] for n in self._splits]
        return np.unique(np.concatenate([distribution.thresholds(_GRID), peaks]))

    def _rate(self, work: StageWork, n_prefill: int, full: float, *, above: float = 0.0) -> float:
        """The highest rate up to `full` whose load keeps the target; 0 if it is not more than `above`."""
        load = self._split.problem.load

        def keeps(rate: float) -> bool:
            return self._is_within(work, n_prefill, load * rate)

        return _most(keeps, full, above)

    def _is_within(self, work: StageWork, n_prefill: int, requests_per_s: float) -> bool:
        """`work` is that of one prefill instance of the PD cluster."""
        name = self._split.pd.name
        pools = tuple(
            replace(pool, instances=n_prefill) if pool.name == name else pool for pool in work.pools
        )
        problem = self._split.problem
        found = _distribution(problem, replace(work, pools=pools), {name: n_prefill}, requests_per_s)
        return _is_within(found, self._target)


def _most(keeps: Callable[[float], bool], high: float, low: float = 0.0) -> float:
    """The highest value between two at which a condition holds, by bisection; 0 if it fails at the lower one."""
    if high <= low or not keeps(low):
        return 0.0
    if keeps(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _at_rate(point: OperatingPoint, rate: float) -> OperatingPoint:
    """The same roles and routes at another rate."""
    if rate == point.lambda_max:
        return point
    share = rate / point.lambda_max
    return replace(
        point,
        lambda_max=rate,
        egress_bits_per_s=share * point.egress_bits_per_s,
        stages=tuple(replace(stage, utilisation=share * stage.utilisation) for stage in point.stages),
        links=tuple(
            replace(
                link,
                egress_bits_per_s=share * link.egress_bits_per_s,
                utilisation=share * link.utilisation,
            )
            for link in point.links
        ),
    )


def _distribution(
    problem: PlanProblem, work: StageWork, prefill: Mapping[str, int], requests_per_s: float
) -> TtftDistribution:
    decode = decode_queues(problem, prefill, work, requests_per_s)
    return TtftDistribution(work.pools, requests_per_s, decode, problem.first_token)


def _estimate(found: TtftDistribution, load: float, requests_per_s: float) -> TtftEstimate:
    mean_s, p90_s = (found.mean_s(), found.quantile_s(0.9)) if found.is_finite else (None, None)
    return TtftEstimate(
        ESTIMATE_LABEL, load, requests_per_s, mean_s, p90_s, busiest_utilisation=found.busiest_utilisation
    )


def _is_within(found: TtftDistribution, target: TtftTarget) -> bool:
    if target.statistic == "mean":
        return found.mean_s() <= target.seconds
    return found.at_most(target.seconds) >= 0.9
