"""What every part of the scheduler is worth: the same requests without it, in several situations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prfaas.core.units import GIB, format_bits_per_s
from prfaas.lab.simulator.capacity import Fluctuating
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import (
    NONE,
    Difference,
    bars,
    listed,
    seconds,
)
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes, trace_lambda_max, trace_name
from studies._traffic import DAY_S, bursts, day_plan
from studies._variants import cache_of, with_bandwidth

LOAD = 0.9
_REQUESTS = 8_000
_ROOM, _SD, _CORRELATION_S = 1.15, 0.3, 10.0
_PEAK, _BURST_LOAD = 2.2, 0.8
_CACHE_BYTES = 16 * GIB
_TRACE_LOAD = 0.9


# Above every queue and utilisation there is: what is compared with it never counts.
_NEVER = 1e12


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, or what is left of it without a part."""

    label: str
    without: str
    """The part that is missing, in words."""
    policy: str
    params: Mapping[str, object] = field(default_factory=dict)
    """Of the policy."""
    adapts: bool = True
    """Whether thresholds are searched again."""
    allocation: bool = True
    """Whether roles change."""
    needs_caches: bool = False
    """Whether it only differs where there are caches."""


PAPER = Variant("paper", "nothing", "paper")
TILTED = Variant("tilted", "nothing", "tilted")

_OTHERS_CACHES = {"abundance_utilisation": 0.0, "abundance_queue_s": 0.0}

OF_PAPER = (
    Variant("local_only", "the threshold: everything is prefilled in the PD cluster", "local_only"),
    Variant("offload_all", "the threshold: everything is prefilled in the PrfaaS cluster", "offload_all"),
    Variant(
        "paper, utilisation unseen",
        "the factor for a link's utilisation (`utilisation_mark` out of reach)",
        "paper",
        {"utilisation_mark": _NEVER},
    ),
    Variant(
        "paper, queues unseen",
        "the factor for queues of prefill and link (`queue_mark` out of reach)",
        "paper",
        {"queue_mark": _NEVER},
    ),
    Variant(
        "paper, own caches only",
        "caches of the other cluster (abundance marks at 0)",
        "paper",
        _OTHERS_CACHES,
        needs_caches=True,
    ),
    Variant("paper, fixed threshold", "threshold re-optimisation", "paper", adapts=False),
    Variant("paper, fixed roles", "long-term allocation", "paper", allocation=False),
    Variant("paper, no slow side", "re-optimisation and allocation", "paper", adapts=False, allocation=False),
    Variant(
        "static_threshold",
        "everything but a threshold that stays where the planner put it",
        "static_threshold",
        adapts=False,
        allocation=False,
    ),
)
OF_TILTED = (
    Variant("tilted, β = 0", "the tilt: queues don't move the threshold", "tilted", {"beta": 0.0}),
    Variant("tilted, fairness = 1", "the order: first come, first served", "tilted", {"fairness": 1.0}),
    Variant("tilted, β = 0, fairness = 1", "tilt and order", "tilted", {"beta": 0.0, "fairness": 1.0}),
    Variant(
        "tilted, own caches only", "caches of the other cluster", "tilted", _OTHERS_CACHES, needs_caches=True
    ),
    Variant(
        "tilted, no slow side", "re-optimisation and allocation", "tilted", adapts=False, allocation=False
    ),
)


@dataclass(frozen=True, slots=True)
class AblationCase:
    """A situation in which parts are left out."""

    name: str
    title: str
    describe: Callable[[StudyContext], str]
    run: Callable[[StudyContext], Run]
    """Its run of policy `paper`."""

    def with_variant(self, base: Run, variant: Variant, seed: int) -> Run:
        """The same run without a part of the scheduler."""
        return replace(
            base,
            key=(self.name, variant.label, seed),
            seed=seed,
            policy=variant.policy,
            params=variant.params,
            adapts=variant.adapts,
            allocation=variant.allocation,
        )


def _steady(context: StudyContext) -> Run:
    return Run(
        (),
        context.planned,
        context.poisson(LOAD),
        context.requests(_REQUESTS),
        context.seed,
        classes=length_classes(context),
    )


def _bursty(context: StudyContext) -> Run:
    traffic = context.traffic(bursts(_BURST_LOAD * context.lambda_max, _PEAK))
    return replace(_steady(context), traffic=traffic)


def _scarce_bits_per_s(context: StudyContext) -> float:
    return min(_ROOM * context.optimum.egress_bits_per_s, context.planned.links[0].bandwidth_bits_per_s)


def _scarce(context: StudyContext) -> Run:
    bits_per_s = _scarce_bits_per_s(context)
    link = context.planned.links[0].name
    return replace(
        _steady(context),
        planned=with_bandwidth(context.planned, bits_per_s),
        links={link: Fluctuating(bits_per_s, _SD, _CORRELATION_S)},
    )


