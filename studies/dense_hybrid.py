"""From which bandwidth on PrfaaS beats the same money without it: models that keep every token, and hybrid ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from prfaas.core.planner import PlanProblem, best_operation, problem_of
from prfaas.core.planner.ttft_target import best_within_target
from prfaas.core.units import KIB, format_bits_per_s
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Key, Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import NONE, Panel, PlotCurve, SeedMean, lines, seed_mean
from studies._other_models import ModelFleet, other_models
from studies._repeats import Repeats, tail_table
from studies._runs import Run, length_classes
from studies._variants import with_bandwidth

_LOAD = 0.85
_FACTORS = (0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.8)
"""Bandwidths that are simulated, times that at which the planner's TTFTs are equal."""
_NARROWEST, _WIDEST = 1e8, 1e12
# To two thousandths.
_BISECTIONS = 12
_REQUESTS = 3_000
_SEEDS = 5
ALONE = 0.0
"""In place of the factor, in runs without PrfaaS."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A model and the bandwidths at which the planner finds both systems equal; None: at none of them."""

    fleet: ModelFleet
    by_rate: float | None
    """By Λ_max."""
    by_ttft: float | None
    """By the mean TTFT at the simulated rate."""

    @property
    def rate_rps(self) -> float:
        return _LOAD * self.fleet.baseline.point.lambda_max

    def bandwidth(self, factor: float) -> float:
        middle = self.by_ttft or self.fleet.context.planned.links[0].bandwidth_bits_per_s
        return factor * middle


# To plan it takes seconds, and both what is run and what is told need it.
@lru_cache(maxsize=1)
def _planned(context: StudyContext) -> Mapping[str, _Planned]:
    return {name: _planned_of(fleet) for name, fleet in other_models(context).items()}


def _planned_of(fleet: ModelFleet) -> _Planned:
    alone_rps = fleet.baseline.point.lambda_max
    rate_rps = _LOAD * alone_rps
    alone_s = _mean_s(problem_of(fleet.alone), rate_rps)
    problem = fleet.context.problem
    return _Planned(
        fleet,
        _first(problem, lambda here: best_operation(here).lambda_max >= alone_rps),
        _first(problem, lambda here: _mean_s(here, rate_rps) <= alone_s),
    )


def _mean_s(problem: PlanProblem, rate_rps: float) -> float:
    """The planner's estimate of the TTFT; infinite where it can't carry the rate."""
    operation = best_within_target(problem)
    if rate_rps >= operation.point.lambda_max:
        return math.inf
    mean_s = operation.estimate(rate_rps / operation.point.lambda_max).mean_s
    return math.inf if mean_s is None else mean_s


def _first(problem: PlanProblem, is_enough: Callable[[PlanProblem], bool]) -> float | None:
    """The least bandwidth that is enough; None if none is."""

    def enough(bandwidth: float) -> bool:
        links = tuple(replace(link, bandwidth_bits_per_s=bandwidth) for link in problem.links)
        return is_enough(replace(problem, links=links))

    low, high = _NARROWEST, _WIDEST
    if not enough(high):
        return None
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _key(name: str, factor: float, seed: int) -> Key:
    return (name, factor, seed)


