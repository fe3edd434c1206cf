"""The general case: any number of PrfaaS clusters, PD clusters and links."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prfaas.core.arrays import NDArray, np
from prfaas.core.planner.linear_programs import BinnedLengths, Programme
from prfaas.core.planner.operating_point import LinkUse, OperatingPoint, Roles, RouteUse, Stage
from prfaas.core.planner.problem import Path, PlanError, PlanProblem, all_paths
from prfaas.core.planner.routing import RoutingPlan, best_routing, cleaned
from prfaas.core.planner.ttft import PrefillPoolLoad, StageWork, joined, link_time, service_ttft
from prfaas.core.workload.lengths import LengthDistribution

# Roles are found on few bins, the routes for them on more (`routing.py`).
_BISECTIONS = 60
_ROLE_BINS = 24
# Flows below this part of all requests are the solver's rounding.
_NOTHING = 1e-7
# A bin with fewer requests than this part of all doesn't count for the ends of a route.
_SEEN = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class NetworkPlan:
    """The plan that `best_network` finds."""

    point: OperatingPoint
    work: StageWork
    prices: dict[tuple[str, str], float]
    """Λ_max gained per further prefill instance, decode instance or bit/s."""
    bound_gap: float
    """How far the true optimum may be above, in proportion."""


def best_network(problem: PlanProblem, roles: Mapping[str, int] | None = None) -> NetworkPlan:
    """The highest Λ_max over whole-number roles, or with those given, and any routing of lengths over the links.

    Lengths are cut into bins, and again where the solution divides a bin. Requests are routed by T(l).
    """
    paths = all_paths(problem)
    if roles is not None:
        routing = _routes_for(problem, paths, roles)
        prices = Programme(problem, paths, routing.lengths).prices(roles)
        return NetworkPlan(_point(routing), _work(routing), prices, 0.0)
    distribution = problem.workload.lengths
    coarse = BinnedLengths.of(distribution, distribution.bins(_ROLE_BINS))
    prefill, bound = Programme(problem, paths, coarse).best_roles()
    routing = _routes_for(problem, paths, prefill)
    prices = Programme(problem, paths, routing.lengths).prices(routing.prefill)
    best = _point(routing)
    gap = max(bound / best.lambda_max - 1, 0.0) if best.lambda_max > 0 else 0.0
    return NetworkPlan(best, _work(routing), prices, gap)


def naive_network(problem: PlanProblem) -> tuple[OperatingPoint, StageWork] | None:
    """All prefill on PrfaaS clusters, all PD instances decode, and no regard to length; None without a way."""
    paths = tuple(path for path in all_paths(problem) if path.prefill in {c.name for c in problem.prfaas})
    if {path.decode for path in paths} != {pd.name for pd in problem.pd}:
        return None
    distribution = problem.workload.lengths
    lengths = BinnedLengths.of(distribution, distribution.bins_between(np.array([0.0, distribution.high])))
    prefill = {pd.name: 0 for pd in problem.pd}
    shares = Programme(problem, paths, lengths).shares(prefill)
    if shares is None:
        return None
    routing = RoutingPlan(problem, paths, lengths, cleaned(lengths, shares), prefill)
    return _point(routing), _work(routing)


def _routes_for(problem: PlanProblem, paths: tuple[Path, ...], prefill: Mapping[str, int]) -> RoutingPlan:
    found = best_routing(problem, paths, prefill)
    if found is None:
        raise PlanError("no request gets through; there must be an instance for prefill and one for decode")
    return found


def _work(routing: RoutingPlan) -> StageWork:
    problem = routing.problem
    bits = {link.name: routing.link_bits(link.name) for link in problem.links}
    return StageWork(
        _pools(routing),
        {
            link.name: link.bandwidth_bits_per_s / bits[link.name]
            for link in problem.links
            if bits[link.name] > 0
        },
        {pd.name: routing.decode_part(pd) for pd in problem.pd},
    )


def _pools(routing: RoutingPlan) -> tuple[PrefillPoolLoad, ...]:
    """Service times of every prefill cluster, by the exact distribution of lengths."""
    lengths = routing.lengths
    portions = routing.shares / lengths.bins.weights[:, None]
    pools = []
    for cluster in routing.problem.clusters:
        seconds, weights, links = [], [], []
        for k, path in enumerate(routing.paths):
            if path.prefill == cluster.name and routing.mass[k] > 0:
                part = lengths.fine.weights * portions[lengths.where, k]
                used = lengths.fine.lengths[part > 0]
                seconds.append(cluster.prefill_s(path.share * used))
                weights.append(part[part > 0])
                links.append(link_time(routing.problem, path, used, weights[-1]))
        if seconds:
            instances = routing.prefill.get(cluster.name, cluster.instances)
            smooth = lengths.distribution.atoms() is None
            pools.append(
                PrefillPoolLoad(
                    cluster.name,
                    instances,
                    seconds=np.concatenate(seconds),
                    weights=np.concatenate(weights),
                    smooth=smooth,
                    link=joined(links, [len(each) for each in seconds]),
                )
            )
    return tuple(pools)


def _point(routing: RoutingPlan) -> OperatingPoint:
    problem, prefill = routing.problem, routing.prefill
    capacities = routing.stages()
    rate = min(stage.capacity for stage in capacities if stage.capacity is not None)
    stages = tuple(
        replace(
            stage,
            utilisation=0.0 if stage.capacity is None else rate / stage.capacity if stage.capacity else 1.0,
        )
        for stage in capacities
    )
    local = np.array([path.is_local for path in routing.paths])
    p = float(routing.mass[~local].sum())
    links = []
    for link in problem.links:
        egress = routing.link_bits(link.name) * rate
        links.append(
            LinkUse(link.name, link.bandwidth_bits_per_s, egress, egress / link.bandwidth_bits_per_s)
        )
    mean_ttft, p90_ttft = service_ttft(_pools(routing), routing.problem.first_token)
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


def _uncached(problem: PlanProblem, path: Path) -> float:
    """Tokens that the decoding cluster doesn't hold, per token of the prompt: what thresholds are compared with."""
    pd = next(pd for pd in problem.pd if pd.name == path.decode)
    return 1 - problem.hit_ratio(pd)


