"""What the same GPUs, or the same money, would do without PrfaaS, and with it but without routing by length."""

import math
from dataclasses import replace

from prfaas.planner.cost import cost_per_hour
from prfaas.planner.network import naive_network
from prfaas.planner.plan import Baseline
from prfaas.planner.plan_problem import PdCluster, PlanProblem
from prfaas.planner.point import ServiceModel
from prfaas.planner.search import best_point, evaluate


def homogeneous(problem: PlanProblem, service: ServiceModel = "mean length") -> Baseline:
    """As many GPUs as the deployment has, all of a PD cluster's hardware in one PD cluster with the best split.

    With PD clusters of several kinds: of the kind that does best. GPUs beyond whole instances stay idle.
    """
    gpus = sum(cluster.gpus for cluster in problem.clusters)
    found = [
        _pd_only(problem, pd, gpus // pd.gpus_per_instance, "same number of GPUs, PD only", service)
        for pd in _kinds(problem)
    ]
    return max(found, key=lambda baseline: baseline.point.lambda_max)


def homogeneous_at_equal_cost(
    problem: PlanProblem, same_gpus: Baseline, service: ServiceModel = "mean length"
) -> Baseline | None:
    """As many whole PD instances as the deployment's money buys; None without prices.

    The hardware is that of `same_gpus`.
    """
    cost = cost_per_hour(problem)
    if cost is None:
        return None
    pd = next(pd for pd in problem.pd if pd.hardware == same_gpus.hardware)
    price = problem.prices[pd.hardware] * pd.gpus_per_instance
    if price <= 0:
        return None
    instances = math.floor(cost / price + 1e-9)
    return _pd_only(problem, pd, max(instances, 1), "same cost, PD only", service)


def naive(problem: PlanProblem, service: ServiceModel = "mean length") -> Baseline | None:
    """All prefill on PrfaaS clusters and all PD instances decode, without regard to length (section 4.3.3).

    None if some PD cluster has no PrfaaS cluster with a link to it.
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
    cost = cost_per_hour(problem)
    return Baseline(
        "all prefill on PrfaaS, no routing by length",
        point,
        instances,
        gpus,
        hardware,
        1.0 if cost is not None else None,
    )


def _kinds(problem: PlanProblem) -> list[PdCluster]:
    kinds: dict[tuple[str, int, object], PdCluster] = {}
    for pd in problem.pd:
        kinds.setdefault((pd.hardware, pd.gpus_per_instance, pd.prefill_s), pd)
    return list(kinds.values())


def _pd_only(
    problem: PlanProblem, pd: PdCluster, instances: int, label: str, service: ServiceModel
) -> Baseline:
    alone = replace(problem, prfaas=(), pd=(replace(pd, instances=instances),), links=())
    point = best_point(alone, service)
    cost, alone_cost = cost_per_hour(problem), cost_per_hour(alone)
    ratio = cost / alone_cost if cost is not None and alone_cost else None
    return Baseline(label, point, instances, instances * pd.gpus_per_instance, pd.hardware, ratio)