def _runs(context: StudyContext) -> Sequence[Run]:
    policy = context.planned.routing.policy
    return [
        Run(
            _key(name, factor, seed),
            with_bandwidth(planned.fleet.context.planned, planned.bandwidth(factor))
            if factor
            else planned.fleet.alone,
            planned.fleet.context.traffic(Poisson(planned.rate_rps)),
            context.requests(_REQUESTS),
            seed,
            policy=policy,
            classes=length_classes(context),
        )
        for name, planned in _planned(context).items()
        for factor in (ALONE, *_FACTORS)
        for seed in context.seeds(_SEEDS)
    ]


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Where the simulated mean TTFTs of both systems are equal, over the seeds."""

    found: Sequence[float | None]
    """Of each seed in bit/s; None: PrfaaS is ahead of PD alone at every bandwidth, or at none."""

    @property
    def mean(self) -> SeedMean | None:
        """None if some seed has none."""
        known = [each for each in self.found if each is not None]
        return seed_mean(known) if len(known) == len(self.found) else None

    @property
    def text(self) -> str:
        mean = self.mean
        if mean is None:
            count = sum(each is not None for each in self.found)
            return "outside" if count == 0 else f"outside for {len(self.found) - count} of {len(self.found)}"
        return mean.gigabits


def _crossing(planned: _Planned, outcomes: Outcomes, name: str, seeds: Sequence[int]) -> _Crossing:
    found: list[float | None] = []
    for seed in seeds:
        alone_s = outcomes[_key(name, ALONE, seed)].number("ttft_mean_s")
        ratios = [outcomes[_key(name, factor, seed)].number("ttft_mean_s") / alone_s for factor in _FACTORS]
        found.append(_last_equal(planned, ratios))
    return _Crossing(found)


def _last_equal(planned: _Planned, ratios: Sequence[float]) -> float | None:
    """Between the last bandwidth at which PrfaaS is behind and the next, straight in logarithms."""
    points = list(zip(_FACTORS, ratios, strict=True))
    for (low, before), (high, after) in reversed(list(pairwise(points))):
        if before > 1 >= after:
            share = math.log(before) / (math.log(before) - math.log(after))
            return planned.bandwidth(low * (high / low) ** share)
    return None


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    plans, seeds = _planned(context), context.seeds(_SEEDS)
    crossings = {name: _crossing(planned, outcomes, name, seeds) for name, planned in plans.items()}
    runs = {
        (name, factor): Repeats.of(outcomes, [_key(name, factor, seed) for seed in seeds])
        for name in plans
        for factor in (ALONE, *_FACTORS)
    }
    tails = {
        f"{planned.fleet.label}, {_named(planned, factor)}": runs[name, factor]
        for name, planned in plans.items()
        for factor in (ALONE, 0.5, 1.0, 2.0)
    }
    return StudySection(
        question="From which bandwidth on does PrfaaS beat PD alone, with dense and with hybrid models?",
        setup=(
            "The file's machines and prompts with every model whose speed on the PrfaaS cluster's hardware is known, "
            "against PD alone "
            + ("for the same money" if context.planned.prices else "of as many GPUs")
            + f". Planned: the bandwidth at which both have the same Λ_max, and at which both have the same mean TTFT "
            f"at {_LOAD:g} of what PD alone can carry. Simulated: the mean TTFT at that rate and {len(_FACTORS)} "
            f"bandwidths from {_FACTORS[0]:g} to {_FACTORS[-1]:g} times the second; "
            f"`{context.planned.routing.policy}`, {len(seeds)} seeds of {context.requests(_REQUESTS):,} requests."
        ),
        findings=[*_kinds(plans, crossings), _agreement(plans, crossings)],
        tables={
            "Bandwidth at which PrfaaS and PD alone are equal": _table(plans, crossings),
            "TTFT in seconds, around the bandwidth of the plan": tail_table(
                "model, bandwidth", tails, length_classes(context)
            ),
        },
        figures=[_figure(plans, runs)],
        notes=[
            "Simulated bandwidths are read between two steps, straight in logarithms. Where queues grow below the "
            "step, its mean TTFT depends on the length of the run, so such a value is true to a step, a factor of "
            f'{_FACTORS[1] / _FACTORS[0]:.2g}. "outside": not between the first and the last step.',
            "*: nobody has published how fast the PD cluster's hardware is with this model; it is taken to be slower "
            "than the PrfaaS cluster's by as much as with the file's model.",
        ],
    )


def _named(planned: _Planned, factor: float) -> str:
    return format_bits_per_s(planned.bandwidth(factor)) if factor else "PD alone"


def _kind(planned: _Planned) -> str:
    return "hybrid" if planned.fleet.model.is_hybrid else "dense"


def _table(plans: Mapping[str, _Planned], crossings: Mapping[str, _Crossing]) -> StudyTable:
    return StudyTable(
        [
            "model",
            "kind",
            "KV per token",
            "planned, same Λ_max",
            "planned, same TTFT",
            "simulated, same TTFT",
        ],
        [
            [
                planned.fleet.label,
                _kind(planned),
                f"{planned.fleet.model.token_bytes / KIB:.3g} KiB",
                NONE if planned.by_rate is None else format_bits_per_s(planned.by_rate),
                NONE if planned.by_ttft is None else format_bits_per_s(planned.by_ttft),
                crossings[name].text,
            ]
            for name, planned in plans.items()
        ],
    )


def _kinds(plans: Mapping[str, _Planned], crossings: Mapping[str, _Crossing]) -> list[str]:
    found = []
    for kind in ("hybrid", "dense"):
        told = {
            planned.fleet.label: crossing.mean
            for name, planned in plans.items()
            for crossing in [crossings[name]]
            if _kind(planned) == kind
        }
        known = sorted((mean.mean, mean.gigabits, label) for label, mean in told.items() if mean is not None)
        if known:
            (_, low, lowest), (_, high, highest) = known[0], known[-1]
            found.append(
                f"With {kind} models PrfaaS has the shorter mean TTFT from {low} ({lowest}) to {high} ({highest}) on."
                if len(known) > 1
                else f"With the {kind} model {lowest} PrfaaS has the shorter mean TTFT from {low} on."
            )
        rates = sorted(
            (planned.by_rate, planned.fleet.label)
            for planned in plans.values()
            if _kind(planned) == kind and planned.by_rate is not None
        )
        if rates:
            found.append(
                f"By the planner's Λ_max {kind} models need {format_bits_per_s(rates[0][0])} ({rates[0][1]}) to "
                f"{format_bits_per_s(rates[-1][0])} ({rates[-1][1]})."
            )
    return found


def _agreement(plans: Mapping[str, _Planned], crossings: Mapping[str, _Crossing]) -> str:
    ratios = [
        (mean.mean / planned.by_ttft, planned.fleet.label)
        for name, planned in plans.items()
        for mean in [crossings[name].mean]
        if mean is not None and planned.by_ttft is not None
    ]
    if not ratios:
        return "No simulated bandwidth can be compared with a planned one."
    (low, lowest), (high, highest) = min(ratios), max(ratios)
    return (
        f"The simulated bandwidths are {low:.2f} ({lowest}) to {high:.2f} times ({highest}) those of the planner's "
        "TTFTs."
    )


def _figure(plans: Mapping[str, _Planned], runs: Mapping[tuple[str, float], Repeats]) -> StudyFigure:
    def ratio(name: str, factor: float) -> float | None:
        each, alone = runs[name, factor], runs[name, ALONE]
        return None if "grows" in (each.verdict, alone.verdict) else each.against(alone).mean + 1

    return lines(
        "dense-hybrid",
        "Mean TTFT of PrfaaS over that of PD alone at the same rate, over the link's bandwidth; solid: hybrid models, "
        "dashed: dense ones. Below 1 PrfaaS is ahead; nothing is drawn where queues grow.",
        "bandwidth (Gbit/s)",
        [
            Panel(
                "mean TTFT, PrfaaS / PD alone",
                [
                    PlotCurve(
                        planned.fleet.label,
                        [planned.bandwidth(factor) / 1e9 for factor in _FACTORS],
                        [ratio(name, factor) for factor in _FACTORS],
                        number,
                        is_dashed=_kind(planned) == "dense",
                    )
                    for number, (name, planned) in enumerate(plans.items())
                ],
            )
        ],
        x_log=True,
        height=3.2,
    )


DENSE_HYBRID = Study("dense-hybrid", "Dense and hybrid models by bandwidth", _runs, _describe)
