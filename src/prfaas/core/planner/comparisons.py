"""Baselines of a plan: the fleet as it stands, as many GPUs, the same money, no routing by length."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from prfaas.core.planner.cost import Cost, cost_at, cost_per_hour, instances_per_hour
from prfaas.core.planner.network import NetworkPlan, naive_network
from prfaas.core.planner.operating_point import OperatingPoint, ServiceModel
from prfaas.core.planner.problem import MOST_INSTANCES, PdCluster, PlanError, PlanProblem
from prfaas.core.planner.ttft import TtftEstimate
from prfaas.core.planner.ttft_target import Operation, best_within_target, operation_at
from prfaas.core.planner.two_clusters import evaluate

_GBIT = 1e9


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """The gain in Λ_max from one more unit of a resource."""

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
        gain = max(best_within_target(changed, service).point.lambda_max - rate, 0.0)
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
    cost: Cost | None = None
    """At Λ_max."""
    ttft_estimate: TtftEstimate | None = None
    """TTFT with waiting, at the problem's load of its own Λ_max."""
    ttft_same_traffic: TtftEstimate | None = None
    """TTFT with waiting under the deployment's own traffic: the load of the deployment's Λ_max."""
    rate_within_target: float | None = None
    """The highest rate at which it meets the TTFT target; None without a target."""
    keeps_target: bool = True
    """True if it meets the target at the problem's load of its own Λ_max."""

    @property
    def comparable_rate(self) -> float:
        """The Λ_max to compare by; where it misses the target, the highest one whose load meets it."""
        rate, estimate = self.point.lambda_max, self.ttft_estimate
        if self.keeps_target or self.rate_within_target is None or estimate is None or rate <= 0:
            return rate
        return self.rate_within_target / estimate.load

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; the fields of `point` lie flat among its own."""
        document = asdict(self)
        del document["point"]
        if self.rate_within_target is None:
            document["keeps_target"] = None
        return document | self.point.to_json()


@dataclass(frozen=True, slots=True)
class Rival:
    """The deployment at its optimum, which baselines are measured against."""

    per_hour: float | None
    """Its cost; None without prices."""
    requests_per_s: float = 0.0
    """The traffic that it is planned for."""


NOBODY = Rival(None)
"""A rival without cost and traffic."""


def homogeneous(problem: PlanProblem, rival: Rival = NOBODY, service: ServiceModel = "by length") -> Baseline:
    """The homogeneous baseline: as many GPUs, all of a PD cluster's hardware, in one PD cluster with the best split.

    With PD clusters of several kinds: of the kind that does best. GPUs beyond whole instances stay idle.
    """
    gpus = sum(cluster.gpus for cluster in problem.clusters)
    found = [
        pd_only(problem, pd, gpus // pd.gpus_per_instance, "same number of GPUs, PD only", rival, service)
        for pd in _kinds(problem)
    ]
    return max(found, key=lambda baseline: baseline.comparable_rate)


def homogeneous_at_equal_cost(
    problem: PlanProblem, same_gpus: Baseline, rival: Rival, service: ServiceModel = "by length"
) -> Baseline | None:
    """The baseline of as many whole PD instances as the deployment's money buys, egress included; None without prices.

    The hardware is that of `same_gpus`.
    """
    price = _instance_price(problem, same_gpus)
    if rival.per_hour is None or price is None:
        return None
    bought = rival.per_hour / price
    if not bought <= MOST_INSTANCES:
        raise PlanError(
            f"prices: the {rival.per_hour:.3g} per hour that the deployment costs, egress included, would buy "
            f"{bought:.3g} instances at {price:.3g}; at most {MOST_INSTANCES:,} are planned"
        )
    instances = max(math.floor(bought + 1e-9), 1)
    return pd_only(problem, _kind_of(problem, same_gpus), instances, "same cost, PD only", rival, service)


def fleet(problem: PlanProblem, rival: Rival, service: ServiceModel = "by length") -> Baseline | None:
    """The PD clusters as they stand, with the best roles and without any PrfaaS cluster.

    None without a PrfaaS cluster, and where the PD clusters alone can't serve a request.
    """
    if not problem.prfaas:
        return None
    names = {pd.name for pd in problem.pd}
    links = tuple(link for link in problem.links if {link.source, link.target} <= names)
    alone = replace(problem, prfaas=(), links=links)
    try:
        operation = best_within_target(alone, service)
    except PlanError:
        return None
    return _baseline("the PD clusters as they stand", operation, rival)


def naive(problem: PlanProblem, rival: Rival, service: ServiceModel = "by length") -> Baseline | None:
    """All prefill on PrfaaS clusters and all PD instances decode, without regard to length (section 4.3.3).

    None if no PrfaaS cluster has a link to some PD cluster.
    """
    linked = {link.target for link in problem.links if link.source in {c.name for c in problem.prfaas}}
    if any(pd.name not in linked for pd in problem.pd):
        return None
    # With one PD cluster and own caches the equations say it all; otherwise loads are balanced over links.
    if problem.is_two_cluster:
        operation = operation_at(problem, evaluate(problem, 0.0, 0, service))
    else:
        found = naive_network(problem)
        if found is None:
            return None
        point, work = found
        operation = Operation(problem, point, work)
    return _baseline("all prefill on PrfaaS, no routing by length", operation, rival)


def pd_only(
    problem: PlanProblem,
    pd: PdCluster,
    instances: int,
    label: str,
    rival: Rival,
    service: ServiceModel,
) -> Baseline:
    """A PD cluster of `instances` like a given one's, alone, with the best roles."""
    alone = replace(problem, prfaas=(), pd=(replace(pd, instances=instances),), links=())
    return _baseline(label, best_within_target(alone, service), rival)


