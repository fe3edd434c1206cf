"""Traffic that is no longer what the deployment was planned for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prfaas.core.planner import OperatingPoint, PlanProblem, best_operation
from prfaas.core.planner.two_clusters import evaluate
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import Workload
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudySection, StudyTable, Verdict
from studies._figures import (
    Panel,
    PlotCurve,
    lines,
    listed,
    seconds,
    seed_mean,
)
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes
from studies._traffic import (
    DAY_S,
    NIGHT_ANSWERS,
    NIGHT_PROMPTS,
    NOON_ANSWERS,
    NOON_PROMPTS,
    DayPlan,
    day_plan,
    stretched,
)
from studies.ablation import OF_PAPER, OF_TILTED, PAPER, TILTED, Variant

_GROWTH = 1.15
_GROWN_LOAD = 0.95
_DAY_LOAD = 0.9
_REQUESTS = 12_000
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
        for seed in context.seeds():
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
                classes=length_classes(context),
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
    return runs


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    grown, day, seeds = _grown(context), day_plan(context, _DAY_LOAD), context.seeds()

    def runs(what: str, variant: Variant) -> Repeats:
        return Repeats.seeded(outcomes, seeds, what, variant.label)

    def of_day(variant: Variant) -> str:
        # Its load changes by itself, so that it is not judged.
        found = runs("day", variant)
        return f"{found.mean().seconds} ({seconds(found.mean('ttft_p90_s').mean)})"

    def worst(variant: Variant) -> str:
        return seed_mean([max(course) for course in _courses(outcomes, variant, seeds, "ttft_s")]).seconds

    def changes(variant: Variant) -> str:
        found = [outcomes["day", variant.label, seed].numbers for seed in seeds]
        moves = seed_mean([float(len(each["threshold_changes"])) for each in found])
        roles = seed_mean([float(len(each["conversions"])) for each in found])
        return f"{moves.text(1)} / {roles.text(1)}"

    verdicts = {which: {each.label: runs(which, each).verdict for each in _VARIANTS} for which in (NEW, OLD)}
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
            f"{context.requests(_REQUESTS):,} longer prompts."
        ),
        findings=[
            _capacities(context, grown),
            *(_stable_sentence(titles[which], verdicts[which]) for which in (NEW, OLD)),
            *_day_sentences(day, {each.label: runs("day", each) for each in _VARIANTS}),
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
                        runs(NEW, each).ttft,
                        runs(OLD, each).ttft,
                        of_day(each),
                        worst(each),
                        changes(each),
                    ]
                    for each in _VARIANTS
                ],
            ),
            TAIL_TITLE: tail_table(
                "traffic, variant",
                {
                    f"{title}, {each.label}": runs(what, each)
                    for what, title in ((NEW, "longer prompts, new Λ_max"), ("day", "day"))
                    for each in _VARIANTS
                    if runs(what, each).verdict != "grows"
                },
                length_classes(context),
            ),
        },
        figures=[_figure(context, outcomes)],
        notes=[
            f"The worst half-hour is the highest mean TTFT of a {_PARTS}th of the day. The day is not judged, since "
            "its load changes by itself.",
            "Whether queues grow is told from chance only if the overload is more than about "
            f"{_least_overload(context):.0%}.",
        ],
    )


def _courses(outcomes: Outcomes, variant: Variant, seeds: Sequence[int], name: str) -> list[list[float]]:
    return [
        [
            0.0 if value is None else value
            for value in outcomes["day", variant.label, seed].numbers["course"][name]
        ]
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


def _stable_sentence(title: str, verdicts: Mapping[str, Verdict]) -> str:
    named = {
        verdict: [f"`{label}`" for label, each in verdicts.items() if each == verdict]
        for verdict in ("stable", "grows", "too short to say")
    }
    if len(named["stable"]) == len(verdicts):
        return f"At {title} every one is stable for all seeds."
    if len(named["grows"]) == len(verdicts):
        return f"At {title} queues grow with every one."
    text = f"At {title} queues stay bounded for all seeds with {listed(named['stable'])}"
    if named["grows"]:
        text += f"; they grow with {listed(named['grows'])}"
    if named["too short to say"]:
        text += f"; runs are too short to say with {listed(named['too short to say'])}"
    return f"{text}."


def _day_sentences(day: DayPlan, found: Mapping[str, Repeats]) -> list[str]:
    best = min(found, key=lambda label: found[label].mean().mean)
    whole, without = found["paper"], found["paper, no slow side"]
    roles = sorted(set(day.prefill))
    needed = (
        f"from {roles[0]} to {roles[-1]} prefill instances"
        if len(roles) > 1
        else f"always {roles[0]} prefill instances"
    )
    return [
        f"Over the day the best roles would be {needed}.",
        f"The mean TTFT of the day is {found[_STATIC.label].mean().seconds} s with `{_STATIC.label}` and shortest with "
        f"`{best}` ({found[best].mean().seconds} s).",
        f"The slow side changes the mean TTFT of `paper` over the day by {whole.against(without)}.",
    ]


def _figure(context: StudyContext, outcomes: Outcomes) -> StudyFigure:
    seed = context.seeds()[0]
    shown = [_STATIC, _BY_LABEL["paper, no slow side"], PAPER, TILTED]

    def curves(name: str) -> list[PlotCurve]:
        found = []
        for number, variant in enumerate(shown):
            course = outcomes["day", variant.label, seed].numbers["course"]
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
