"""The gain of a plan over others, in a sentence: whether it pays, and the break-even price of egress."""

from dataclasses import dataclass

from prfaas.core.planner.comparisons import Baseline

# A smaller gain is not worth a second cluster.
_WORTH_IT = 1.01


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
