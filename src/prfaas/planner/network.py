"""The general case: any number of PrfaaS clusters, PD clusters and links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prfaas.planner.binned import BinnedLengths
from prfaas.planner.errors import PlanError
from prfaas.planner.paths import Path, all_paths
from prfaas.planner.plan_problem import PdCluster, PlanProblem, PrfaasCluster
from prfaas.planner.point import LinkUse, OperatingPoint, Roles, RouteUse, ServiceModel, Stage, StageKind
from prfaas.planner.programme import Programme, Resource
from prfaas.planner.ttft import Pool, service_ttft
from prfaas.units import BITS_PER_BYTE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

# Roles are found on few bins, the routes for them on more.
_ROLE_BINS = 24
_BINS = 64
_PARTS = 4
_MOST_DIVIDED_BINS = 24
_MOST_BINS = 160
_ROUNDS = 8
_SETTLED = 1e-6
# Flows below this part of all requests are the solver's rounding.
_NOTHING = 1e-7
# A bin with fewer requests than this part of all doesn't count for the ends of a route.
_SEEN = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class NetworkPlan:
    """The operating point, what each resource is worth, and how far the optimum may be above (in proportion)."""

    point: OperatingPoint
    pools: tuple[Pool, ...]
    prices: dict[tuple[str, str], float]
    bound_gap: float


@dataclass(frozen=True, slots=True, eq=False)
class _Routing:
    """Shares of (bins × paths) and prefill instances by PD cluster."""

    problem: PlanProblem
    paths: tuple[Path, ...]
    lengths: BinnedLengths
    shares: "FloatArray"
    prefill: Mapping[str, int]

    @property
    def mass(self) -> "FloatArray":
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

    def _paths_from(self, clusters: Sequence[PrfaasCluster | PdCluster]) -> list[int]:
        names = {cluster.name for cluster in clusters}
        return [k for k, path in enumerate(self.paths) if path.prefill in names and self.mass[k] > 0]

    def _work_by_length(self, clusters: Sequence[PrfaasCluster | PdCluster]) -> float:
        curve = clusters[0].prefill_s
        used = self._paths_from(clusters)
        works = [self.shares[:, k] * self.lengths.means(curve, self.paths[k].share) for k in used]
        return sum(float(work.sum()) for work in works)

    def _work_at_mean(self, clusters: Sequence[PrfaasCluster | PdCluster]) -> float:
        import numpy as np

        used = self._paths_from(clusters)
        requests = float(self.mass[used].sum())
        computed = sum(float(self.mass[k]) * self.mean_length(k) * self.paths[k].share for k in used)
        return requests * float(clusters[0].prefill_s(np.array([computed / requests]))[0])

    def link_bits(self, link: str, service: ServiceModel) -> float:
        """Bits that cross a link per request of the whole system."""
        import numpy as np

        total = 0.0
        for k, path in enumerate(self.paths):
            mass = float(self.mass[k])
            for transfer in path.transfers:
                if transfer.link != link or mass <= 0:
                    continue
                if service == "mean length":
                    mean = np.array([transfer.share * self.mean_length(k)])
                    total += mass * float(self.problem.kv_bytes(mean)[0])
                else:
                    sizes = self.lengths.means(self.problem.kv_bytes, transfer.share)
                    total += float((self.shares[:, k] * sizes).sum())
        return total * BITS_PER_BYTE


def best_network(problem: PlanProblem, service: ServiceModel = "mean length") -> NetworkPlan:
    """The highest Λ_max over whole-number roles and any routing of lengths over the links.

    Lengths are cut into bins, and again where the solution divides a bin. Requests are routed by T(l). With
    "mean length" every resource's work is then scaled to the paper's T(E[L]) (or S(E[L])) of what it got, and the
    programme solved again until nothing changes: for two clusters that is the balance of Eq. 7.
    """
    paths = all_paths(problem)
    distribution = problem.workload.lengths
    coarse = BinnedLengths.of(distribution, distribution.bins(_ROLE_BINS))
    prefill, bound = Programme(problem, paths, coarse, {}).best_roles()
    best, routing, scales = _best_routes(problem, paths, prefill, service)
    if service == "mean length":
        # The corrected work may call for other roles.
        again, corrected_bound = Programme(problem, paths, coarse, scales).best_roles()
        if again != prefill:
            other, other_routing, other_scales = _best_routes(problem, paths, again, service)
            if other.lambda_max > best.lambda_max:
                best, routing, scales = other, other_routing, other_scales
        bound = corrected_bound
    prices = Programme(problem, paths, routing.lengths, scales).prices(routing.prefill)
    gap = max(bound / best.lambda_max - 1, 0.0) if best.lambda_max > 0 else 0.0
    return NetworkPlan(best, _pools(routing), prices, gap)


def naive_network(problem: PlanProblem, service: ServiceModel = "mean length") -> OperatingPoint | None:
    """All prefill on PrfaaS clusters, all PD instances decode, and no regard to length; None without a way."""
    import numpy as np

    paths = tuple(path for path in all_paths(problem) if path.prefill in {c.name for c in problem.prfaas})
    if {path.decode for path in paths} != {pd.name for pd in problem.pd}:
        return None
    distribution = problem.workload.lengths
    lengths = BinnedLengths.of(distribution, distribution.bins_between(np.array([0.0, distribution.high])))
    prefill = {pd.name: 0 for pd in problem.pd}
    scales: dict[Resource, float] = {}
    for _ in range(2 if service == "mean length" else 1):
        shares = Programme(problem, paths, lengths, scales).shares(prefill)
        if shares is None:
            return None
        routing = _Routing(problem, paths, lengths, _clean(lengths, shares), prefill)
        scales = _scales(routing)
    return _point(routing, service)


def _best_routes(
    problem: PlanProblem, paths: tuple[Path, ...], prefill: Mapping[str, int], service: ServiceModel
) -> tuple[OperatingPoint, _Routing, dict[Resource, float]]:
    """The best routes for given roles, with the scales that they were found with."""
    import numpy as np

    distribution = problem.workload.lengths
    lengths = BinnedLengths.of(distribution, distribution.bins(_BINS))
    scales: dict[Resource, float] = {}
    best: tuple[OperatingPoint, _Routing, dict[Resource, float]] | None = None
    before = 0.0
    for _ in range(_ROUNDS):
        shares = Programme(problem, paths, lengths, scales).shares(prefill)
        if shares is None:
            raise PlanError(
                "no request gets through; there must be an instance for prefill and one for decode"
            )
        routing = _Routing(problem, paths, lengths, _clean(lengths, shares), prefill)
        point = _point(routing, service)
        # Later rounds are more exact, so a tie goes to them.
        if best is None or point.lambda_max >= best[0].lambda_max * (1 - _SETTLED):
            best = (point, routing, scales)
        if abs(point.lambda_max - before) <= _SETTLED * point.lambda_max:
            break
        before = point.lambda_max
        if service == "mean length":
            scales = _scales(routing)
        divided = np.flatnonzero((routing.shares > 0).sum(axis=1) > 1)
        # Equal clusters may share every bin; dividing them all would only cost time.
        if len(divided) <= _MOST_DIVIDED_BINS and len(lengths.bins.weights) <= _MOST_BINS:
            lengths = lengths.divided(divided, _PARTS)
    assert best is not None
    return best


def _clean(lengths: BinnedLengths, shares: "FloatArray") -> "FloatArray":
    """Without the solver's rounding: what is next to nothing is nothing, and each bin is used up exactly."""
    import numpy as np

    weights = lengths.bins.weights[:, None]
    kept = np.where(shares > _NOTHING * weights, shares, 0.0)
    cleaned: FloatArray = kept * weights / kept.sum(axis=1, keepdims=True)
    return cleaned


