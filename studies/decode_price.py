"""The wait for a decode slot as a price in seconds, against a yes or no."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prfaas.core.deployment import load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices, load_of
from prfaas.core.scheduling.policy import Policy, make_policy
from prfaas.core.scheduling.view import View
from prfaas.core.shipped import example_path
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudySection, StudyTable
from studies._figures import listed
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes

_EXAMPLE = "multi.yaml"
_LOADS = (0.7, 0.85, 0.95)
_REQUESTS = 12_000
_YES_OR_NO = "a free slot first"


@dataclass(frozen=True, slots=True)
class FreeSlotFirst:
    """Policy `paper` for which the wait for a decode slot is a yes or no.

    PD clusters without a free slot come after all that have one, and are else compared by the prefill alone.
    """

    name = "free_slot_first"
    paper: Policy = field(default_factory=lambda: make_policy("paper"), init=False)

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        choices = decode_choices(request, view)
        free = [cluster.name for cluster, decode in choices if load_of(decode) < 1.0]
        shown = free or [cluster.name for cluster, _ in choices]
        clusters = {
            name: replace(cluster, slot_s=0.0)
            for name, cluster in view.clusters.items()
            if cluster.kind == "prfaas" or name in shown
        }
        return self.paper.decide(request, replace(view, clusters=clusters))


_VARIANTS = {
    _YES_OR_NO: f"{FreeSlotFirst.__module__}:{FreeSlotFirst.__qualname__}",
    "`paper`": "paper",
    "`tilted`": "tilted",
    "`least_ttft`": "least_ttft",
}


def _multi(context: StudyContext) -> StudyContext:
    """Of the example with several PD clusters, whatever deployment the other studies are of."""
    planned = load_planned(example_path(_EXAMPLE))
    problem = problem_of(planned)
    return replace(context, planned=planned, problem=problem, optimum=best_operation(problem))


def _runs(context: StudyContext) -> Sequence[Run]:
    multi = _multi(context)
    return [
        Run(
            (variant, load, seed),
            multi.planned,
            multi.poisson(load),
            multi.requests(_REQUESTS),
            seed,
            policy=policy,
            adapts=False,
            allocation=False,
            classes=length_classes(multi),
        )
        for load in _LOADS
        for variant, policy in _VARIANTS.items()
        for seed in multi.seeds()
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    found = {
        (variant, load): Repeats.seeded(outcomes, context.seeds(), variant, load)
        for load in _LOADS
        for variant in _VARIANTS
    }
    gains = [_gain(found["`paper`", load], found[_YES_OR_NO, load], load) for load in _LOADS]
    return StudySection(
        question="What is it worth to price the wait for a decode slot?",
        setup=(
            f"`examples/{_EXAMPLE}`, whose two decode pools share what comes. Roles and "
            f"thresholds stay as planned. Poisson arrivals, "
            f"{context.requests(_REQUESTS):,} requests. "
            f'"{_YES_OR_NO}" is `paper` with a PD cluster without a free slot after all others. Elsewhere the wait '
            "for the slot counts in seconds, as part of the predicted TTFT."
        ),
        findings=[f"With the wait counted in seconds, the mean TTFT of `paper` goes {listed(gains)}."],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["load", *_VARIANTS],
                [[f"{load:g}", *(found[variant, load].ttft for variant in _VARIANTS)] for load in _LOADS],
            ),
            TAIL_TITLE: tail_table(
                "load, policy",
                {f"{load:g}, {variant}": each for (variant, load), each in found.items()},
                length_classes(_multi(context)),
            ),
        },
    )


def _gain(priced: Repeats, yes_or_no: Repeats, load: float) -> str:
    before = yes_or_no.grows if yes_or_no.verdict == "grows" else f"{yes_or_no.mean().seconds} s"
    after = priced.grows if priced.verdict == "grows" else f"{priced.mean().seconds} s"
    if "grows" in (priced.verdict, yes_or_no.verdict):
        return f'from "{before}" to "{after}" at {load:g}'
    return f"from {before} to {after} at {load:g} ({priced.against(yes_or_no)})"


DECODE_PRICE = Study("decode-price", "What the wait for a decode slot is worth", _runs, _describe)
