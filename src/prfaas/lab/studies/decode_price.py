"""The wait for a decode slot as a price in seconds, against a yes or no."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prfaas.core.deployment import load_planned
from prfaas.core.deployment.examples import example_path
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.scheduling import Decision, Policy, RoutingRequest, View, make_policy
from prfaas.core.scheduling.decoders import decode_choices, load_of
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.figures import difference, listed, mean, mean_and_p90, seconds
from prfaas.lab.studies.study import Outcomes, Run, Study, StudySection, StudyTable

_EXAMPLE = "multi.yaml"
_LOADS = (0.7, 0.85, 0.95)
_REQUESTS = 20_000
_SEEDS = 3
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
        )
        for load in _LOADS
        for variant, policy in _VARIANTS.items()
        for seed in multi.seeds(_SEEDS)
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    seeds = context.seeds(_SEEDS)

    def values(variant: str, load: float, number: str = "ttft_mean_s") -> list[float]:
        return [outcomes[variant, load, seed].number(number) for seed in seeds]

    def cell(variant: str, load: float) -> str:
        is_stable = all(outcomes[variant, load, seed].is_stable for seed in seeds)
        return mean_and_p90(
            mean(values(variant, load)), mean(values(variant, load, "ttft_p90_s")), is_stable=is_stable
        )

    gains = [
        f"from {seconds(mean(values(_YES_OR_NO, load)))} to {seconds(mean(values('`paper`', load)))} s at {load:g} "
        f"({difference(values('`paper`', load), values(_YES_OR_NO, load))})"
        for load in _LOADS
    ]
    return StudySection(
        question="What is it worth to price the wait for a decode slot?",
        setup=(
            f"`examples/{_EXAMPLE}`, whose two decode pools share what comes. Roles and "
            f"thresholds stay as planned. Poisson arrivals, {len(seeds)} seeds of "
            f"{context.requests(_REQUESTS):,} requests. "
            f'"{_YES_OR_NO}" is `paper` with a PD cluster without a free slot after all others. Elsewhere the wait '
            "for the slot counts in seconds, as part of the predicted TTFT."
        ),
        findings=[f"With the wait counted in seconds, the mean TTFT of `paper` goes {listed(gains)}."],
        tables={
            "TTFT in seconds, mean (P90)": StudyTable(
                ["load", *_VARIANTS],
                [[f"{load:g}", *(cell(variant, load) for variant in _VARIANTS)] for load in _LOADS],
            )
        },
    )


DECODE_PRICE = Study("decode-price", "What the wait for a decode slot is worth", _runs, _describe)
