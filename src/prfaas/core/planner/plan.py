"""The planner's answer, and how it is made of the parts."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from prfaas.core.planner.comparisons import (
    NETWORK_BOUND,
    Baseline,
    ShadowPrice,
    by_difference,
    by_duals,
    homogeneous,
    homogeneous_at_equal_cost,
    naive,
    verdict_of,
)
from prfaas.core.planner.cost import (
    CheapestOperation,
    Cost,
    break_even_per_gb,
    cheapest_operation,
    cost_at,
    cost_per_hour,
    egress_per_hour,
)
from prfaas.core.planner.loads import pools_of
from prfaas.core.planner.network import NetworkPlan, best_network
from prfaas.core.planner.operating_point import OperatingPoint, ServiceModel
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.planner.ttft import PrefillPoolLoad, TtftEstimate, queueing_ttft
from prfaas.core.planner.two_clusters import best_point, split_of

Method = Literal["exact search", "linear programme"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The best way to operate a deployment, what limits it, and how it compares."""

    name: str
    method: Method
    service_model: ServiceModel
    optimum: OperatingPoint
    homogeneous: Baseline
    homogeneous_equal_cost: Baseline | None
    naive: Baseline | None
    ratio_to_homogeneous: float | None
    """Λ_max over that of the same number of GPUs without PrfaaS."""
    ratio_to_naive: float | None
    equal_cost_ratio: float | None
    """`ratio_to_homogeneous` divided by the ratio of costs, egress included."""
    egress_break_even_per_gb: float | None
    """The price of egress, the same on all links, at which `equal_cost_ratio` would be 1; 0 where it is below 1 even
    if egress is free; None without prices or egress."""
    cheapest: CheapestOperation | None
    """Where a request costs the least; None if egress has no price, and for more than two clusters."""
    lambda_max_by_length: float
    """The best throughput if a stage's time is E[T(L)], not the paper's T(E[L]): the more cautious number."""
    lambda_max_unlimited_links: float
    bound_gap: float
    """How far above `optimum.lambda_max` the true optimum may be, in proportion; 0 for exact search."""
    shadow_prices: tuple[ShadowPrice, ...]
    cost: Cost | None
    ttft_estimate: TtftEstimate
    verdict: str

    @property
    def is_network_bound(self) -> bool:
        """True if faster links alone would raise lambda_max by more than 0.1 %."""
        return self.lambda_max_unlimited_links > self.optimum.lambda_max * NETWORK_BOUND

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; the optimum's and the baselines' fields lie flat in theirs."""
        optimum = self.optimum
        return {
            "name": self.name,
            "verdict": self.verdict,
            "method": self.method,
            "service_model": self.service_model,
            "optimum": optimum.to_json(),
            "homogeneous": _baseline(self.homogeneous),
            "homogeneous_equal_cost": _baseline(self.homogeneous_equal_cost),
            "naive": _baseline(self.naive),
            "ratio_to_homogeneous": self.ratio_to_homogeneous,
            "ratio_to_naive": self.ratio_to_naive,
            "equal_cost_ratio": self.equal_cost_ratio,
            "egress_break_even_per_gb": self.egress_break_even_per_gb,
            "cheapest": _cheapest(self.cheapest),
            "lambda_max_by_length": self.lambda_max_by_length,
            "lambda_max_unlimited_links": self.lambda_max_unlimited_links,
            "network_bound": self.is_network_bound,
            "bound_gap": self.bound_gap,
            "binding": list(optimum.binding),
            "shadow_prices": [asdict(price) for price in self.shadow_prices],
            "cost": asdict(self.cost) if self.cost else None,
            "ttft_estimate": asdict(self.ttft_estimate),
        }


def _baseline(baseline: Baseline | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    described = {
        "label": baseline.label,
        "instances": baseline.instances,
        "gpus": baseline.gpus,
        "hardware": baseline.hardware,
        "cost_ratio": baseline.cost_ratio,
    }
    return {**described, **baseline.point.to_json()}


def _cheapest(cheapest: CheapestOperation | None) -> dict[str, Any] | None:
    return None if cheapest is None else {**cheapest.point.to_json(), "cost": asdict(cheapest.cost)}


def make_plan(problem: PlanProblem, service: ServiceModel = "mean length") -> Plan:
    """The best roles and routes, what limits them, and how they compare.

    One PrfaaS and one PD cluster are searched exactly, more clusters by the linear programme.

    Args:
        problem: What to plan for.
        service: How long a stage works on what it gets: T(E[L]) as in the paper, or E[T(L)].

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
    per_hour, egress = cost_per_hour(problem, optimum), egress_per_hour(problem, optimum)
    same_gpus = homogeneous(problem, per_hour, service)
    base_rate = same_gpus.point.lambda_max
    ratio = rate / base_rate if base_rate > 0 else None
    equal_cost = break_even = None
    if ratio is not None and per_hour is not None and same_gpus.cost_ratio:
        equal_cost = ratio / same_gpus.cost_ratio
        break_even = break_even_per_gb(problem, optimum, ratio * per_hour / same_gpus.cost_ratio)
    naive_baseline = naive(problem, per_hour, service)
    naive_rate = naive_baseline.point.lambda_max if naive_baseline else 0.0
    pools = network.pools if network else _pools(problem, optimum)
    return Plan(
        name=problem.name,
        method="linear programme" if network else "exact search",
        service_model=service,
        optimum=optimum,
        homogeneous=same_gpus,
        homogeneous_equal_cost=homogeneous_at_equal_cost(problem, same_gpus, per_hour, service),
        naive=naive_baseline,
        ratio_to_homogeneous=ratio,
        ratio_to_naive=rate / naive_rate if naive_rate > 0 else None,
        equal_cost_ratio=equal_cost,
        egress_break_even_per_gb=break_even,
        cheapest=cheapest_operation(problem, service),
        lambda_max_by_length=by_length,
        lambda_max_unlimited_links=max(unlimited.lambda_max, rate),
        bound_gap=network.bound_gap if network else 0.0,
        shadow_prices=by_duals(problem, network) if network else by_difference(problem, rate, service),
        cost=cost_at(problem, optimum),
        ttft_estimate=queueing_ttft(pools, rate, problem.load),
        verdict=verdict_of(
            problem,
            optimum,
            ratio=ratio,
            equal_cost_ratio=equal_cost,
            egress_per_hour=egress,
            break_even_per_gb=break_even,
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


def _pools(problem: PlanProblem, optimum: OperatingPoint) -> tuple[PrefillPoolLoad, ...]:
    split = split_of(problem, optimum.cache_policy, "mean length")
    assert split is not None
    length = problem.workload.lengths.high
    if optimum.threshold_tokens is not None:
        length = optimum.threshold_tokens / split.own_share
    return pools_of(split, length, optimum.n_prefill)