def _scales(routing: _Routing) -> dict[Resource, float]:
    """The paper's work of each resource, at the mean length, over the work by length; where it has any."""
    scales: dict[Resource, float] = {}
    for cluster in routing.problem.clusters:
        work = routing.prefill_work_s(cluster, "by length")
        if work > 0:
            scales["prefill", cluster.name] = routing.prefill_work_s(cluster, "mean length") / work
    for link in routing.problem.links:
        bits = routing.link_bits(link.name, "by length")
        if bits > 0:
            scales["link", link.name] = routing.link_bits(link.name, "mean length") / bits
    return scales


def _pools(routing: _Routing) -> tuple[Pool, ...]:
    """Service times of every prefill cluster, by the exact distribution of lengths."""
    import numpy as np

    lengths = routing.lengths
    portions = routing.shares / lengths.bins.weights[:, None]
    pools = []
    for cluster in routing.problem.clusters:
        seconds, weights = [], []
        for k, path in enumerate(routing.paths):
            if path.prefill == cluster.name and routing.mass[k] > 0:
                part = lengths.fine.weights * portions[lengths.where, k]
                seconds.append(cluster.prefill_s(path.share * lengths.fine.lengths)[part > 0])
                weights.append(part[part > 0])
        if seconds:
            instances = routing.prefill.get(cluster.name, cluster.instances)
            smooth = lengths.distribution.atoms() is None
            pools.append(
                Pool(cluster.name, instances, np.concatenate(seconds), np.concatenate(weights), smooth)
            )
    return tuple(pools)


