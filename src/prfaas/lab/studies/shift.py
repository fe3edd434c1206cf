"""Traffic that is no longer what the deployment was planned for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prfaas.core.deployment import ControlConfig
from prfaas.core.planner import OperatingPoint, PlanProblem, best_operation
from prfaas.core.planner.two_clusters import evaluate
from prfaas.core.workload import Empirical, Workload
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.studies.ablation import OF_PAPER, OF_TILTED, PAPER, TILTED, Variant
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.figures import (
    UNSTABLE,
    Panel,
    PlotCurve,
    difference,
    lines,
    listed,
    mean,
    mean_and_p90,
    seconds,
)
from prfaas.lab.studies.study import Outcomes, Run, Study, StudyFigure, StudySection, StudyTable
from prfaas.lab.studies.traffic import (
    DAY_S,
    NIGHT_ANSWERS,
    NIGHT_PROMPTS,
    NOON_ANSWERS,
    NOON_PROMPTS,
    DayPlan,
    KnownDay,
    day_plan,
    stretched,
)

_GROWTH = 1.15
_GROWN_LOAD = 0.95
_DAY_LOAD = 0.9
_REQUESTS = 15_000
_SEEDS = 3
_PARTS = 48

_BY_LABEL = {each.label: each for each in (*OF_PAPER, *OF_TILTED)}
_VARIANTS = (
    _BY_LABEL["static_threshold"],
    _BY_LABEL["paper, no slow side"],
    _BY_LABEL["paper, fixed roles"],
    _BY_LABEL["paper, fixed threshold"],
    PAPER,
    _BY_LABEL["tilted, no slow side"],
    TILTED,
)
_STATIC = _VARIANTS[0]
NEW, OLD = "new", "old"

REACTING, FORECASTING, KNOWING = "what was seen", "a forecast", "what will come"
_SIGHTS = (REACTING, FORECASTING, KNOWING)
# A day to learn from and a quarter to settle, then one that counts.
_LEARNT_DAYS, _DAYS = 1.25, 2.25


@dataclass(frozen=True, slots=True)
class _Growth:
    """Lengths that grew. `best`: what the planner finds for them; `kept`: with the old roles and threshold."""

    lengths: Empirical
    problem: PlanProblem
    best: OperatingPoint
    kept: OperatingPoint

    def rate(self, context: StudyContext, which: str) -> float:
        return _GROWN_LOAD * (self.best.lambda_max if which == NEW else context.lambda_max)


def _grown(context: StudyContext) -> _Growth:
    lengths = stretched(context.problem.workload.uncached, _GROWTH, *context.range_tokens)
    problem = replace(context.problem, workload=Workload(lengths, context.problem.workload.output_tokens))
    old = context.optimum.threshold_tokens
    kept = evaluate(problem, math.inf if old is None else old, context.optimum.n_prefill)
    return _Growth(lengths, problem, best_operation(problem), kept)


def _runs(context: StudyContext) -> Sequence[Run]:
    grown, day = _grown(context), day_plan(context, _DAY_LOAD)
    runs = []
    for variant in _VARIANTS:
        for seed in context.seeds(_SEEDS):
            base = Run(
                ("day", variant.label, seed),
                context.planned,
                day.traffic,
                0,
                seed,
                policy=variant.policy,
                params=variant.params,
                adapts=variant.adapts,
                allocation=variant.allocation,
                roles={context.pd: day.mean_prefill},
                threshold_tokens=day.threshold_tokens,
                # A quarter of a day to settle, and one that counts.
                duration_s=(0.125 if context.is_quick else 1.25) * DAY_S,
                warmup_share=0.2,
                course_parts=_PARTS,
            )
            runs.append(base)
            for which in (NEW, OLD):
                traffic = context.traffic(Poisson(grown.rate(context, which)), grown.lengths)
                runs.append(
                    replace(
                        base,
                        key=(which, variant.label, seed),
                        traffic=traffic,
                        requests=context.requests(_REQUESTS),
                        duration_s=None,
                        warmup_share=0.2,
                        roles=None,
                        threshold_tokens=None,
                        course_parts=0,
                    )
                )
    return [*runs, *_sight_runs(context, day)]


def _sight_runs(context: StudyContext, day: DayPlan) -> list[Run]:
    """The same days, with roles by what was seen, by a forecast, and by what the day will be."""
    return [
        Run(
            ("sight", variant.label, sight, seed),
            context.planned,
            day.traffic,
            0,
            seed,
            policy=variant.policy,
            roles={context.pd: day.mean_prefill},
            threshold_tokens=day.threshold_tokens,
            control=ControlConfig(forecast_period_s=DAY_S if sight == FORECASTING else 0.0),
            foresight=KnownDay(day.traffic) if sight == KNOWING else None,
            duration_s=(0.1 if context.is_quick else 1.0) * _DAYS * DAY_S,
            warmup_share=_LEARNT_DAYS / _DAYS,
        )
        for variant in (PAPER, TILTED)
        for sight in _SIGHTS
        for seed in context.seeds(_SEEDS)
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    grown, day, seeds = _grown(context), day_plan(context, _DAY_LOAD), context.seeds(_SEEDS)

    def values(what: str, variant: Variant, field: str) -> list[float]:
        return [outcomes[what, variant.label, seed].number(field) for seed in seeds]

    def is_stable(what: str, variant: Variant) -> bool:
        return all(outcomes[what, variant.label, seed].is_stable for seed in seeds)

    def cell(what: str, variant: Variant) -> str:
        means = (mean(values(what, variant, field)) for field in ("ttft_mean_s", "ttft_p90_s"))
        return mean_and_p90(*means, is_stable=what == "day" or is_stable(what, variant))

    def worst(variant: Variant) -> float:
        return max(max(course) for course in _courses(outcomes, variant, seeds, "ttft_s"))

    def changes(variant: Variant) -> str:
        found = [outcomes["day", variant.label, seed].numbers for seed in seeds]
        moves = mean([float(len(each["threshold_changes"])) for each in found])
        roles = mean([float(len(each["conversions"])) for each in found])
        return f"{moves:.0f} / {roles:.0f}"

    steady = {which: [each.label for each in _VARIANTS if is_stable(which, each)] for which in (NEW, OLD)}
    titles = {
        NEW: f"{_GROWN_LOAD:g} of the new Λ_max ({grown.rate(context, NEW):.3g} req/s)",
        OLD: f"{_GROWN_LOAD:g} of the old Λ_max ({grown.rate(context, OLD):.3g} req/s)",
    }
    return StudySection(
        question="What if traffic changes?",
        setup=(
            f"*Longer prompts*: {_GROWTH:g} times the file's lengths (within what profiles cover), while "
            "roles and threshold "
            "start as planned for the old ones. *Day*: "
            f"{DAY_S / 3600:g} simulated hours stand for a day; its midnight has {NIGHT_PROMPTS:g} times "
            "the file's prompts and "
            f"{NIGHT_ANSWERS:g} times its answers, its noon {NOON_PROMPTS:g} times the prompts and "
            f"{NOON_ANSWERS:g} times the "
            f"answers, between them it is a mix by a cosine. The rate is {_DAY_LOAD:g} of what the best "
            "roles of the worst "
            f"hour can carry ({day.rate_rps:.3g} req/s); roles and threshold start as planned for the mean mix. "
            f"{len(seeds)} seeds. *The day after a whole one*: the same day comes again and again; what was learnt of "
            f"the first {_LEARNT_DAYS:g} days is a forecast for the next, which counts. *What will come* is the day "
            "itself, which no forecast can be better than."
        ),
        findings=[
            _capacities(context, grown),
            *(_stable_sentence(titles[which], steady[which]) for which in (NEW, OLD)),
            _day_sentence(day, {each.label: values("day", each, "ttft_mean_s") for each in _VARIANTS}),
            *(_sight_sentence(context, outcomes, each) for each in (PAPER, TILTED)),
        ],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                [
                    "",
                    *(f"longer prompts, {title}" for title in titles.values()),
                    "day",
                    "worst half-hour of the day",
                    "changes of threshold / roles on the day",
                ],
                [
                    [
                        each.label,
                        cell(NEW, each),
                        cell(OLD, each),
                        cell("day", each),
                        seconds(worst(each)),
                        changes(each),
                    ]
                    for each in _VARIANTS
                ],
            ),
            "The day after a whole one, by what roles are chosen: TTFT in seconds": StudyTable(
                ["", "roles by", "mean", "P90", "P99", "changes of roles"],
                [
                    _sight_row(context, outcomes, variant, sight)
                    for variant in (PAPER, TILTED)
                    for sight in _SIGHTS
                ],
            ),
        },
        figures=[_figure(context, outcomes)],
        notes=[
            f'"{UNSTABLE}": in some of the runs queues grow for as long as requests come. The worst half-hour '
            f"is the highest mean TTFT of a {_PARTS}th of the day, of all seeds.",
            "Whether queues grow is told from chance only if the overload is more than about "
            f"{_least_overload(context):.0%}; what the planner finds is T(E[L]), the paper's service time.",
        ],
    )


def _courses(outcomes: Outcomes, variant: Variant, seeds: Sequence[int], name: str) -> list[list[float]]:
    return [
        [0.0 if value is None else value for value in outcomes["day", variant.label, seed].course[name]]
        for seed in seeds
    ]


def _capacities(context: StudyContext, grown: _Growth) -> str:
    old, kept, best = context.lambda_max, grown.kept.lambda_max, grown.best.lambda_max
    rates = {name: grown.rate(context, name) for name in (NEW, OLD)}
    text = (
        f"By the planner the longer prompts lower Λ_max from {old:.3g} to {best:.3g} req/s with the best roles "
        f"({grown.best.n_prefill} instances prefill in place of {context.optimum.n_prefill}) and to "
        f"{kept:.3g} with the old "
        "roles and threshold"
    )
    over_kept = [f"{rate:.3g}" for rate in rates.values() if rate > kept]
    over_best = [f"{rate:.3g}" for rate in rates.values() if rate > best]
    if over_kept:
        text += f": nothing that stays as it is can carry {listed(over_kept)} req/s"
    if over_best:
        text += f", and nothing at all {listed(over_best)}"
    return f"{text}."


def _least_overload(context: StudyContext) -> float:
    """As `simulator.stability` says of n arrivals: 1 %, or 2.6 / √n."""
    return max(0.01, 2.6 / math.sqrt(context.requests(_REQUESTS)))


def _stable_sentence(title: str, stable: Sequence[str]) -> str:
    if len(stable) == len(_VARIANTS):
        return f"At {title} every one is stable."
    if not stable:
        return f"At {title} queues grow with every one."
    return (
        f"At {title} queues stay bounded with {listed([f'`{label}`' for label in stable])} and with no other."
    )


def _day_sentence(day: DayPlan, ttft_s: dict[str, list[float]]) -> str:
    means = {label: mean(values) for label, values in ttft_s.items()}
    best = min(means, key=lambda label: means[label])
    static, without, whole = means[_STATIC.label], "paper, no slow side", "paper"
    compared = difference(ttft_s[whole], ttft_s[without])
    slow = (
        f"the slow side changes `paper`'s by {compared}"
        if compared.is_clear
        else f"what the slow side changes for `paper` ({compared}) is within chance"
    )
    roles = sorted(set(day.prefill))
    needed = (
        f"from {roles[0]} to {roles[-1]} prefill instances"
        if len(roles) > 1
        else f"always {roles[0]} prefill instances"
    )
    return (
        f"Over the day the best roles would be {needed}. The mean TTFT is {seconds(static)} s with "
        f"`{_STATIC.label}` and "
        f"shortest with `{best}` ({seconds(means[best])} s); {slow}."
    )


def _sights(
    context: StudyContext, outcomes: Outcomes, variant: Variant, sight: str, field: str
) -> list[float]:
    return [outcomes["sight", variant.label, sight, seed].number(field) for seed in context.seeds(_SEEDS)]


def _sight_row(context: StudyContext, outcomes: Outcomes, variant: Variant, sight: str) -> list[str]:
    fields = ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s")
    cells = [seconds(mean(_sights(context, outcomes, variant, sight, field))) for field in fields]
    since_s = _LEARNT_DAYS * DAY_S
    moves = [
        float(
            sum(
                each["at_s"] >= since_s
                for each in outcomes["sight", variant.label, sight, seed].numbers["conversions"]
            )
        )
        for seed in context.seeds(_SEEDS)
    ]
    return [variant.label, sight, *cells, f"{mean(moves):.1f}"]


def _sight_sentence(context: StudyContext, outcomes: Outcomes, variant: Variant) -> str:
    def changed(sight: str, field: str) -> str:
        values = (_sights(context, outcomes, variant, each, field) for each in (sight, REACTING))
        return str(difference(*values))

    return (
        f"With `{variant.label}` roles by a forecast in place of what was seen change the mean TTFT of the next day "
        f"by {changed(FORECASTING, 'ttft_mean_s')}, its P90 by {changed(FORECASTING, 'ttft_p90_s')} and its P99 by "
        f"{changed(FORECASTING, 'ttft_p99_s')}; to know the day would change the mean by "
        f"{changed(KNOWING, 'ttft_mean_s')}."
    )


def _figure(context: StudyContext, outcomes: Outcomes) -> StudyFigure:
    seed = context.seeds(_SEEDS)[0]
    shown = [_STATIC, _BY_LABEL["paper, no slow side"], PAPER, TILTED]

    def curves(name: str) -> list[PlotCurve]:
        found = []
        for number, variant in enumerate(shown):
            course = outcomes["day", variant.label, seed].course
            # The counted day begins a quarter of a day after midnight.
            hours = [((at or 0.0) / DAY_S) * 24 + 6 for at in course["at_s"]]
            found.append(PlotCurve(variant.label, hours, course[name], number))
        return found

    return lines(
        "shift",
        f"The day (hours of a day of {DAY_S / 3600:g} h; 12 and 36 would be noon), first seed: mean TTFT "
        "of each part, "
        "prefill instances and threshold of the PD cluster.",
        "hour",
        [
            Panel("mean TTFT (s)", curves("ttft_s"), is_log=True),
            Panel("prefill instances", curves(f"prefill_instances_{context.pd}"), is_stepped=True),
            Panel("threshold (tokens)", curves(f"threshold_tokens_{context.pd}"), is_stepped=True),
        ],
    )


SHIFT = Study("shift", "Traffic that changes", _runs, _describe)
