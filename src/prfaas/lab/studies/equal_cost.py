"""The deployment against the same money, and the same number of GPUs, without PrfaaS."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Baseline, make_plan
from prfaas.lab.studies.context import StudyContext, pd_only
from prfaas.lab.studies.figures import (
    NONE,
    UNSTABLE,
    Panel,
    PlotCurve,
    lines,
    listed,
    mean_and_p90,
    more_or_less,
)
from prfaas.lab.studies.study import Outcomes, Run, Study, StudySection, StudyTable

_LOADS = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
_POLICIES = ("paper", "tilted")
_REQUESTS = 8_000


@dataclass(frozen=True, slots=True)
class _System:
    """A way to spend; `lambda_max` by the planner."""

    name: str
    words: str
    planned: PlannedDeployment
    lambda_max: float


def _systems(context: StudyContext) -> list[_System]:
    plan = make_plan(context.problem)
    gpus = sum(cluster.gpus for cluster in context.planned.clusters)
    kinds = " + ".join(f"{cluster.gpus} {cluster.hardware}" for cluster in context.planned.clusters)
    found = [
        _System(
            "PrfaaS", f"the deployment itself, {gpus} GPUs ({kinds})", context.planned, context.lambda_max
        )
    ]

    def add(name: str, why: str, baseline: Baseline) -> None:
        count = max(baseline.instances, 2)
        found.append(
            _System(
                name,
                f"{baseline.gpus} {baseline.hardware}, PD only: {why}",
                pd_only(context.planned, count),
                baseline.point.lambda_max,
            )
        )

    if plan.homogeneous_equal_cost is not None:
        add(
            "PD, equal cost",
            "as many as the same money buys by the file's prices",
            plan.homogeneous_equal_cost,
        )
    add("PD, equal GPUs", "as many GPUs", plan.homogeneous)
    return found


def _runs(context: StudyContext) -> Sequence[Run]:
    return [
        Run(
            (system.name, policy, load),
            system.planned,
            context.poisson(load),
            context.requests(_REQUESTS),
            context.seed,
            policy=policy,
        )
        for system in _systems(context)
        for policy in _POLICIES
        for load in _LOADS
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    systems = _systems(context)
    kinds = [(system, policy) for policy in _POLICIES for system in systems]

    def cell(system: _System, policy: str, load: float) -> str:
        outcome = outcomes[system.name, policy, load]
        if not outcome.is_stable:
            return UNSTABLE
        return mean_and_p90(outcome.number("ttft_mean_s"), outcome.number("ttft_p90_s"))

    most = {(system.name, policy): _largest(outcomes, system.name, policy) for system, policy in kinds}
    rows = [
        [f"{load * context.lambda_max:.3g}", *(cell(system, policy, load) for system, policy in kinds)]
        for load in _LOADS
    ]
    step = max(high - low for low, high in pairwise(_LOADS))
    return StudySection(
        question="Is PrfaaS better than the same money spent on a homogeneous PD cluster?",
        setup=(
            "; ".join(f"*{system.name}* is {system.words}" for system in systems)
            + ". All meet the same Poisson requests at the same rates. Roles start as planned and adapt."
        ),
        findings=[*_findings(context, systems, outcomes, most)],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["req/s", *(f"{system.name}, {policy}" for system, policy in kinds)], rows
            ),
            "Largest stable rate (req/s)": StudyTable(
                ["", "planner's Λ_max", *_POLICIES],
                [
                    [system.name, f"{system.lambda_max:.3g}"]
                    + [_rate(context, most[system.name, policy]) for policy in _POLICIES]
                    for system in systems
                ],
            ),
        },
        figures=[
            lines(
                "equal-cost",
                "TTFT over the rate of requests as far as it is stable; solid: paper, dashed: tilted.",
                "requests per second",
                [
                    Panel(
                        title,
                        [
                            PlotCurve(
                                system.name if policy == _POLICIES[0] else "",
                                [load * context.lambda_max for load in _LOADS],
                                [
                                    outcomes[system.name, policy, load].number(field)
                                    if outcomes[system.name, policy, load].is_stable
                                    else None
                                    for load in _LOADS
                                ],
                                systems.index(system),
                                is_dashed=policy != _POLICIES[0],
                            )
                            for system, policy in kinds
                        ],
                        is_log=True,
                    )
                    for title, field in (("mean TTFT (s)", "ttft_mean_s"), ("P90 of TTFT (s)", "ttft_p90_s"))
                ],
            )
        ],
        notes=[
            "The largest stable rate is the last of the table's rates up to which every run is stable: "
            "true to a step, at "
            f"most {step * context.lambda_max:.2g} req/s there, and to an overload of some per cent that "
            "so few requests "
            "can't show."
        ],
    )


def _largest(outcomes: Outcomes, system: str, policy: str) -> float | None:
    found = None
    for load in _LOADS:
        if not outcomes[system, policy, load].is_stable:
            break
        found = load
    return found


def _rate(context: StudyContext, load: float | None) -> str:
    if load is None:
        return f"below {_LOADS[0] * context.lambda_max:.3g}"
    rate = f"{load * context.lambda_max:.3g}"
    return f"{rate} or more" if load == _LOADS[-1] else rate


def _findings(
    context: StudyContext,
    systems: Sequence[_System],
    outcomes: Outcomes,
    most: dict[tuple[str, str], float | None],
) -> list[str]:
    first, *others = systems
    sentences = []
    for other in others:
        planned = first.lambda_max / other.lambda_max if other.lambda_max else float("nan")
        parts = []
        for policy in _POLICIES:
            mine, theirs = most[first.name, policy], most[other.name, policy]
            if mine is None or theirs is None:
                parts.append(f"{NONE} with `{policy}`")
                continue
            parts.append(f"{more_or_less(mine / theirs)} with `{policy}`")
        sentences.append(
            f"Against {other.name} PrfaaS carries {more_or_less(planned)} by the planner and, simulated, "
            f"{listed(parts)}."
        )
        low = _LOADS[0]
        ratios = []
        for policy in _POLICIES:
            both = [
                load
                for load in _LOADS
                if outcomes[first.name, policy, load].is_stable
                and outcomes[other.name, policy, load].is_stable
            ]
            ratios += [
                (
                    outcomes[first.name, policy, load].number("ttft_mean_s")
                    / outcomes[other.name, policy, load].number("ttft_mean_s"),
                    load,
                    policy,
                )
                for load in both
            ]
        if not ratios:
            continue
        least, most_of = min(ratios), max(ratios)
        at_low = [ratio for ratio, load, _ in ratios if load == low]
        words = (
            "shorter at every rate that both carry"
            if most_of[0] < 1
            else "longer at every rate that both carry"
            if least[0] > 1
            else "shorter at some rates and longer at others"
        )
        sentences.append(
            f"Its mean TTFT is {words}: {_times(least, context)} to {_times(most_of, context)}"
            + (
                f"; at the lowest rate {listed([f'{ratio:.2f}' for ratio in at_low])} times."
                if at_low
                else "."
            )
        )
    return sentences


def _times(found: tuple[float, float, str], context: StudyContext) -> str:
    ratio, load, policy = found
    return f"{ratio:.2f} times (`{policy}`, {load * context.lambda_max:.3g} req/s)"


EQUAL_COST = Study("equal-cost", "PrfaaS or the same money without it", _runs, _describe)
