"""What bursts do at the same mean load."""

from collections.abc import Sequence

from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import Panel, PlotCurve, lines, listed
from studies._repeats import TAIL_TITLE, TTFT, Repeats, tail_table
from studies._runs import Run, length_classes
from studies._traffic import BURST_S, CALM_S, bursts

_LOAD = 0.8
_PEAKS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
_TOLD_PEAKS = (1.0, 2.0, 5.0)
"""Of which tails are told."""
_POLICIES = ("paper", "tilted", "least_ttft", "static_threshold")
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
            classes=length_classes(context),
        )
        for peak in _PEAKS
        for policy in _POLICIES
        for seed in context.seeds()
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    found = {
        (policy, peak): Repeats.seeded(outcomes, context.seeds(), policy, peak)
        for policy in _POLICIES
        for peak in _PEAKS
    }
    return StudySection(
        question="What do bursts do while the mean load stays the same?",
        setup=(
            f"A Markov-modulated Poisson process at a mean of {_LOAD:g} Λ_max: bursts of some times the mean rate "
            f"for {BURST_S:g} s on average, between them {CALM_S:g} s on average of what is left; peak 1 is Poisson, "
            f"at peak 5 everything comes in bursts. {context.requests(_REQUESTS):,} requests."
        ),
        findings=_findings(found),
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["peak rate / mean", *_POLICIES],
                [[f"{peak:g}", *(found[policy, peak].ttft for policy in _POLICIES)] for peak in _PEAKS],
            ),
            TAIL_TITLE: tail_table(
                "peak, policy",
                {f"{peak:g}, {policy}": found[policy, peak] for peak in _TOLD_PEAKS for policy in _POLICIES},
                length_classes(context),
            ),
        },
        figures=[_figure(found)],
    )


def _findings(found: dict[tuple[str, float], Repeats]) -> list[str]:
    calm, wild = _PEAKS[0], _PEAKS[-1]
    grown = [
        f"{found[policy, wild].against(found[policy, calm]).times} with `{policy}`" for policy in _POLICIES
    ]
    order = sorted(_POLICIES, key=lambda policy: found[policy, wild].mean().mean)
    told = [f"`{policy}` {found[policy, wild].mean().seconds} s" for policy in order]
    sentences = [
        f"From Poisson arrivals to a peak of {wild:g} the mean TTFT becomes {listed(grown)} as long.",
        f"At that peak it is, the shortest first: {listed(told)}.",
    ]
    for policy in _POLICIES[1:]:
        ahead = [
            f"{found[policy, peak].against(found[_POLICIES[0], peak], TTFT)} at peak {peak:g}"
            for peak in _TOLD_PEAKS
        ]
        sentences.append(f"Against `{_POLICIES[0]}` the mean TTFT of `{policy}` differs by {listed(ahead)}.")
    return sentences


def _figure(found: dict[tuple[str, float], Repeats]) -> StudyFigure:
    return lines(
        "burst",
        "TTFT over the height of bursts.",
        "peak rate / mean rate",
        [
            Panel(
                title,
                [
                    PlotCurve(
                        policy, _PEAKS, [found[policy, peak].mean(field).mean for peak in _PEAKS], number
                    )
                    for number, policy in enumerate(_POLICIES)
                ],
                is_log=True,
            )
            for title, field in (("mean TTFT (s)", "ttft_mean_s"), ("P90 of TTFT (s)", "ttft_p90_s"))
        ],
    )


BURST = Study("burst", "Bursts at the same mean load", _runs, _describe)
