"""How little bandwidth is enough, and what its fluctuation costs."""

from collections.abc import Sequence
from dataclasses import replace

from prfaas.core.planner import OperatingPoint, best_operation
from prfaas.core.units import format_bits_per_s
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.simulator.capacity import Fluctuating
from prfaas.lab.studies.context import StudyContext, with_bandwidth
from prfaas.lab.studies.figures import UNSTABLE, Panel, PlotCurve, lines, percent, seconds
from prfaas.lab.studies.study import Key, Outcomes, Run, Study, StudyFigure, StudySection, StudyTable

_LOAD = 0.9
_STEPS = 9
_LEAST_SHARE = 0.01
_DEVIATIONS = (0.0, 0.3, 0.5)
_CORRELATION_S = 10.0
_POLICIES = ("paper", "tilted")
_REQUESTS = 8_000
FULL, OWN = "full", "own"
"""The two rates: a share of Λ_max with the file's link, and of Λ_max with the link as it is in the run."""


def _levels(context: StudyContext) -> list[float]:
    most = context.planned.links[0].bandwidth_bits_per_s
    return [most * _LEAST_SHARE ** (1 - step / (_STEPS - 1)) for step in range(_STEPS)]


def _plans(context: StudyContext) -> list[OperatingPoint]:
    return [
        best_operation(
            replace(
                context.problem,
                links=tuple(replace(link, bandwidth_bits_per_s=level) for link in context.problem.links),
            )
        )
        for level in _levels(context)
    ]


def _key(rate: str, policy: str, deviation: float, step: int) -> Key:
    return (rate, policy, deviation, step)


def _runs(context: StudyContext) -> Sequence[Run]:
    runs = []
    link = context.planned.links[0].name
    for step, (level, plan) in enumerate(zip(_levels(context), _plans(context), strict=True)):
        for rate in (FULL, OWN):
            rate_rps = _LOAD * (context.lambda_max if rate == FULL else plan.lambda_max)
            for policy in _POLICIES:
                runs += [
                    Run(
                        _key(rate, policy, deviation, step),
                        with_bandwidth(context.planned, level),
                        context.traffic(Poisson(rate_rps)),
                        context.requests(_REQUESTS),
                        context.seed,
                        policy=policy,
                        links={link: Fluctuating(level, deviation, _CORRELATION_S)} if deviation else {},
                    )
                    for deviation in _DEVIATIONS
                ]
    return runs


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    levels, plans = _levels(context), _plans(context)
    rate_rps = _LOAD * context.lambda_max
    columns = ["bandwidth", "Λ_max planned (req/s)"]
    columns += [f"{policy}, {_named(deviation)}" for policy in _POLICIES for deviation in _DEVIATIONS]

    def table(rate: str) -> StudyTable:
        return StudyTable(
            columns,
            [
                [
                    format_bits_per_s(level),
                    f"{plan.lambda_max:.3g}",
                    *(
                        _cell(outcomes, _key(rate, policy, deviation, step))
                        for policy in _POLICIES
                        for deviation in _DEVIATIONS
                    ),
                ]
                for step, (level, plan) in enumerate(zip(levels, plans, strict=True))
            ],
        )

    return StudySection(
        question="How much bandwidth does the deployment need, and what if it fluctuates?",
        setup=(
            f"The link from {format_bits_per_s(levels[0])} to the file's {format_bits_per_s(levels[-1])}, "
            "constant or as an "
            "Ornstein–Uhlenbeck process with a relative standard deviation (sd) and a correlation time of "
            f"{_CORRELATION_S:g} s. Roles and threshold start as planned for the mean; both adapt."
        ),
        findings=[
            *(_first_stable(levels, plans, outcomes, context, policy) for policy in _POLICIES),
            *(_promise(levels, outcomes, policy) for policy in _POLICIES),
        ],
        tables={
            f"Mean TTFT in seconds at {rate_rps:.3g} req/s, {_LOAD:g} of Λ_max with the file's link": table(
                FULL
            ),
            f"Mean TTFT in seconds at {_LOAD:g} of what the planner finds for this bandwidth": table(OWN),
        },
        figures=[_figure(levels, outcomes, context)],
        notes=[f'"{UNSTABLE}": queues grow for as long as requests come.'],
    )