def _day(context: StudyContext) -> Run:
    plan = day_plan(context, LOAD)
    days = 0.1 if context.is_quick else 0.5
    return replace(
        _steady(context),
        traffic=plan.traffic,
        duration_s=DAY_S * days,
        roles={context.pd: plan.mean_prefill},
        threshold_tokens=plan.threshold_tokens,
    )


def _recorded(context: StudyContext) -> Run:
    rate = _TRACE_LOAD * trace_lambda_max(context)
    return replace(
        _steady(context),
        traffic=context.replayed(rate),
        caches=cache_of(context.planned.kv_model, _CACHE_BYTES),
    )


CASES = (
    AblationCase("steady", "steady", lambda _: f"Poisson arrivals at {LOAD:g} Λ_max", _steady),
    AblationCase(
        "bursts",
        "bursts",
        lambda _: (
            f"a mean of {_BURST_LOAD:g} Λ_max, {_PEAK:g} times as much for 15 s on average, then less for 60 s"
        ),
        _bursty,
    ),
    AblationCase(
        "scarce",
        "scarce link",
        lambda context: (
            f"steady arrivals, but the link has {format_bits_per_s(_scarce_bits_per_s(context))} on average, "
            f"{_ROOM:g} times what the plan sends at Λ_max, with a relative standard deviation of {_SD:g} "
            "and a correlation "
            f"time of {_CORRELATION_S:g} s; thresholds start as planned for the mean"
        ),
        _scarce,
    ),
    AblationCase(
        "day",
        "half a day",
        lambda _: (
            f"from midnight to noon of a day in {DAY_S / 3600:g} simulated hours, of short prompts with "
            "long answers at night and "
            "long prompts with "
            f"short answers at noon, at {LOAD:g} of what the best roles of its worst hour can carry; roles and "
            "threshold start as planned for its mean"
        ),
        _day,
    ),
    AblationCase(
        "trace",
        "trace",
        lambda context: (
            f"`{trace_name(context)}` repeated, with prefix caches of {_CACHE_BYTES // GIB} GiB on every instance, at "
            f"{_TRACE_LOAD:g} of what the planner finds for its lengths without any cache"
        ),
        _recorded,
    ),
)


_TOLD = ("steady", "trace")
"""Cases of which tails are told."""
_VARIANTS = (PAPER, *OF_PAPER, TILTED, *OF_TILTED)


def _runs(context: StudyContext) -> Sequence[Run]:
    runs = []
    for case in CASES:
        base = case.run(context)
        for variant in _VARIANTS:
            if variant.needs_caches and base.caches is None:
                continue
            runs += [case.with_variant(base, variant, seed) for seed in context.seeds()]
    return runs


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    results = _Findings(context, outcomes)
    columns = ["", "without", *(f"{case.title}: TTFT mean (P90)" for case in CASES)]
    rows = [
        [variant.label, variant.without, *(results.cell(case.name, variant) for case in CASES)]
        for variant in _VARIANTS
    ]
    return StudySection(
        question="What is each part of the scheduler worth?",
        setup=(
            f"Every variant meets the same requests, {context.requests(_REQUESTS):,} where nothing else is said. "
            + " ".join(f"*{case.title}*: {case.describe(context)}." for case in CASES)
        ),
        findings=list(results.findings()),
        tables={
            "TTFT in seconds, mean (P90), and below the difference of the mean to `paper`": StudyTable(
                columns, rows
            ),
            TAIL_TITLE: tail_table(
                "case, variant",
                {
                    f"{case.title}, {variant.label}": results.runs(case.name, variant)
                    for case in CASES
                    if case.name in _TOLD
                    for variant in _VARIANTS
                    if results.has(case.name, variant) and results.runs(case.name, variant).verdict != "grows"
                },
                length_classes(context),
            ),
        },
        figures=[_figure(results)],
        notes=[
            "*half a day* is not judged, since its load changes by itself. *bursts* are judged by the steady case, "
            "whose mean load is higher.",
            "The policy can't be kept from seeing caches of its own cluster: there is no parameter for it, and "
            "without caches the instances would be slower too, which is another comparison.",
            "`utilisation_mark` and `queue_mark` are the two ways in which `paper` sees bandwidth; a link's queue "
            "can't be hidden from it while prefill queues are seen.",
            "In *trace* seeds only move arrivals within the step of the recorded clock: its intervals say nothing of "
            "other traces.",
        ],
    )


