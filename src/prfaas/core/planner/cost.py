"""Costs of an operating point, egress included."""

from dataclasses import dataclass

from prfaas.core.planner.operating_point import OperatingPoint
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.units import BITS_PER_BYTE, GB, SECONDS_PER_HOUR

_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs at Λ_max, in the currency of the prices."""

    per_hour: float
    """Of instances and egress together."""
    per_million_tokens: float
    """Of prompts and answers."""
    per_million_output_tokens: float
    """Of answers alone."""
    per_million_requests: float
    egress_per_hour: float
    """The part of `per_hour` for bytes over links."""


def instances_per_hour(problem: PlanProblem) -> float | None:
    """Σ GPUs × price, None if a price is missing."""
    total = 0.0
    for cluster in problem.clusters:
        price = problem.prices.get(cluster.hardware)
        if price is None:
            return None
        total += cluster.gpus * price
    return total


def gb_per_hour(bits_per_s: float) -> float:
    """Units of 10^9 bytes, in which egress is sold."""
    return bits_per_s / BITS_PER_BYTE / GB * SECONDS_PER_HOUR


def egress_per_hour(problem: PlanProblem, point: OperatingPoint) -> float:
    """Σ over links of what they carry at the operating point × price."""
    prices = {link.name: link.egress_per_gb for link in problem.links}
    return sum((gb_per_hour(link.egress_bits_per_s) * prices[link.name] for link in point.links), 0.0)


def cost_per_hour(problem: PlanProblem, point: OperatingPoint) -> float | None:
    """Of instances and egress; None if the price of an instance is missing."""
    instances = instances_per_hour(problem)
    return None if instances is None else instances + egress_per_hour(problem, point)


def cost_at(problem: PlanProblem, point: OperatingPoint) -> Cost | None:
    """The cost of an operating point; None without prices or throughput."""
    per_hour = cost_per_hour(problem, point)
    if per_hour is None or point.lambda_max <= 0:
        return None
    workload = problem.workload
    per_request = per_hour / SECONDS_PER_HOUR / point.lambda_max
    tokens = workload.lengths.mean() + workload.output_tokens
    return Cost(
        per_hour,
        per_request / tokens * _MILLION,
        per_request / workload.output_tokens * _MILLION,
        per_request * _MILLION,
        egress_per_hour(problem, point),
    )


def break_even_per_gb(
    problem: PlanProblem, point: OperatingPoint, same_throughput_per_hour: float
) -> float | None:
    """The price of egress, the same on all links, from which on the operating point has no advantage.

    It is (C' − C) / G. C': what the same throughput costs without PrfaaS. C: what the instances cost. G: GB per hour.

    Args:
        problem: What is operated.
        point: How.
        same_throughput_per_hour: C'.

    Returns:
        0 where it has no advantage even if egress is free; None without prices of instances, or without egress.
    """
    instances, gb = instances_per_hour(problem), gb_per_hour(point.egress_bits_per_s)
    if instances is None or gb <= 0:
        return None
    return max(same_throughput_per_hour - instances, 0.0) / gb