def _named(deviation: float) -> str:
    return f"sd {deviation:g}" if deviation else "constant"


def _cell(outcomes: Outcomes, key: Key) -> str:
    outcome = outcomes[key]
    return seconds(outcome.number("ttft_mean_s")) if outcome.is_stable else UNSTABLE


def _lowest(outcomes: Outcomes, rate: str, policy: str, deviation: float) -> int | None:
    """The first step from which on everything is stable."""
    found = None
    for step in reversed(range(_STEPS)):
        if not outcomes[_key(rate, policy, deviation, step)].is_stable:
            break
        found = step
    return found


def _first_stable(
    levels: Sequence[float],
    plans: Sequence[OperatingPoint],
    outcomes: Outcomes,
    context: StudyContext,
    policy: str,
) -> str:
    words = []
    for deviation in _DEVIATIONS:
        step = _lowest(outcomes, FULL, policy, deviation)
        words.append("nowhere" if step is None else f"from {format_bits_per_s(levels[step])} on")
    rate = _LOAD * context.lambda_max
    planned = next((step for step, plan in enumerate(plans) if plan.lambda_max > rate), None)
    by_plan = (
        "no bandwidth here would do by the planner"
        if planned is None
        else f"by the planner the first of these steps that could carry it is {format_bits_per_s(levels[planned])}"
    )
    return f"At {rate:.3g} req/s `{policy}` is stable {_by_deviation(words)}; {by_plan}."


def _by_deviation(words: Sequence[str]) -> str:
    """What holds for each deviation; once, if it is always the same."""
    if len(set(words)) == 1:
        return f"{words[0]}, however much the link fluctuates"
    return ", ".join(
        f"{text} ({_named(deviation)})" for text, deviation in zip(words, _DEVIATIONS, strict=True)
    )


def _promise(levels: Sequence[float], outcomes: Outcomes, policy: str) -> str:
    words = []
    for deviation in _DEVIATIONS:
        bad = [
            format_bits_per_s(levels[step])
            for step in range(_STEPS)
            if not outcomes[_key(OWN, policy, deviation, step)].is_stable
        ]
        words.append("except at " + ", ".join(bad) if bad else "at every step")
    worst = max(
        (
            outcomes[_key(OWN, policy, _DEVIATIONS[-1], step)].number("ttft_mean_s")
            / outcomes[_key(OWN, policy, 0.0, step)].number("ttft_mean_s")
            for step in range(_STEPS)
            if outcomes[_key(OWN, policy, _DEVIATIONS[-1], step)].is_stable
            and outcomes[_key(OWN, policy, 0.0, step)].is_stable
        ),
        default=None,
    )
    text = f"At {_LOAD:g} of the Λ_max planned for each bandwidth `{policy}` is stable {_by_deviation(words)}"
    if worst is None:
        return f"{text}."
    if worst < 1.02:
        return f"{text}; fluctuation nowhere adds 2 % to the mean TTFT."
    return f"{text}; the largest fluctuation adds up to {percent(worst - 1)} to the mean TTFT."


def _figure(levels: Sequence[float], outcomes: Outcomes, context: StudyContext) -> StudyFigure:
    gigabits = [level / 1e9 for level in levels]

    def curves(rate: str, field: str) -> list[PlotCurve]:
        return [
            PlotCurve(
                f"{policy}, {_named(deviation)}",
                gigabits,
                [
                    outcomes[key].number(field) if outcomes[key].is_stable else None
                    for key in (_key(rate, policy, deviation, step) for step in range(_STEPS))
                ],
                colour=number,
                is_dashed=deviation > 0,
            )
            for number, policy in enumerate(_POLICIES)
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
