"""The same deployment many times over."""

from collections.abc import Sequence

from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.studies.context import StudyContext, times
from prfaas.lab.studies.figures import Panel, PlotCurve, lines, mean_and_p90, more_or_less, percent, seconds
from prfaas.lab.studies.study import Outcomes, Run, Study, StudySection, StudyTable

_LOAD = 0.9
_FACTORS = (1, 2, 5, 10, 20, 50, 100)
_QUICK_FACTORS = (1, 2)
_POLICIES = ("paper", "tilted")
_REQUESTS = 20_000
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
            (policy, factor),
            times(context.planned, factor),
            context.traffic(Poisson(_LOAD * rate)),
            context.requests(max(_REQUESTS, round(_LEAST_S * _LOAD * rate))),
            context.seed,
            policy=policy,
            warmup_share=0.25,
        )
        for factor, rate in _rates(context).items()
        for policy in _POLICIES
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    rates, factors = _rates(context), _factors(context)
    first, last = factors[0], factors[-1]

    def cell(policy: str, factor: int) -> str:
        outcome = outcomes[policy, factor]
        return mean_and_p90(
            outcome.number("ttft_mean_s"), outcome.number("ttft_p90_s"), is_stable=outcome.is_stable
        )

    def fell(policy: str) -> str:
        start, end = (outcomes[policy, factor].number("ttft_mean_s") for factor in (first, last))
        verb = "falls" if end < start else "rises"
        return f"with `{policy}` it {verb} from {seconds(start)} to {seconds(end)} s"

    gain = rates[last] / rates[first] / last
    return StudySection(
        question="What does a larger deployment gain?",
        setup=(
            f"So many times the instances of both clusters and the bandwidth of the link, at {_LOAD:g} of "
            "what the planner "
            f"finds for that size. The first quarter of each run is warm-up."
        ),
        findings=[
            f"At the same load the mean TTFT changes with size: {fell('paper')}, {fell('tilted')}. The best service "
            f"without any waiting would be about {seconds(context.optimum.ttft_mean_s)} s at the "
            "planner's routes. For "
            f"each instance there {_gain(gain)}, since roles are whole instances."
        ],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["size", "Λ_max planned (req/s)", *_POLICIES, "offloaded (paper)"],
                [
                    [
                        f"{factor} ×",
                        f"{rates[factor]:,.4g}",
                        *(cell(policy, factor) for policy in _POLICIES),
                        percent(outcomes["paper", factor].number("offloaded_fraction")),
                    ]
                    for factor in factors
                ],
            )
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
                                [outcomes[policy, factor].number(field) for factor in factors],
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
