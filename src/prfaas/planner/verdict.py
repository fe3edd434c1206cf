"""The plan in a sentence or two."""

from prfaas.planner.plan import NETWORK_BOUND
from prfaas.planner.plan_problem import PlanProblem
from prfaas.planner.point import LinkUse, OperatingPoint, StageKind
from prfaas.units import format_bits_per_s

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
    unlimited_rate: float,
) -> str:
    """What the plan comes to: the limit, the gain, and what the links would have to be.

    The optimum's links must have their `needed_bits_per_s`.
    """
    if optimum.lambda_max <= 0:
        return (
            "Impossible: no request gets through; there must be an instance for prefill and one for decode."
        )
    return f"{_limit(optimum, unlimited_rate)} {_gain(problem, ratio, equal_cost_ratio)}".strip()


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


def _gain(problem: PlanProblem, ratio: float | None, equal_cost_ratio: float | None) -> str:
    if not problem.prfaas or ratio is None:
        return ""
    at_cost = "" if equal_cost_ratio is None else f", {equal_cost_ratio:.2f} times at equal cost"
    factor = f"{ratio:.2f} times the throughput of a homogeneous cluster with as many GPUs{at_cost}"
    judged = equal_cost_ratio if equal_cost_ratio is not None else ratio
    return f"{'Worth it' if judged > _WORTH_IT else 'Not worth it'}: {factor}."