def _stages(routing: _Routing, service: ServiceModel) -> tuple[Stage, ...]:
    """All stages with their capacities; utilisations are set when Λ_max is known."""
    problem, prefill = routing.problem, routing.prefill
    stages = []
    for cluster in problem.clusters:
        work = routing.prefill_work_s(cluster, service)
        kind: StageKind = "pd prefill" if cluster.name in prefill else "prfaas prefill"
        capacity = prefill.get(cluster.name, cluster.instances) / work if work > 0 else None
        stages.append(Stage(f"{cluster.name} prefill", kind, capacity, 0.0))
    for link in problem.links:
        bits = routing.link_bits(link.name, service)
        capacity = link.bandwidth_bits_per_s / bits if bits > 0 else None
        stages.append(Stage(f"{link.name} link", "link", capacity, 0.0))
    for pd in problem.pd:
        share = sum(float(routing.mass[k]) for k, path in enumerate(routing.paths) if path.decode == pd.name)
        rate = (pd.instances - prefill[pd.name]) * pd.decode_rate(problem.workload.output_tokens)
        stages.append(Stage(f"{pd.name} decode", "pd decode", rate / share if share > 0 else None, 0.0))
    return tuple(stages)


def _point(routing: _Routing, service: ServiceModel) -> OperatingPoint:
    import numpy as np

    problem, prefill = routing.problem, routing.prefill
    capacities = _stages(routing, service)
    rate = min(stage.capacity for stage in capacities if stage.capacity is not None)
    stages = tuple(
        replace(stage, utilisation=_utilisation(rate, stage.capacity) if stage.capacity is not None else 0.0)
        for stage in capacities
    )
    local = np.array([path.is_local for path in routing.paths])
    p = float(routing.mass[~local].sum())
    links = []
    for link in problem.links:
        egress = routing.link_bits(link.name, service) * rate
        links.append(
            LinkUse(link.name, link.bandwidth_bits_per_s, egress, egress / link.bandwidth_bits_per_s)
        )
    mean_ttft, p90_ttft = service_ttft(_pools(routing))
    n_prefill = sum(prefill.values())
    output = problem.workload.output_tokens
    used_best = any(path.policy == "best" and routing.mass[k] > 0 for k, path in enumerate(routing.paths))
    return OperatingPoint(
        threshold_tokens=_threshold(routing, local, p),
        n_prefill=n_prefill,
        n_decode=sum(pd.instances for pd in problem.pd) - n_prefill,
        theta_prfaas=_theta(routing, stages, local=False),
        theta_pd_p=_theta(routing, stages, local=True),
        theta_pd_d=sum((pd.instances - prefill[pd.name]) * pd.decode_rate(output) for pd in problem.pd),
        lambda_max=rate,
        offloaded_fraction=p,
        mean_long_tokens=_mean(routing, ~local),
        mean_short_tokens=_mean(routing, local),
        egress_bits_per_s=sum((link.egress_bits_per_s for link in links), 0.0),
        ttft_mean_s=mean_ttft,
        ttft_p90_s=p90_ttft,
        n_prfaas=sum(cluster.instances for cluster in problem.prfaas),
        cache_policy="best" if used_best else "own",
        roles=tuple(Roles(pd.name, prefill[pd.name], pd.instances - prefill[pd.name]) for pd in problem.pd),
        stages=stages,
        routes=tuple(_routes(routing)),
        links=tuple(links),
    )


