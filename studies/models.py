"""The paper's machines with other models than the paper's."""

from collections.abc import Mapping, Sequence

from prfaas.core.units import KIB, format_bits_per_s
from prfaas.core.workload.arrivals import Poisson
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudySection, StudyTable
from studies._figures import NONE, bars, listed, percent
from studies._other_models import ModelFleet, other_models
from studies._repeats import Repeats, tail_table
from studies._runs import Run, length_classes

_LOAD = 0.8
_REQUESTS = 6_000
_SEEDS = 5
WITH, ALONE = "PrfaaS", "PD alone"
"""The two systems of every model."""


def _rate_rps(fleet: ModelFleet) -> float:
    """What both of a model's systems can carry."""
    return _LOAD * min(fleet.context.lambda_max, fleet.baseline.point.lambda_max)


def _runs(context: StudyContext) -> Sequence[Run]:
    policy = context.planned.routing.policy
    return [
        Run(
            (name, system, seed),
            fleet.context.planned if system == WITH else fleet.alone,
            fleet.context.traffic(Poisson(_rate_rps(fleet))),
            context.requests(_REQUESTS),
            seed,
            policy=policy,
            classes=length_classes(context),
        )
        for name, fleet in other_models(context).items()
        for system in (WITH, ALONE)
        for seed in context.seeds(_SEEDS)
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    fleets = other_models(context)
    found = {
        (name, system): Repeats.of(outcomes, [(name, system, seed) for seed in context.seeds(_SEEDS)])
        for name in fleets
        for system in (WITH, ALONE)
    }
    first = next(iter(fleets.values()))
    rows = {
        f"{fleet.label}, {system}": found[name, system]
        for name, fleet in fleets.items()
        for system in (WITH, ALONE)
    }
    return StudySection(
        question="Does PrfaaS pay with other models than the paper's?",
        setup=(
            "The file's machines, link and prompts with every model whose speed on the PrfaaS cluster's hardware is "
            f"known; roles and threshold as planned for it. *{ALONE}* is {first.alone.pd_clusters[0].gpus} "
            f"{first.baseline.hardware}, "
            + ("for the same money" if context.planned.prices else "as many GPUs")
            + f". Both meet the same requests at {_LOAD:g} of what the weaker of them can carry by the planner; "
            f"`{context.planned.routing.policy}`, {len(context.seeds(_SEEDS))} seeds of "
            f"{context.requests(_REQUESTS):,} requests."
        ),
        findings=[_planned(fleets), *_simulated(fleets, found)],
        tables={
            "Planned": _plan_table(fleets),
            "TTFT in seconds": tail_table("model, system", rows, length_classes(context)),
        },
        figures=[
            bars(
                "models",
                f"Mean TTFT of PrfaaS over that of {ALONE}; where queues grow there is no bar.",
                f"mean TTFT, {WITH} / {ALONE}",
                [fleet.label for fleet in fleets.values()],
                [_ratio(found, name) for name in fleets],
            )
        ],
        notes=[
            "*: nobody has published how fast the PD cluster's hardware is with this model; it is taken to be slower "
            "than the PrfaaS cluster's by as much as with the file's model."
        ],
    )


def _plan_table(fleets: Mapping[str, ModelFleet]) -> StudyTable:
    rows = []
    for fleet in fleets.values():
        point = fleet.context.optimum
        rows.append(
            [
                fleet.label,
                f"{fleet.model.token_bytes / KIB:.3g} KiB",
                f"{point.lambda_max:.3g}",
                NONE if point.threshold_tokens is None else f"{point.threshold_tokens / 1000:.3g}K",
                f"{point.n_prefill} / {point.n_decode}",
                percent(point.offloaded_fraction),
                format_bits_per_s(point.egress_bits_per_s),
                f"{fleet.baseline.point.lambda_max:.3g}",
                f"{point.lambda_max / fleet.baseline.point.lambda_max:.2f}",
            ]
        )
    return StudyTable(
        [
            "model",
            "KV per token",
            "Λ_max (req/s)",
            "threshold",
            "prefill / decode",
            "offloaded",
            "egress",
            f"{ALONE}: Λ_max",
            "ratio",
        ],
        rows,
    )


def _planned(fleets: Mapping[str, ModelFleet]) -> str:
    ratios = {
        fleet.label: fleet.context.lambda_max / fleet.baseline.point.lambda_max for fleet in fleets.values()
    }
    more = [f"{label} ({ratio:.2f} times)" for label, ratio in ratios.items() if ratio > 1]
    less = [f"{label} ({ratio:.2f} times)" for label, ratio in ratios.items() if ratio <= 1]
    return f"By the planner PrfaaS carries more than {ALONE} with {listed(more)}, and no more with {listed(less)}."


def _ratio(found: Mapping[tuple[str, str], Repeats], name: str) -> float:
    with_it, alone = found[name, WITH], found[name, ALONE]
    if "grows" in (with_it.verdict, alone.verdict):
        return float("nan")
    return with_it.against(alone).mean + 1


def _simulated(fleets: Mapping[str, ModelFleet], found: Mapping[tuple[str, str], Repeats]) -> list[str]:
    shorter: list[str] = []
    longer: list[str] = []
    same: list[str] = []
    grows: list[str] = []
    for name, fleet in fleets.items():
        with_it, alone = found[name, WITH], found[name, ALONE]
        if "grows" in (with_it.verdict, alone.verdict):
            grows.append(fleet.label)
            continue
        change = with_it.against(alone)
        told = f"{fleet.label} ({change}; P99 {with_it.against(alone, 'ttft_p99_s')})"
        (same if not change.is_clear else shorter if change.mean < 0 else longer).append(told)
    return [
        f"{text} with {listed(names)}."
        for text, names in (
            ("Simulated, its mean TTFT is shorter", shorter),
            ("It is longer", longer),
            ("No difference can be told from chance", same),
            ("Queues grow in one of the two", grows),
        )
        if names
    ]


MODELS = Study("models", "Other models than the paper's", _runs, _describe)
