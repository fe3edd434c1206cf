"""How little bandwidth is enough, and what its fluctuation costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prfaas.core.planner import OperatingPoint, best_operation
from prfaas.core.units import format_bits_per_s
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.simulator.capacity import Fluctuating
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import Panel, PlotCurve, lines
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes
from studies._variants import with_bandwidth

_LOAD = 0.9
_STEPS = 7
_LEAST_SHARE = 0.01
_DEVIATIONS = (0.0, 0.3, 0.5)
_CORRELATION_S = 10.0
_POLICIES = ("paper", "tilted")
_REQUESTS = 8_000
# Below this share of Λ_max with the file's link, a bandwidth has a rate of its own.
_SAME_RATE = 0.999
FULL, OWN = "full", "own"
"""The two rates: a share of Λ_max with the file's link, and of Λ_max with the link as it is in the run."""


@dataclass(frozen=True, slots=True)
class _Level:
    """One bandwidth, and what the planner finds for it."""

    bits_per_s: float
    plan: OperatingPoint
    has_own_rate: bool
    """Whether the link limits Λ_max; else both rates are one."""

    @property
    def name(self) -> str:
        return format_bits_per_s(self.bits_per_s)


def _levels(context: StudyContext) -> list[_Level]:
    most = context.planned.links[0].bandwidth_bits_per_s
    found = []
    for step in range(_STEPS):
        bits_per_s = most * _LEAST_SHARE ** (1 - step / (_STEPS - 1))
        links = tuple(replace(link, bandwidth_bits_per_s=bits_per_s) for link in context.problem.links)
        plan = best_operation(replace(context.problem, links=links))
        found.append(_Level(bits_per_s, plan, plan.lambda_max < _SAME_RATE * context.lambda_max))
    return found


def _runs(context: StudyContext) -> Sequence[Run]:
    link = context.planned.links[0].name
    return [
        Run(
            (rate, policy, deviation, level.name, seed),
            with_bandwidth(context.planned, level.bits_per_s),
            context.traffic(Poisson(_LOAD * (level.plan.lambda_max if rate == OWN else context.lambda_max))),
            context.requests(_REQUESTS),
            seed,
            policy=policy,
            links={link: Fluctuating(level.bits_per_s, deviation, _CORRELATION_S)} if deviation else {},
            classes=length_classes(context),
        )
        for level in _levels(context)
        for rate in ((FULL, OWN) if level.has_own_rate else (FULL,))
        for policy in _POLICIES
        for deviation in _DEVIATIONS
        for seed in context.seeds()
    ]


class _Findings:
    def __init__(self, context: StudyContext, outcomes: Outcomes) -> None:
        self.levels = _levels(context)
        self._context = context
        self._outcomes = outcomes

    def at(self, rate: str, policy: str, deviation: float, level: _Level) -> Repeats:
        kind = rate if level.has_own_rate else FULL
        return Repeats.seeded(self._outcomes, self._context.seeds(), kind, policy, deviation, level.name)

    def first_stable(self, policy: str) -> str:
        """From which bandwidth on the full rate is carried."""
        words = []
        for deviation in _DEVIATIONS:
            found = None
            for level in reversed(self.levels):
                if not self.at(FULL, policy, deviation, level).is_stable:
                    break
                found = level
            words.append("nowhere" if found is None else f"from {found.name} on")
        rate_rps = _LOAD * self._context.lambda_max
        planned = next((level.name for level in self.levels if level.plan.lambda_max > rate_rps), None)
        by_plan = (
            "no bandwidth here would do by the planner"
            if planned is None
            else f"by the planner the first of these that could carry it is {planned}"
        )
        return (
            f"At {rate_rps:.3g} req/s `{policy}` is stable for all seeds {_by_deviation(words)}; {by_plan}."
        )

    def promise(self, policy: str) -> str:
        """Whether what the planner finds for a bandwidth is carried there, and what fluctuation costs."""
        words = []
        for deviation in _DEVIATIONS:
            bad = [
                level.name for level in self.levels if not self.at(OWN, policy, deviation, level).is_stable
            ]
            words.append("except at " + ", ".join(bad) if bad else "at every bandwidth")
        costs = []
        for level in self.levels:
            calm, wild = (self.at(OWN, policy, each, level) for each in (_DEVIATIONS[0], _DEVIATIONS[-1]))
            if calm.is_stable and wild.is_stable:
                costs.append((wild.against(calm), level))
        text = f"At {_LOAD:g} of the Λ_max planned for each bandwidth `{policy}` is stable {_by_deviation(words)}"
        if not costs:
            return f"{text}."
        most, where = max(costs, key=lambda each: each[0].mean)
        last, widest = costs[-1]
        return (
            f"{text}. A fluctuation of {_named(_DEVIATIONS[-1])} changes the mean TTFT most at {where.name} ({most}), "
            f"and at {widest.name} by {last}."
        )


