"""The verdict on a plan in a few sentences: its bottleneck, its gain, and the break-even price of egress."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prfaas.core.planner.comparisons import Baseline
from prfaas.core.planner.operating_point import LinkUse, StageKind
from prfaas.core.units import format_bits_per_s

if TYPE_CHECKING:
    from prfaas.core.planner.plan import Plan

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
class Limits:
    """What limits a plan's optimum, whose links have their `needed_bits_per_s`."""

    plan: "Plan"

    @property
    def is_network_bound(self) -> bool:
        """True if faster links alone would raise Λ_max."""
        return self.plan.lambda_max_unlimited_links > self.plan.optimum.lambda_max * BOUND

    @property
    def is_latency_bound(self) -> bool:
        """True if the TTFT target costs throughput."""
        return (
            self.plan.ttft_target is not None
            and self.plan.keeps_target
            and (self.plan.lambda_max_without_target or 0.0) > self.plan.optimum.lambda_max * BOUND
        )

    @property
    def binding(self) -> tuple[str, ...]:
        """Stages that are full, links that are too narrow for the best plan, and the target if it costs throughput."""
        full = set(self.plan.optimum.binding)
        if self.is_network_bound:
            full |= {f"{link.name} link" for link in self.plan.optimum.links if _is_short(link)}
        stages = tuple(stage.name for stage in self.plan.optimum.stages if stage.name in full)
        return (*stages, TARGET) if self.is_latency_bound else stages

    def sentence(self) -> str:
        """The sentence on the bottleneck, and by how much it binds."""
        plan, target, estimate = self.plan, self.plan.ttft_target, self.plan.ttft_estimate
        rate, load = plan.optimum.lambda_max, estimate.load
        by = f"limited by {_names(self.binding)}"
        if target is not None and not plan.keeps_target:
            reached_s = estimate.mean_s if target.statistic == "mean" else estimate.p90_s
            missed = f"{target} at {load:.0%} load is missed, whatever threshold and roles"
            could = "" if reached_s is None else f" with {replace(target, seconds=reached_s)},"
            return f"Target missed: {missed}; {rate:.3g} requests/s are possible{could} {by}."
        if self.is_latency_bound:
            return (
                f"Latency-bound: {rate:.3g} requests/s with {target} at {load:.0%} load, "
                f"{plan.lambda_max_without_target:.3g} without that target; {by}."
            )
        kept = "" if target is None else f" The target, {target} at {load:.0%} load, is kept."
        short = max(filter(_is_short, plan.optimum.links), key=_shortness, default=None)
        if self.is_network_bound and short is not None:
            return (
                f"Network-bound: link {short.name} has {format_bits_per_s(short.bandwidth_bits_per_s)}, and this "
                f"model on this hardware needs {format_bits_per_s(short.needed_bits_per_s or 0.0)}; {rate:.3g} "
                f"requests/s of a possible {plan.lambda_max_unlimited_links:.3g} get through, {by}.{kept}"
            )
        kinds = {stage.kind for stage in plan.optimum.stages if stage.name in self.binding}
        bound = "Balanced" if len(kinds) > 1 else _KINDS[kinds.pop()]
        used = ""
        if plan.optimum.links:
            fullest = max(plan.optimum.links, key=lambda link: link.utilisation)
            used = f"; link {fullest.name} is {fullest.utilisation:.0%} full"
        return f"{bound}: {rate:.3g} requests/s, {by}{used}.{kept}"


def _is_short(link: LinkUse) -> bool:
    return (link.needed_bits_per_s or 0.0) > link.bandwidth_bits_per_s


def _shortness(link: LinkUse) -> float:
    return (link.needed_bits_per_s or 0.0) / link.bandwidth_bits_per_s


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of a deployment over others."""

    homogeneous: Baseline
    """As many GPUs."""
    at_equal_cost: Baseline | None
    ratio: float | None
    """Of the throughputs; None without PrfaaS clusters, or where one of them is 0."""
    equal_cost_ratio: float | None
    egress_per_hour: float
    break_even_per_gb: float | None

    def sentence(self, *, has_prfaas: bool) -> str:
        """The sentence on whether it pays."""
        if not has_prfaas:
            return ""
        if self.ratio is None:
            if self.homogeneous.comparable_rate > 0 or self.homogeneous.keeps_target:
                return ""
            return "A homogeneous cluster with as many GPUs never keeps the target."
        at_cost = (
            "" if self.equal_cost_ratio is None else f", {self.equal_cost_ratio:.2f} times at equal cost"
        )
        if at_cost and self.egress_per_hour > 0:
            at_cost += f" with egress at {self.egress_per_hour:.3g} per hour"
        factor = f"{self.ratio:.2f} times the throughput of a homogeneous cluster with as many GPUs{at_cost}"
        judged = self.equal_cost_ratio if self.equal_cost_ratio is not None else self.ratio
        text = f"{'Worth it' if judged > _WORTH_IT else 'Not worth it'}: {factor}."
        if self.egress_per_hour > 0 and self.break_even_per_gb is not None:
            text += (
                f" The advantage is gone where egress costs {self.break_even_per_gb:.3g} per GB."
                if self.break_even_per_gb > 0
                else " It would not be with free egress, either."
            )
        return text


def verdict_of(limits: Limits, gain: Gain, *, has_prfaas: bool) -> str:
    """The limit, the gain, what the links would have to be, and what egress may cost."""
    if limits.plan.optimum.lambda_max <= 0:
        return (
            "Impossible: no request gets through; there must be an instance for prefill and one for decode."
        )
    return f"{limits.sentence()} {gain.sentence(has_prfaas=has_prfaas)}".strip()


def _names(names: tuple[str, ...]) -> str:
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
    return " and ".join(names)