def _utilisation(rate: float, capacity: float) -> float:
    return rate / capacity if capacity > 0 else 1.0


def _uncached(problem: PlanProblem, path: Path) -> float:
    """Tokens that the decoding cluster doesn't hold, per token of the prompt: what thresholds are compared with."""
    pd = next(pd for pd in problem.pd if pd.name == path.decode)
    return 1 - problem.hit_ratio(pd)


def _routes(routing: _Routing) -> list[RouteUse]:
    bins, routes = routing.lengths.bins, []
    for k, path in enumerate(routing.paths):
        total = float(routing.mass[k])
        if total > _NOTHING:
            scale = _uncached(routing.problem, path)
            used = routing.shares[:, k] > min(_SEEN, total / 2)
            if not used.any():
                used = routing.shares[:, k] > 0
            ends = float(bins.lower[used].min()) * scale, float(bins.upper[used].max()) * scale
            routes.append(RouteUse(path.prefill, path.decode, total, routing.mean_length(k) * scale, *ends))
    return routes


def _mean(routing: _Routing, chosen: "NDArray[np.bool_]") -> float | None:
    """The mean uncached tokens of requests on the chosen paths."""
    used = [k for k in range(len(routing.paths)) if chosen[k] and routing.mass[k] > 0]
    mass = float(routing.mass[used].sum())
    if mass <= _NOTHING:
        return None
    scales = [_uncached(routing.problem, routing.paths[k]) for k in used]
    parts = [float(routing.mass[k]) * routing.mean_length(k) for k in used]
    return sum(part * scale for part, scale in zip(parts, scales, strict=True)) / mass


def _theta(routing: _Routing, stages: tuple[Stage, ...], *, local: bool) -> float | None:
    """Σ over prefill clusters of the rate at which the cluster, or a link it feeds, is full (Eq. 3 and 4)."""
    capacities = {stage.name: stage.capacity for stage in stages}
    total: float | None = None
    for cluster in routing.problem.clusters:
        used = [
            k
            for k, path in enumerate(routing.paths)
            if path.prefill == cluster.name and path.is_local is local and routing.mass[k] > 0
        ]
        names = {f"{cluster.name} prefill"} if used else set()
        if not local:
            names |= {f"{transfer.link} link" for k in used for transfer in routing.paths[k].transfers}
        limits = [capacity for name in names if (capacity := capacities[name]) is not None]
        if limits:
            total = (total or 0.0) + min(limits) * float(routing.mass[used].sum())
    return total


def _threshold(routing: _Routing, local: "NDArray[np.bool_]", p: float) -> float | None:
    """The uncached length that separates offloaded from local requests; None if they overlap in more than a bin."""
    import numpy as np

    scales = {round(_uncached(routing.problem, path), 12) for path in routing.paths}
    if len(scales) > 1 or not routing.problem.links:
        return None
    scale, distribution = scales.pop(), routing.lengths.distribution
    here, away = routing.shares[:, local].sum(axis=1), routing.shares[:, ~local].sum(axis=1)
    if p <= _NOTHING:
        return distribution.high * scale
    if p >= 1 - _NOTHING:
        return 0.0
    short, long = np.flatnonzero(here > _SEEN), np.flatnonzero(away > _SEEN)
    if len(short) and len(long) and short.max() > long.min():
        return None
    return distribution.quantile(1 - p) * scale
