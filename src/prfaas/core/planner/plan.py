"""The planner's answer, and how it is made of the parts."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from prfaas.core.planner.comparisons import (
    Baseline,
    Rival,
    ShadowPrice,
    break_even_per_hour,
    by_difference,
    by_duals,
    equal_cost_ratio,
    fleet,
    homogeneous,
    homogeneous_at_equal_cost,
    naive,
)
from prfaas.core.planner.cost import (
    Cost,
    break_even_per_gb,
    cost_at,
    cost_per_hour,
)
from prfaas.core.planner.operating_point import LinkUse, OperatingPoint, ServiceModel, StageKind
from prfaas.core.planner.problem import PlanProblem, TtftTarget
from prfaas.core.planner.ttft import TtftEstimate
from prfaas.core.planner.ttft_target import best_within_target
from prfaas.core.units import format_bits_per_s

Method = Literal["exact search", "linear programme"]

BOUND = 1.001
"""Without a limit there must be more than this factor to say that it binds."""
TARGET = "TTFT target"

# A smaller gain is not worth a second cluster.
_WORTH_IT = 1.01
_MOST_NAMES = 3
_KINDS: dict[StageKind, str] = {
    "prfaas prefill": "Prefill-bound",
    "pd prefill": "Prefill-bound",
    "pd decode": "Decode-bound",
    "link": "Network-bound",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The best way to operate a deployment, what limits it, and how it compares."""

    name: str
    method: Method
    service_model: ServiceModel
    optimum: OperatingPoint
    fleet: Baseline | None
    """The PD clusters as they stand, without PrfaaS; None where there is no PrfaaS cluster."""
    homogeneous: Baseline
    homogeneous_equal_cost: Baseline | None
    naive: Baseline | None
    ratio_to_homogeneous: float | None
    """Λ_max over that of the same number of GPUs without PrfaaS."""
    ratio_to_naive: float | None
    equal_cost_ratio: float | None
    """Throughput per money, egress included, over that of `homogeneous_equal_cost`."""
    egress_break_even_per_gb: float | None
    """The price of egress, the same on all links, at which `equal_cost_ratio` would be 1; 0 where it is below 1 even
    if egress is free; None without prices or egress."""
    lambda_max_at_mean_length: float | None
    """The best throughput if a stage's time were T(E[L]), as in the paper: more than queues can carry. None for more
    clusters than the paper's two."""
    homogeneous_at_mean_length: float | None
    """The same of `homogeneous`."""
    lambda_max_unlimited_links: float
    bound_gap: float
    """How far above `optimum.lambda_max` the true optimum may be, in proportion; 0 for exact search."""
    shadow_prices: tuple[ShadowPrice, ...]
    cost: Cost | None
    ttft_estimate: TtftEstimate
    ttft_target: TtftTarget | None = None
    keeps_target: bool = True
    """Whether the optimum keeps it at the workload's load."""
    lambda_max_without_target: float | None = None
    """None without a target."""
    rate_within_target: float | None = None
    """The most requests per second at which the optimum keeps the target; None without one."""
    rest_estimate: TtftEstimate | None = None
    """Until decode instances can write the second token; None where first tokens come from them too."""

    @property
    def is_worth_it(self) -> bool:
        """Whether it does more than the same money, or without prices as many GPUs, without PrfaaS."""
        judged = self.equal_cost_ratio if self.equal_cost_ratio is not None else self.ratio_to_homogeneous
        return judged is not None and judged > _WORTH_IT

    @property
    def is_network_bound(self) -> bool:
        """True if faster links alone would raise Λ_max."""
        return self.lambda_max_unlimited_links > self.optimum.lambda_max * BOUND

    @property
    def is_latency_bound(self) -> bool:
        """True if the TTFT target costs throughput."""
        return (
            self.ttft_target is not None
            and self.keeps_target
            and (self.lambda_max_without_target or 0.0) > self.optimum.lambda_max * BOUND
        )

    @property
    def binding(self) -> tuple[str, ...]:
        """Stages that are full, links that are too narrow for the best plan, and the target if it costs throughput."""
        full = set(self.optimum.binding)
        if self.is_network_bound:
            full |= {f"{link.name} link" for link in self.optimum.links if _is_short(link)}
        stages = tuple(stage.name for stage in self.optimum.stages if stage.name in full)
        return (*stages, TARGET) if self.is_latency_bound else stages

    @property
    def verdict(self) -> str:
        """The limit, the gain, what the links would have to be, and what egress may cost."""
        if self.optimum.lambda_max <= 0:
            return "Impossible: no request gets through; there must be an instance for prefill and one for decode."
        return f"{self.bottleneck()} {self.gain()}".strip()

    def gain(self) -> str:
        """The sentence on whether PrfaaS pays; empty where there is none, or nothing to compare with."""
        if not self.optimum.n_prfaas:
            return ""
        if self.ratio_to_homogeneous is None:
            if self.homogeneous.comparable_rate > 0 or self.homogeneous.keeps_target:
                return ""
            return "A homogeneous cluster with as many GPUs never keeps the target."
        egress = self.cost.egress_per_hour if self.cost is not None else 0.0
        at_cost = (
            "" if self.equal_cost_ratio is None else f", {self.equal_cost_ratio:.2f} times at equal cost"
        )
        if at_cost and egress > 0:
            at_cost += f" with egress at {egress:.3g} per hour"
        ratio = f"{self.ratio_to_homogeneous:.2f} times the throughput"
        factor = f"{ratio} of a homogeneous cluster with as many GPUs{at_cost}"
        text = f"{'Worth it' if self.is_worth_it else 'Not worth it'}: {factor}."
        if egress > 0 and self.egress_break_even_per_gb is not None:
            text += (
                f" The advantage is gone where egress costs {self.egress_break_even_per_gb:.3g} per GB."
                if self.egress_break_even_per_gb > 0
                else " It would not be with free egress, either."
            )
        return text

    def bottleneck(self) -> str:
        """The sentence on the bottleneck, and by how much it binds."""
        target, estimate = self.ttft_target, self.ttft_estimate
        rate, load = self.optimum.lambda_max, estimate.load
        by = f"limited by {_names(self.binding)}"
        if target is not None and not self.keeps_target:
            reached_s = estimate.mean_s if target.statistic == "mean" else estimate.p90_s
            missed = f"{target} at {load:.0%} load is missed, whatever threshold and roles"
            could = "" if reached_s is None else f" with {replace(target, seconds=reached_s)},"
            return f"Target missed: {missed}; {rate:.3g} requests/s are possible{could} {by}."
        if self.is_latency_bound:
            return (
                f"Latency-bound: {rate:.3g} requests/s with {target} at {load:.0%} load, "
                f"{self.lambda_max_without_target:.3g} without that target; {by}."
            )
        kept = "" if target is None else f" The target, {target} at {load:.0%} load, is kept."
        short = max(filter(_is_short, self.optimum.links), key=_shortness, default=None)
        if self.is_network_bound and short is not None:
            return (
                f"Network-bound: link {short.name} has {format_bits_per_s(short.bandwidth_bits_per_s)}, and this "
                f"model on this hardware needs {format_bits_per_s(short.needed_bits_per_s or 0.0)}; {rate:.3g} "
                f"requests/s of a possible {self.lambda_max_unlimited_links:.3g} get through, {by}.{kept}"
            )
        kinds = {stage.kind for stage in self.optimum.stages if stage.name in self.binding}
        bound = "Balanced" if len(kinds) > 1 else _KINDS[kinds.pop()]
        used = ""
        if self.optimum.links:
            fullest = max(self.optimum.links, key=lambda link: link.utilisation)
            used = f"; link {fullest.name} is {fullest.utilisation:.0%} full"
        return f"{bound}: {rate:.3g} requests/s, {by}{used}.{kept}"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; the optimum's and the baselines' fields lie flat in theirs."""
        derived: dict[str, dict[str, Any]] = {
            "name": {"verdict": self.verdict},
            "lambda_max_unlimited_links": {"network_bound": self.is_network_bound},
            "bound_gap": {"binding": list(self.binding)},
        }
        document: dict[str, Any] = {}
        for name, value in asdict(self).items():
            own = getattr(self, name)
            document[name] = own.to_json() if isinstance(own, OperatingPoint | Baseline) else value
            document |= derived.get(name, {})
        if self.ttft_target is None:
            document["keeps_target"] = None
        if self.rest_estimate is None:
            del document["rest_estimate"]
        return document


def make_plan(problem: PlanProblem, service: ServiceModel = "by length") -> Plan:
    """The best roles and routes, what limits them, and how they compare.

    One PrfaaS and one PD cluster are searched exactly, more clusters by the linear programme. With a target for the
    TTFT the optimum, and everything that it is compared with, is the best that keeps it.

    Args:
        problem: What to plan for.
        service: How long a stage works on what it gets: E[T(L)], which is what queues feel, or T(E[L]) as in the paper.

    Raises:
        PlanError: the solver gave up. Errors of the problem's curves (a length they don't cover) pass through.
    """
    operation = best_within_target(problem, service)
    network = operation.network
    rate, target = operation.point.lambda_max, problem.ttft_target
    unlimited = _unlimited(problem, service)
    needed = {link.name: link.egress_bits_per_s for link in unlimited.links}
    optimum = replace(
        operation.point,
        links=tuple(replace(link, needed_bits_per_s=needed[link.name]) for link in operation.point.links),
    )
    rival = Rival(cost_per_hour(problem, optimum), problem.load * rate)
    same_gpus = homogeneous(problem, rival, service)
    same_cost = homogeneous_at_equal_cost(problem, same_gpus, rival, service)
    comparable = operation.comparable_rate
    has_rival = comparable > 0 and same_gpus.comparable_rate > 0
    at_equal_cost = equal_cost_ratio(comparable, same_cost) if has_rival else None
    naive_baseline = naive(problem, rival, service)
    naive_rate = naive_baseline.point.lambda_max if naive_baseline else 0.0
    without_target = rate
    if target is not None:
        without_target = best_operation(replace(problem, ttft_target=None), service).lambda_max
    return Plan(
        name=problem.name,
        method="linear programme" if network else "exact search",
        service_model=service,
        optimum=optimum,
        homogeneous=same_gpus,
        homogeneous_equal_cost=same_cost,
        naive=naive_baseline,
        ratio_to_homogeneous=comparable / same_gpus.comparable_rate if has_rival else None,
        ratio_to_naive=rate / naive_rate if naive_rate > 0 else None,
        equal_cost_ratio=at_equal_cost,
        egress_break_even_per_gb=None
        if at_equal_cost is None
        else _break_even(problem, optimum, comparable, same_gpus, service),
        lambda_max_at_mean_length=None if network else best_operation(problem, "mean length").lambda_max,
        homogeneous_at_mean_length=None
        if network
        else homogeneous(problem, service="mean length").point.lambda_max,
        lambda_max_unlimited_links=max(unlimited.lambda_max, rate),
        bound_gap=network.bound_gap if network else 0.0,
        shadow_prices=by_duals(problem, network) if network else by_difference(problem, rate, service),
        cost=cost_at(problem, optimum),
        ttft_estimate=operation.estimate(problem.load),
        fleet=fleet(problem, rival, service),
        ttft_target=target,
        keeps_target=operation.keeps_target,
        lambda_max_without_target=None if target is None else without_target,
        rate_within_target=None if target is None else operation.rate_within(target),
        rest_estimate=operation.rest_estimate(problem.load),
    )


def _break_even(
    problem: PlanProblem, optimum: OperatingPoint, rate: float, same_gpus: Baseline, service: ServiceModel
) -> float | None:
    per_hour = break_even_per_hour(problem, rate, same_gpus, service)
    return None if per_hour is None else break_even_per_gb(problem, optimum, per_hour)


def best_operation(problem: PlanProblem, service: ServiceModel = "by length") -> OperatingPoint:
    """The optimum alone, without anything to compare it with: what `make_plan(...).optimum` has."""
    return best_within_target(problem, service).point


def _unlimited(problem: PlanProblem, service: ServiceModel) -> OperatingPoint:
    """The optimum if no link were a limit."""
    links = tuple(replace(link, bandwidth_bits_per_s=math.inf) for link in problem.links)
    return best_operation(replace(problem, links=links), service)


def _is_short(link: LinkUse) -> bool:
    return (link.needed_bits_per_s or 0.0) > link.bandwidth_bits_per_s


def _shortness(link: LinkUse) -> float:
    return (link.needed_bits_per_s or 0.0) / link.bandwidth_bits_per_s


def _names(names: tuple[str, ...]) -> str:
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
    return " and ".join(names)
