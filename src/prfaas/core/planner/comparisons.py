"""What a plan rests on: its cost, what it is compared with, what one more of each resource adds, and its verdict."""

import math
from dataclasses import dataclass, replace

from prfaas.core.planner.cost import cost_per_hour, instances_per_hour
from prfaas.core.planner.network import NetworkPlan, naive_network
from prfaas.core.planner.operating_point import LinkUse, OperatingPoint, ServiceModel, StageKind
from prfaas.core.planner.problem import PdCluster, PlanProblem
from prfaas.core.planner.two_clusters import best_point, evaluate
from prfaas.core.units import format_bits_per_s

_GBIT = 1e9

NETWORK_BOUND = 1.001
"""Faster links must bring more than this factor to say that the network is the limit."""


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """What one more unit of a resource adds to Λ_max."""

    resource: str
    """The name of a cluster or link."""
    unit: str
    """ "instance" or "Gbit/s"."""
    gain_req_per_s: float
    gain_ratio: float
    """The gain in proportion to Λ_max."""
    method: str
    """ "finite difference": planned again with one more; "dual": the slope at fixed roles."""


def by_difference(problem: PlanProblem, rate: float, service: ServiceModel) -> tuple[ShadowPrice, ...]:
    """Two clusters: the exact search again, with one more of each. `rate` is the plan's Λ_max."""
    found = []

    def add(resource: str, unit: str, changed: PlanProblem) -> None:
        gain = max(best_point(changed, service).lambda_max - rate, 0.0)
        found.append(ShadowPrice(resource, unit, gain, gain / rate if rate > 0 else 0.0, "finite difference"))

    for prfaas in problem.prfaas:
        add(
            prfaas.name,
            "instance",
            replace(problem, prfaas=(replace(prfaas, instances=prfaas.instances + 1),)),
        )
    for pd in problem.pd:
        add(pd.name, "instance", replace(problem, pd=(replace(pd, instances=pd.instances + 1),)))
    for link in problem.links:
        faster = replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s + _GBIT)
        links = tuple(faster if other == link else other for other in problem.links)
        add(link.name, "Gbit/s", replace(problem, links=links))
    return tuple(found)


def by_duals(problem: PlanProblem, plan: NetworkPlan) -> tuple[ShadowPrice, ...]:
    """The general case: the programme's duals at the chosen roles. A PD instance takes the role that pays more."""
    rate, duals = plan.point.lambda_max, plan.prices
    found = []

    def add(resource: str, unit: str, gain: float) -> None:
        gain = max(gain, 0.0)
        found.append(ShadowPrice(resource, unit, gain, gain / rate if rate > 0 else 0.0, "dual"))

    for prfaas in problem.prfaas:
        add(prfaas.name, "instance", duals.get(("prefill", prfaas.name), 0.0))
    for pd in problem.pd:
        gains = [duals.get((kind, pd.name), 0.0) for kind in ("prefill", "decode")]
        add(pd.name, "instance", max(gains))
    for link in problem.links:
        add(link.name, "Gbit/s", duals.get(("link", link.name), 0.0) * _GBIT)
    return tuple(found)


# A smaller gain is not worth a second cluster.
_WORTH_IT = 1.01
_MOST_NAMES = 3
_BOUND: dict[StageKind, str] = {
    "prfaas prefill": "Prefill-bound",
    "pd prefill": "Prefill-bound",
    "pd decode": "Decode-bound",
    "link": "Network-bound",
}


def verdict_of(
    problem: PlanProblem,
    optimum: OperatingPoint,
    *,
    ratio: float | None,
    equal_cost_ratio: float | None,
    egress_per_hour: float,
    break_even_per_gb: float | None,
    unlimited_rate: float,
) -> str:
    """What the plan comes to: the limit, the gain, what the links would have to be, and what egress may cost.

    The optimum's links must have their `needed_bits_per_s`.
    """
    if optimum.lambda_max <= 0:
        return (
            "Impossible: no request gets through; there must be an instance for prefill and one for decode."
        )
    gain = _gain(problem, ratio, equal_cost_ratio, egress_per_hour)
    if gain and egress_per_hour > 0 and break_even_per_gb is not None:
        gain += f" The advantage is gone where egress costs {break_even_per_gb:.3g} per GB."
    return f"{_limit(optimum, unlimited_rate)} {gain}".strip()


def _limit(optimum: OperatingPoint, unlimited_rate: float) -> str:
    rate = optimum.lambda_max
    if unlimited_rate > rate * NETWORK_BOUND and (link := _tightest(optimum)) is not None:
        return (
            f"Network-bound: link {link.name} has {format_bits_per_s(link.bandwidth_bits_per_s)}, and this model on "
            f"this hardware needs {format_bits_per_s(link.needed_bits_per_s or 0.0)}; {rate:.3g} requests/s of a "
            f"possible {unlimited_rate:.3g} get through."
        )
    kinds = {stage.kind for stage in optimum.stages if stage.name in optimum.binding}
    bound = "Balanced" if len(kinds) > 1 else _BOUND[kinds.pop()]
    used = ""
    if optimum.links:
        fullest = max(optimum.links, key=lambda link: link.utilisation)
        used = f"; link {fullest.name} is {fullest.utilisation:.0%} full"
    return f"{bound}: {rate:.3g} requests/s, limited by {_names(optimum.binding)}{used}."