class _Findings:
    def __init__(self, context: StudyContext, outcomes: Outcomes) -> None:
        self._seeds = context.seeds()
        self._outcomes = outcomes

    def has(self, case: str, variant: Variant) -> bool:
        return (case, variant.label, self._seeds[0]) in self._outcomes

    def runs(self, case: str, variant: Variant) -> Repeats:
        return Repeats.seeded(self._outcomes, self._seeds, case, variant.label)

    def judged(self, case: str, variant: Variant) -> Repeats:
        """The runs that say whether queues grow: bursts come and go, and the steady case has a higher mean load."""
        return self.runs("steady" if case == "bursts" else case, variant)

    def is_stable(self, case: str, variant: Variant) -> bool:
        return case == "day" or self.judged(case, variant).is_stable

    def difference(self, case: str, variant: Variant, base: Variant = PAPER) -> Difference:
        return self.runs(case, variant).against(self.runs(case, base))

    def cell(self, case: str, variant: Variant) -> str:
        if not self.has(case, variant):
            return NONE
        runs, judged = self.runs(case, variant), self.judged(case, variant)
        if case != "day" and judged.verdict == "grows":
            return judged.grows
        text = f"{runs.mean().seconds} ({seconds(runs.mean('ttft_p90_s').mean)})"
        if case != "day" and not judged.is_stable:
            return f"too short: {text}"
        if variant is PAPER or not self.is_stable(case, PAPER):
            return text
        if runs.values() == self.runs(case, PAPER).values():
            return f"{text}<br>same"
        return f"{text}<br>{self.difference(case, variant)}"

    def findings(self) -> Sequence[str]:
        sentences = []
        for case in CASES:
            worse = [
                each
                for each in OF_PAPER
                if self.has(case.name, each) and not self._is_harmless(case.name, each)
            ]
            verdicts = {
                each.label: "stable" if case.name == "day" else self.judged(case.name, each).verdict
                for each in worse
            }
            unstable = [label for label, verdict in verdicts.items() if verdict == "grows"]
            unknown = [label for label, verdict in verdicts.items() if verdict == "too short to say"]
            costly = sorted(
                (each for each in worse if self.is_stable(case.name, each)),
                key=lambda each: -self.difference(case.name, each).mean,
            )
            helped = [
                f"`{each.label}` ({self.difference(case.name, each)})"
                for each in OF_PAPER
                if self.has(case.name, each)
                and self.is_stable(case.name, each)
                and self.difference(case.name, each).is_clear
                and self.difference(case.name, each).mean < 0
            ]
            parts = []
            if unstable:
                parts.append(f"queues grow with {_codes(unstable)}")
            if unknown:
                parts.append(f"runs are too short to say with {_codes(unknown)}")
            if costly:
                parts.append(
                    "TTFT is longer with "
                    + listed([f"`{each.label}` ({self.difference(case.name, each)})" for each in costly])
                )
            if helped:
                parts.append(f"TTFT is shorter with {listed(helped)}")
            text = ", ".join(parts) if parts else "no part makes a difference that so many runs can tell"
            sentences.append(f"*{case.title}*, against the whole of `paper`: {text}.")
        return [*sentences, *self._of_tilted()]

    def _is_harmless(self, case: str, variant: Variant) -> bool:
        if not self.is_stable(case, variant):
            return False
        found = self.difference(case, variant)
        return not (found.is_clear and found.mean > 0)

    def _of_tilted(self) -> Sequence[str]:
        better, others = [], []
        for case in CASES:
            found = self.difference(case.name, TILTED)
            if not (self.is_stable(case.name, TILTED) and self.is_stable(case.name, PAPER)):
                others.append(f"{case.title} (not both stable)")
            elif found.is_clear and found.mean < 0:
                better.append(f"{case.title} ({found})")
            else:
                others.append(f"{case.title} ({found})")
        if not better:
            yield_text = f"`tilted` is nowhere clearly ahead of `paper`: {listed(others)}."
        elif not others:
            yield_text = f"`tilted` has a shorter mean TTFT than `paper` everywhere: {listed(better)}."
        else:
            yield_text = (
                f"`tilted` has a shorter mean TTFT than `paper` in {listed(better)}; not in {listed(others)}."
            )
        return [yield_text]


def _codes(labels: Sequence[str]) -> str:
    return listed([f"`{label}`" for label in labels])


def _figure(results: _Findings) -> StudyFigure:
    case = CASES[1].name
    shown = [each for each in _VARIANTS if results.has(case, each) and results.is_stable(case, each)]
    return bars(
        "ablation",
        f"Mean TTFT, {CASES[1].title}; variants whose queues grow are left out.",
        "mean TTFT (s)",
        [each.label for each in shown],
        [results.runs(case, each).mean().mean for each in shown],
    )


ABLATION = Study("ablation", "What each part of the scheduler is worth", _runs, _describe)