def _baseline(label: str, operation: Operation, rival: Rival) -> Baseline:
    problem, point = operation.problem, operation.point
    own_per_hour = cost_per_hour(problem, point)
    clusters = problem.clusters
    target = problem.ttft_target
    return Baseline(
        label,
        point,
        sum(cluster.instances for cluster in clusters),
        sum(cluster.gpus for cluster in clusters),
        "+".join(dict.fromkeys(cluster.hardware for cluster in clusters)),
        cost_ratio=rival.per_hour / own_per_hour if rival.per_hour is not None and own_per_hour else None,
        ttft_estimate=operation.estimate(problem.load),
        ttft_same_traffic=operation.estimate(rival.requests_per_s / point.lambda_max)
        if point.lambda_max > 0
        else None,
        rate_within_target=None if target is None else operation.rate_within(target),
        keeps_target=operation.keeps_target,
        cost=cost_at(problem, point),
    )


def equal_cost_ratio(rate: float, baseline: Baseline | None) -> float | None:
    """Throughput per money over that of the baseline at equal cost, whose whole instances may cost a little less."""
    if baseline is None or baseline.cost_ratio is None or baseline.comparable_rate <= 0:
        return None
    return rate / baseline.comparable_rate / baseline.cost_ratio


def break_even_per_hour(
    problem: PlanProblem, rate: float, same_gpus: Baseline, service: ServiceModel = "by length"
) -> float | None:
    """The cost per hour at which a deployment of this Λ_max has an `equal_cost_ratio` of 1, egress included.

    The money buys whole instances of the baseline, and their throughput per instance depends on how well so many can
    be divided: the least cost above the instances' own from which on the baseline does as much for the money.

    Returns:
        What the instances cost alone where the baseline already does as much for that; None without prices.
    """
    price, own = _instance_price(problem, same_gpus), instances_per_hour(problem)
    if price is None or own is None or same_gpus.comparable_rate <= 0:
        return None
    pd = _kind_of(problem, same_gpus)
    count = max(math.floor(own / price + 1e-9), 1)
    while True:
        alone = replace(problem, prfaas=(), pd=(replace(pd, instances=count),), links=())
        other = best_within_target(alone, service).comparable_rate
        even = count * price * rate / other if other > 0 else math.inf
        if even < (count + 1) * price:
            return max(even, count * price, own)
        count += 1


def _instance_price(problem: PlanProblem, same_gpus: Baseline) -> float | None:
    """Per hour; None without a price."""
    pd = _kind_of(problem, same_gpus)
    price = problem.prices.get(pd.hardware, 0.0) * pd.gpus_per_instance
    return price if price > 0 else None


def _kind_of(problem: PlanProblem, baseline: Baseline) -> PdCluster:
    return next(pd for pd in problem.pd if pd.hardware == baseline.hardware)


def _kinds(problem: PlanProblem) -> list[PdCluster]:
    kinds: dict[tuple[str, int, object], PdCluster] = {}
    for pd in problem.pd:
        kinds.setdefault((pd.hardware, pd.gpus_per_instance, pd.prefill_s), pd)
    return list(kinds.values())