def _tightest(optimum: OperatingPoint) -> LinkUse | None:
    """The link that is most short of what it needs; None if none is."""
    short = [link for link in optimum.links if (link.needed_bits_per_s or 0.0) > link.bandwidth_bits_per_s]
    return max(
        short, key=lambda link: (link.needed_bits_per_s or 0.0) / link.bandwidth_bits_per_s, default=None
    )


def _names(names: tuple[str, ...]) -> str:
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
    return " and ".join(names)


def _gain(
    problem: PlanProblem, ratio: float | None, equal_cost_ratio: float | None, egress_per_hour: float
) -> str:
    if not problem.prfaas or ratio is None:
        return ""
    at_cost = "" if equal_cost_ratio is None else f", {equal_cost_ratio:.2f} times at equal cost"
    if at_cost and egress_per_hour > 0:
        at_cost += f" with egress at {egress_per_hour:.3g} per hour"
    factor = f"{ratio:.2f} times the throughput of a homogeneous cluster with as many GPUs{at_cost}"
    judged = equal_cost_ratio if equal_cost_ratio is not None else ratio
    return f"{'Worth it' if judged > _WORTH_IT else 'Not worth it'}: {factor}."


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another way to spend the same GPUs, or the same money."""

    label: str
    point: OperatingPoint
    instances: int
    gpus: int
    hardware: str
    cost_ratio: float | None
    """The deployment's cost over the baseline's, egress included."""


def homogeneous(
    problem: PlanProblem, per_hour: float | None, service: ServiceModel = "mean length"
) -> Baseline:
    """As many GPUs as the deployment has, all of a PD cluster's hardware in one PD cluster with the best split.

    With PD clusters of several kinds: of the kind that does best. GPUs beyond whole instances stay idle. `per_hour`:
    what the deployment costs.
    """
    gpus = sum(cluster.gpus for cluster in problem.clusters)
    found = [
        _pd_only(problem, pd, gpus // pd.gpus_per_instance, "same number of GPUs, PD only", per_hour, service)
        for pd in _kinds(problem)
    ]
    return max(found, key=lambda baseline: baseline.point.lambda_max)


def homogeneous_at_equal_cost(
    problem: PlanProblem,
    same_gpus: Baseline,
    per_hour: float | None,
    service: ServiceModel = "mean length",
) -> Baseline | None:
    """As many whole PD instances as the deployment's money buys, that for egress included; None without prices.

    The hardware is that of `same_gpus`. `per_hour`: what the deployment costs.
    """
    if per_hour is None:
        return None
    pd = next(pd for pd in problem.pd if pd.hardware == same_gpus.hardware)
    price = problem.prices[pd.hardware] * pd.gpus_per_instance
    if price <= 0:
        return None
    instances = math.floor(per_hour / price + 1e-9)
    return _pd_only(problem, pd, max(instances, 1), "same cost, PD only", per_hour, service)


def naive(
    problem: PlanProblem, per_hour: float | None, service: ServiceModel = "mean length"
) -> Baseline | None:
    """All prefill on PrfaaS clusters and all PD instances decode, without regard to length (section 4.3.3).

    `per_hour`: what the deployment costs at its optimum. None if no PrfaaS cluster has a link to some PD cluster.
    """
    linked = {link.target for link in problem.links if link.source in {c.name for c in problem.prfaas}}
    if any(pd.name not in linked for pd in problem.pd):
        return None
    # With one PD cluster and own caches the equations say it all; otherwise loads are balanced over links.
    point = evaluate(problem, 0.0, 0, service) if problem.is_two_cluster else naive_network(problem, service)
    if point is None:
        return None
    gpus = sum(cluster.gpus for cluster in problem.clusters)
    hardware = "+".join(dict.fromkeys(cluster.hardware for cluster in problem.clusters))
    instances = sum(cluster.instances for cluster in problem.clusters)
    own_per_hour = cost_per_hour(problem, point)
    return Baseline(
        "all prefill on PrfaaS, no routing by length",
        point,
        instances,
        gpus,
        hardware,
        per_hour / own_per_hour if per_hour is not None and own_per_hour else None,
    )


def _kinds(problem: PlanProblem) -> list[PdCluster]:
    kinds: dict[tuple[str, int, object], PdCluster] = {}
    for pd in problem.pd:
        kinds.setdefault((pd.hardware, pd.gpus_per_instance, pd.prefill_s), pd)
    return list(kinds.values())


def _pd_only(
    problem: PlanProblem,
    pd: PdCluster,
    instances: int,
    label: str,
    per_hour: float | None,
    service: ServiceModel,
) -> Baseline:
    alone = replace(problem, prfaas=(), pd=(replace(pd, instances=instances),), links=())
    point = best_point(alone, service)
    alone_per_hour = instances_per_hour(alone)
    ratio = per_hour / alone_per_hour if per_hour is not None and alone_per_hour else None
    return Baseline(label, point, instances, instances * pd.gpus_per_instance, pd.hardware, ratio)