def _routes(routing: RoutingPlan) -> list[RouteUse]:
    bins, routes = routing.lengths.bins, []
    for k, path in enumerate(routing.paths):
        total = float(routing.mass[k])
        if total > _NOTHING:
            scale = _uncached(routing.problem, path)
            used = routing.shares[:, k] > min(_SEEN, total / 2)
            if not used.any():
                used = routing.shares[:, k] > 0
            use = RouteUse(
                prefill=path.prefill,
                decode=path.decode,
                fraction=total,
                mean_tokens=routing.mean_length(k) * scale,
                from_tokens=float(bins.lower[used].min()) * scale,
                to_tokens=float(bins.upper[used].max()) * scale,
            )
            routes.append(use)
    return routes


def _mean(routing: RoutingPlan, chosen: "NDArray[np.bool_]") -> float | None:
    """The mean uncached tokens of requests on the chosen paths."""
    used = [k for k in range(len(routing.paths)) if chosen[k] and routing.mass[k] > 0]
    mass = float(routing.mass[used].sum())
    if mass <= _NOTHING:
        return None
    scales = [_uncached(routing.problem, routing.paths[k]) for k in used]
    parts = [float(routing.mass[k]) * routing.mean_length(k) for k in used]
    return sum(part * scale for part, scale in zip(parts, scales, strict=True)) / mass


def _theta(routing: RoutingPlan, stages: tuple[Stage, ...], *, local: bool) -> float | None:
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


def _threshold(routing: RoutingPlan, local: "NDArray[np.bool_]", p: float) -> float | None:
    """The uncached length that separates offloaded from local requests; None if they overlap in more than a bin."""
    scales = {round(_uncached(routing.problem, path), 12) for path in routing.paths}
    if len(scales) > 1 or not routing.problem.links:
        return None
    scale, distribution = scales.pop(), routing.lengths.distribution
    here, away = routing.shares[:, local].sum(axis=1), routing.shares[:, ~local].sum(axis=1)
    if p <= _NOTHING:
        return distribution.highest_threshold * scale
    if p >= 1 - _NOTHING:
        return 0.0
    short, long = np.flatnonzero(here > _SEEN), np.flatnonzero(away > _SEEN)
    if len(short) and len(long) and short.max() > long.min():
        return None
    return _threshold_of(distribution, p) * scale


def _threshold_of(distribution: LengthDistribution, p: float) -> float:
    """The threshold that a part p of the requests is above."""
    low, high = 0.0, distribution.highest_threshold
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        ((mass,), _) = distribution.beyond(np.array([middle]))
        low, high = (middle, high) if mass > p else (low, middle)
    return high
