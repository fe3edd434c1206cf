"""The deployment against the same money, and the same number of GPUs, without PrfaaS."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Baseline, make_plan
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudyRun, StudySection, StudyTable
from studies._figures import Panel, PlotCurve, lines, listed, more_or_less
from studies._rate_search import LARGEST_RPS, STEP, RateSearch, hidden_overload
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes
from studies._variants import pd_only

_LOADS = (0.3, 0.45, 0.55, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_TOLD_LOADS = (0.3, 0.6, 0.8, 0.9)
"""Of which tails are told."""
_POLICIES = ("paper", "tilted")
_REQUESTS = 8_000
_SEARCH_REQUESTS = 20_000
TTFT_AT, LARGEST = "TTFT", "largest"


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


def _runs(context: StudyContext) -> Sequence[StudyRun]:
    runs: list[StudyRun] = []
    for system in _systems(context):
        for policy in _POLICIES:
            for seed in context.seeds():
                run = Run(
                    (LARGEST, system.name, policy, seed),
                    system.planned,
                    context.poisson(1.0),
                    context.requests(_SEARCH_REQUESTS),
                    seed,
                    policy=policy,
                )
                # What is simulated is within some percent of the planner's: so a search takes few runs.
                runs.append(RateSearch(run, system.lambda_max))
                runs += [
                    replace(
                        run,
                        key=(TTFT_AT, system.name, policy, load, seed),
                        traffic=context.poisson(load),
                        requests=context.requests(_REQUESTS),
                        classes=length_classes(context),
                    )
                    for load in _LOADS
                ]
    return runs


class _Findings:
    def __init__(self, context: StudyContext, outcomes: Outcomes) -> None:
        self._context = context
        self._outcomes = outcomes

    def at(self, system: _System, policy: str, load: float) -> Repeats:
        return Repeats.seeded(self._outcomes, self._context.seeds(), TTFT_AT, system.name, policy, load)

    def largest(self, system: _System, policy: str) -> Repeats:
        return Repeats.seeded(self._outcomes, self._context.seeds(), LARGEST, system.name, policy)

    def sentences(self, first: _System, other: _System) -> list[str]:
        planned = first.lambda_max / other.lambda_max if other.lambda_max else float("nan")
        carried = [
            f"{self.largest(first, policy).against(self.largest(other, policy), LARGEST_RPS).more_or_less} "
            f"with `{policy}`"
            for policy in _POLICIES
        ]
        found = [
            f"Against *{other.name}* PrfaaS carries {more_or_less(planned)} by the planner and, simulated, "
            f"{listed(carried)}."
        ]
        for policy in _POLICIES:
            both = [
                load
                for load in _LOADS
                if self.at(first, policy, load).is_stable and self.at(other, policy, load).is_stable
            ]
            if both:
                found.append(self._ttft(first, other, policy, both))
        return found

    def _ttft(self, first: _System, other: _System, policy: str, both: Sequence[float]) -> str:
        ratios = {load: self.at(first, policy, load).against(self.at(other, policy, load)) for load in both}
        clear = [found for found in ratios.values() if found.is_clear]
        words = (
            "shorter at every rate that both carry"
            if all(found.mean < 0 for found in clear) and len(clear) == len(ratios)
            else "longer at every rate that both carry"
            if all(found.mean > 0 for found in clear) and len(clear) == len(ratios)
            else "not clearly shorter or longer at every rate that both carry"
        )
        ends = [
            f"{ratios[load].times} at {load * self._context.lambda_max:.3g} req/s"
            for load in dict.fromkeys((both[0], both[-1]))
        ]
        return f"With `{policy}` its mean TTFT is {words}: {listed(ends)}."


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    systems = _systems(context)
    found = _Findings(context, outcomes)
    kinds = [(system, policy) for policy in _POLICIES for system in systems]
    first, *others = systems

    def rate(load: float) -> str:
        return f"{load * context.lambda_max:.3g}"

    hidden = hidden_overload(context.requests(_SEARCH_REQUESTS))
    return StudySection(
        question="Is PrfaaS better than the same money spent on a homogeneous PD cluster?",
        setup=(
            "; ".join(f"*{system.name}* is {system.words}" for system in systems)
            + ". All meet the same Poisson requests at the same rates. Roles start as planned and adapt. "
            f"{context.requests(_REQUESTS):,} requests for TTFT. For the largest rate, "
            f"{context.requests(_SEARCH_REQUESTS):,} requests come closer together or further apart. Bisection ends "
            f"at {STEP:.1%} of the planner's Λ_max."
        ),
        findings=[sentence for other in others for sentence in found.sentences(first, other)],
        tables={
            "Largest rate that is carried (req/s)": StudyTable(
                ["", "planner's Λ_max", *_POLICIES],
                [
                    [system.name, f"{system.lambda_max:.3g}"]
                    + [found.largest(system, policy).mean(LARGEST_RPS).text(2) for policy in _POLICIES]
                    for system in systems
                ],
            ),
            "TTFT in seconds, mean (P90)": StudyTable(
                ["req/s", *(f"{system.name}, {policy}" for system, policy in kinds)],
                [
                    [rate(load), *(found.at(system, policy, load).ttft for system, policy in kinds)]
                    for load in _LOADS
                ],
            ),
            TAIL_TITLE: tail_table(
                "req/s, system, policy",
                {
                    f"{rate(load)}, {system.name}, {policy}": found.at(system, policy, load)
                    for load in _TOLD_LOADS
                    for system, policy in kinds
                    if found.at(system, policy, load).verdict != "grows"
                },
                length_classes(context),
            ),
        },
        figures=[_figure(context, systems, found)],
        notes=[
            f"A run of so many requests can't tell an overload below {hidden:.1%} from chance. The largest rates may "
            "be too high by as much, for all systems alike; their ratios are not. A seed's rate is searched with the "
            'same requests for all systems, so ratios are of pairs. "–": some seeds gave none.'
        ],
    )


def _figure(context: StudyContext, systems: Sequence[_System], found: _Findings) -> StudyFigure:
    def curve(system: _System, policy: str, field: str) -> PlotCurve:
        points = [found.at(system, policy, load) for load in _LOADS]
        return PlotCurve(
            system.name if policy == _POLICIES[0] else "",
            [load * context.lambda_max for load in _LOADS],
            [point.mean(field).mean if point.is_stable else None for point in points],
            systems.index(system),
            is_dashed=policy != _POLICIES[0],
        )

    return lines(
        "equal-cost",
        "TTFT over the rate of requests as far as it is stable; solid: paper, dashed: tilted.",
        "requests per second",
        [
            Panel(
                title,
                [curve(system, policy, field) for policy in _POLICIES for system in systems],
                is_log=True,
            )
            for title, field in (("mean TTFT (s)", "ttft_mean_s"), ("P90 of TTFT (s)", "ttft_p90_s"))
        ],
    )


EQUAL_COST = Study("equal-cost", "PrfaaS or the same money without it", _runs, _describe)
