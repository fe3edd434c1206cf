"""From a problem to its plan."""

import math
from dataclasses import replace

from prfaas.core.planner.comparisons import (
    by_difference,
    by_duals,
    cost_at,
    homogeneous,
    homogeneous_at_equal_cost,
    naive,
    verdict_of,
)
from prfaas.core.planner.network import NetworkPlan, best_network
from prfaas.core.planner.operating_point import OperatingPoint, ServiceModel
from prfaas.core.planner.plan import Plan
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.planner.ttft import Pool, queueing_ttft
from prfaas.core.planner.two_clusters import best_point, pools_of, split_of


def make_plan(problem: PlanProblem, service: ServiceModel = "mean length") -> Plan:
    """The best roles and routes, what limits them, and how they compare.

    One PrfaaS and one PD cluster are searched exactly, more clusters by the linear programme. `service` says how
    long a stage works on what it gets: T(E[L]) as in the paper, or E[T(L)].

    Raises:
        PlanError: the solver gave up. Errors of the problem's curves (a length they don't cover) pass through.
    """
    network: NetworkPlan | None = None
    if problem.is_two_cluster:
        optimum = best_point(problem, service)
    else:
        network = best_network(problem, service)
        optimum = network.point
    rate = optimum.lambda_max
    unlimited = _unlimited(problem, service)
    needed = {link.name: link.egress_bits_per_s for link in unlimited.links}
    optimum = replace(
        optimum, links=tuple(replace(link, needed_bits_per_s=needed[link.name]) for link in optimum.links)
    )
    by_length = rate if service == "by length" else best_operation(problem, "by length").lambda_max
    same_gpus = homogeneous(problem, service)
    base_rate = same_gpus.point.lambda_max
    ratio = rate / base_rate if base_rate > 0 else None
    equal_cost = ratio / same_gpus.cost_ratio if ratio is not None and same_gpus.cost_ratio else None
    naive_baseline = naive(problem, service)
    naive_rate = naive_baseline.point.lambda_max if naive_baseline else 0.0
    pools = network.pools if network else _pools(problem, optimum)
    return Plan(
        name=problem.name,
        method="linear programme" if network else "exact search",
        service_model=service,
        optimum=optimum,
        homogeneous=same_gpus,
        homogeneous_equal_cost=homogeneous_at_equal_cost(problem, same_gpus, service),
        naive=naive_baseline,
        ratio_to_homogeneous=ratio,
        ratio_to_naive=rate / naive_rate if naive_rate > 0 else None,
        equal_cost_ratio=equal_cost,
        lambda_max_by_length=by_length,
        lambda_max_unlimited_links=max(unlimited.lambda_max, rate),
        bound_gap=network.bound_gap if network else 0.0,
        shadow_prices=by_duals(problem, network) if network else by_difference(problem, rate, service),
        cost=cost_at(problem, rate),
        ttft_estimate=queueing_ttft(pools, rate, problem.load),
        verdict=verdict_of(
            problem,
            optimum,
            ratio=ratio,
            equal_cost_ratio=equal_cost,
            unlimited_rate=unlimited.lambda_max,
        ),
    )


def best_operation(problem: PlanProblem, service: ServiceModel = "mean length") -> OperatingPoint:
    """The optimum alone, without anything to compare it with: what `make_plan(...).optimum` has."""
    if problem.is_two_cluster:
        return best_point(problem, service)
    return best_network(problem, service).point


def _unlimited(problem: PlanProblem, service: ServiceModel) -> OperatingPoint:
    """The optimum if no link were a limit."""
    links = tuple(replace(link, bandwidth_bits_per_s=math.inf) for link in problem.links)
    return best_operation(replace(problem, links=links), service)


def _pools(problem: PlanProblem, optimum: OperatingPoint) -> tuple[Pool, ...]:
    split = split_of(problem, optimum.cache_policy, "mean length")
    assert split is not None
    length = problem.workload.lengths.high
    if optimum.threshold_tokens is not None:
        length = optimum.threshold_tokens / split.own_share
    return pools_of(split, length, optimum.n_prefill)