def _named(deviation: float) -> str:
    return f"sd {deviation:g}" if deviation else "constant"


def _by_deviation(words: Sequence[str]) -> str:
    """What holds for each deviation; once, if it is always the same."""
    if len(set(words)) == 1:
        return f"{words[0]}, however much the link fluctuates"
    return ", ".join(
        f"{text} ({_named(deviation)})" for text, deviation in zip(words, _DEVIATIONS, strict=True)
    )


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    found = _Findings(context, outcomes)
    levels = found.levels
    kinds = [(policy, deviation) for policy in _POLICIES for deviation in _DEVIATIONS]

    def table(rate: str, shown: Sequence[_Level]) -> StudyTable:
        return StudyTable(
            [
                "bandwidth",
                "Λ_max planned (req/s)",
                *(f"{policy}, {_named(deviation)}" for policy, deviation in kinds),
            ],
            [
                [
                    level.name,
                    f"{level.plan.lambda_max:.3g}",
                    *(found.at(rate, policy, deviation, level).ttft for policy, deviation in kinds),
                ]
                for level in shown
            ],
        )

    return StudySection(
        question="How much bandwidth does the deployment need, and what if it fluctuates?",
        setup=(
            f"The link from {levels[0].name} to the file's {levels[-1].name}, constant or as an Ornstein–Uhlenbeck "
            f"process with a relative standard deviation (sd) and a correlation time of {_CORRELATION_S:g} s. "
            f"{context.requests(_REQUESTS):,} requests. Roles and threshold start as planned for the mean; both adapt."
        ),
        findings=[
            *(found.first_stable(policy) for policy in _POLICIES),
            *(found.promise(policy) for policy in _POLICIES),
        ],
        tables={
            f"TTFT in seconds, mean (P90), at {_LOAD * context.lambda_max:.3g} req/s, {_LOAD:g} of Λ_max with the "
            "file's link": table(FULL, levels),
            f"TTFT in seconds, mean (P90), at {_LOAD:g} of what the planner finds for this bandwidth, where that is "
            "less": table(OWN, [level for level in levels if level.has_own_rate]),
            TAIL_TITLE + f", at {_LOAD:g} of what the planner finds for this bandwidth": tail_table(
                "bandwidth, policy",
                {
                    f"{level.name}, {policy}, {_named(deviation)}": found.at(OWN, policy, deviation, level)
                    for level in levels
                    for policy in _POLICIES
                    for deviation in (_DEVIATIONS[0], _DEVIATIONS[-1])
                },
                length_classes(context),
            ),
        },
        figures=[_figure(context, found)],
    )


def _figure(context: StudyContext, found: _Findings) -> StudyFigure:
    gigabits = [level.bits_per_s / 1e9 for level in found.levels]

    def curve(rate: str, field: str, policy: str, deviation: float) -> PlotCurve:
        points = [found.at(rate, policy, deviation, level) for level in found.levels]
        return PlotCurve(
            f"{policy}, {_named(deviation)}",
            gigabits,
            [point.mean(field).mean if point.is_stable else None for point in points],
            colour=_POLICIES.index(policy),
            is_dashed=deviation > 0,
        )

    def curves(rate: str, field: str) -> list[PlotCurve]:
        return [
            curve(rate, field, policy, deviation)
            for policy in _POLICIES
            for deviation in (_DEVIATIONS[0], _DEVIATIONS[-1])
        ]

    needed = context.optimum.egress_bits_per_s / 1e9
    return lines(
        "bandwidth",
        "Mean TTFT and offloaded part over the link's mean bandwidth; nothing is drawn where queues grow. "
        "Dotted: what the "
        "plan sends at Λ_max.",
        "mean bandwidth (Gbit/s)",
        [
            Panel(
                f"TTFT (s), {_LOAD:g} of full Λ_max",
                curves(FULL, "ttft_mean_s"),
                mark=(needed, "planned egress"),
            ),
            Panel(f"TTFT (s), {_LOAD:g} of own Λ_max", curves(OWN, "ttft_mean_s"), mark=(needed, "")),
            Panel("offloaded, own Λ_max", curves(OWN, "offloaded_fraction"), mark=(needed, "")),
        ],
        x_log=True,
    )


BANDWIDTH = Study("bandwidth", "How much bandwidth is enough", _runs, _describe)
