"""The same deployment many times over."""

from collections.abc import Sequence

from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudySection, StudyTable
from studies._figures import Panel, PlotCurve, lines, more_or_less, seconds
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes
from studies._variants import times

_LOAD = 0.9
_FACTORS = (1, 2, 5, 10, 30, 100)
_QUICK_FACTORS = (1, 2)
_POLICIES = ("paper", "tilted")
_REQUESTS = 12_000
# Answers take half a minute: a shorter run would be over before the deployment is full.
_LEAST_S = 240.0


def _factors(context: StudyContext) -> tuple[int, ...]:
    return _QUICK_FACTORS if context.is_quick else _FACTORS


def _rates(context: StudyContext) -> dict[int, float]:
    return {
        factor: best_operation(problem_of(times(context.planned, factor))).lambda_max
        for factor in _factors(context)
    }


def _runs(context: StudyContext) -> Sequence[Run]:
    return [
        Run(
            (policy, factor, seed),
            times(context.planned, factor),
            context.traffic(Poisson(_LOAD * rate)),
            context.requests(max(_REQUESTS, round(_LEAST_S * _LOAD * rate))),
            seed,
            policy=policy,
            warmup_share=0.25,
            classes=length_classes(context),
        )
        for factor, rate in _rates(context).items()
        for policy in _POLICIES
        for seed in context.seeds()
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    rates, factors = _rates(context), _factors(context)
    first, last = factors[0], factors[-1]

    found = {
        (policy, factor): Repeats.seeded(outcomes, context.seeds(), policy, factor)
        for factor in factors
        for policy in _POLICIES
    }

    def fell(policy: str) -> str:
        start, end = found[policy, first], found[policy, last]
        return f"with `{policy}` it goes from {start.mean().seconds} to {end.mean().seconds} s ({end.against(start)})"

    gain = rates[last] / rates[first] / last
    return StudySection(
        question="What does a larger deployment gain?",
        setup=(
            f"So many times the instances of both clusters and the bandwidth of the link, at {_LOAD:g} of "
            "what the planner "
            f"finds for that size: {context.requests(_REQUESTS):,} requests, or four minutes of them if that is more. "
            "The first quarter of each run is warm-up."
        ),
        findings=[
            f"From 1 to {last} times the size, at the same load, the mean TTFT changes: {fell('paper')}, "
            f"{fell('tilted')}.",
            f"By the planner the service alone, without any waiting, takes {seconds(context.optimum.ttft_mean_s)} s.",
            f"By the planner there {_gain(gain)} for each instance, since roles are whole instances.",
        ],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["size", "Λ_max planned (req/s)", *_POLICIES, "offloaded (paper)"],
                [
                    [
                        f"{factor} ×",
                        f"{rates[factor]:,.4g}",
                        *(found[policy, factor].ttft for policy in _POLICIES),
                        found["paper", factor].mean("offloaded_fraction").percent(),
                    ]
                    for factor in factors
                ],
            ),
            TAIL_TITLE: tail_table(
                "size, policy",
                {f"{factor} ×, {policy}": each for (policy, factor), each in found.items()},
                length_classes(context),
            ),
        },
        figures=[
            lines(
                "scale",
                "TTFT over the size of the deployment.",
                "times the deployment file",
                [
                    Panel(
                        title,
                        [
                            PlotCurve(
                                policy,
                                factors,
                                [found[policy, factor].mean(field).mean for factor in factors],
                                number,
                            )
                            for number, policy in enumerate(_POLICIES)
                        ],
                    )
                    for title, field in (("mean TTFT (s)", "ttft_mean_s"), ("P90 of TTFT (s)", "ttft_p90_s"))
                ],
                x_log=True,
            )
        ],
    )


def _gain(gain: float) -> str:
    words = more_or_less(gain)
    return "is the same throughput" if words == "the same" else f"is {words} throughput at the largest size"


SCALE = Study("scale", "One deployment, up to a hundred times", _runs, _describe)
