"""What a deployment costs, per hour and per token."""

from prfaas.planner.plan import Cost
from prfaas.planner.plan_problem import PlanProblem

_SECONDS_PER_HOUR = 3600.0
_MILLION = 1e6


def cost_per_hour(problem: PlanProblem) -> float | None:
    """Σ GPUs × price, None if a price is missing."""
    total = 0.0
    for cluster in problem.clusters:
        price = problem.prices.get(cluster.hardware)
        if price is None:
            return None
        total += cluster.gpus * price
    return total


def cost_at(problem: PlanProblem, requests_per_s: float) -> Cost | None:
    """The cost at a throughput; None without prices or throughput."""
    per_hour = cost_per_hour(problem)
    if per_hour is None or requests_per_s <= 0:
        return None
    workload = problem.workload
    per_request = per_hour / _SECONDS_PER_HOUR / requests_per_s
    tokens = workload.lengths.mean() + workload.output_tokens
    return Cost(per_hour, per_request / tokens * _MILLION, per_request / workload.output_tokens * _MILLION)
