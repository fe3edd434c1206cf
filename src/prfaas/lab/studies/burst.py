"""What bursts do at the same mean load."""

from collections.abc import Sequence

from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.figures import (
    Panel,
    PlotCurve,
    difference,
    lines,
    listed,
    mean,
    mean_and_p90,
    times_as_long,
)
from prfaas.lab.studies.study import Outcomes, Run, Study, StudySection, StudyTable
from prfaas.lab.studies.traffic import BURST_S, CALM_S, bursts

_LOAD = 0.8
_PEAKS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
_POLICIES = ("paper", "tilted", "least_ttft", "static_threshold")
_SEEDS = 3
_REQUESTS = 10_000


def _runs(context: StudyContext) -> Sequence[Run]:
    return [
        Run(
            (policy, peak, seed),
            context.planned,
            context.traffic(bursts(_LOAD * context.lambda_max, peak)),
            context.requests(_REQUESTS),
            seed,
            policy=policy,
            # What it stands for: nothing ever changes.
            adapts=policy != "static_threshold",
            allocation=policy != "static_threshold",
        )
        for peak in _PEAKS
        for policy in _POLICIES
        for seed in context.seeds(_SEEDS)
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    seeds = context.seeds(_SEEDS)

    def values(policy: str, peak: float, field: str) -> list[float]:
        return [outcomes[policy, peak, seed].number(field) for seed in seeds]

    def is_stable(policy: str) -> bool:
        # Bursts come and go; the mean load is what Poisson arrivals have.
        return all(outcomes[policy, _PEAKS[0], seed].is_stable for seed in seeds)

    def cell(policy: str, peak: float) -> str:
        means = (mean(values(policy, peak, field)) for field in ("ttft_mean_s", "ttft_p90_s"))
        return mean_and_p90(*means, is_stable=is_stable(policy))

    calm, wild = _PEAKS[0], _PEAKS[-1]
    growth = {
        policy: mean(values(policy, wild, "ttft_mean_s")) / mean(values(policy, calm, "ttft_mean_s"))
        for policy in _POLICIES
    }
    order = sorted(_POLICIES, key=lambda policy: mean(values(policy, wild, "ttft_mean_s")))
    compared = difference(values("tilted", wild, "ttft_mean_s"), values("paper", wild, "ttft_mean_s"))
    verdict = (
        f"`tilted` differs from `paper` there by {compared}"
        if compared.is_clear
        else f"there `tilted` and `paper` can't be told apart ({compared})"
    )
    return StudySection(
        question="What do bursts do while the mean load stays the same?",
        setup=(
            f"A Markov-modulated Poisson process at a mean of {_LOAD:g} Λ_max: bursts of some times the mean rate "
            f"for {BURST_S:g} s on average, between them {CALM_S:g} s on average of what is left; peak 1 is Poisson, "
            f"at peak 5 everything comes in bursts. {len(seeds)} seeds."
        ),
        findings=[
            f"From Poisson arrivals to a peak of {wild:g} the mean TTFT becomes "
            + listed([f"{times_as_long(growth[policy])} with `{policy}`" for policy in _POLICIES])
            + f"; the shortest at that peak has `{order[0]}`, the longest `{order[-1]}`, and {verdict}."
        ],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["peak rate / mean", *_POLICIES],
                [[f"{peak:g}", *(cell(policy, peak) for policy in _POLICIES)] for peak in _PEAKS],
            )
        },
        figures=[
            lines(
                "burst",
                "TTFT over the height of bursts.",
                "peak rate / mean rate",
                [
                    Panel(
                        title,
                        [
                            PlotCurve(
                                policy, _PEAKS, [mean(values(policy, peak, field)) for peak in _PEAKS], number
                            )
                            for number, policy in enumerate(_POLICIES)
                        ],
                        is_log=True,
                    )
                    for title, field in (("mean TTFT (s)", "ttft_mean_s"), ("P90 of TTFT (s)", "ttft_p90_s"))
                ],
            )
        ],
    )


BURST = Study("burst", "Bursts at the same mean load", _runs, _describe)
