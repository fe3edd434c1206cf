"""What egress may cost: where PrfaaS loses its advantage, and what routing by the price of bytes saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from prfaas.core.kv.published import published_model
from prfaas.core.latency.files import load_profile, profile_names
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.planner import KvSize, PlanProblem, best_operation
from prfaas.core.planner.comparisons import homogeneous
from prfaas.core.planner.cost import break_even_per_gb, gb_per_hour, instances_per_hour
from prfaas.core.units import GB, SECONDS_PER_HOUR, format_bits_per_s
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Outcomes, Study, StudyFigure, StudySection, StudyTable
from studies._figures import (
    NONE,
    Panel,
    PlotCurve,
    difference,
    lines,
    listed,
    seed_mean,
)
from studies._repeats import TAIL_TITLE, Repeats, tail_table
from studies._runs import Run, length_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

_BANDWIDTHS = (1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11)
_LOADS = (0.3, 0.5, 0.8)
# Of the price at which the planned mean offloaded prompt is just worth its bytes.
_PRICES = (0.25, 0.5, 0.9, 1.1, 1.5, 3.0)
_POLICY = "tilted"
_REQUESTS = 8_000
FREE = 0.0
"""The price in runs that route as if bytes cost nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _ScaledTime:
    """Prefill seconds of a model on hardware where only another model was measured: slower by as much."""

    fast_s: LatencyProfile
    """The model on the other hardware."""
    known: PlanProblem
    """The file's problem: its model on both."""

    def __call__(self, tokens: "FloatArray") -> "FloatArray":
        slower: FloatArray = self.known.pd[0].prefill_s(tokens) / self.known.prfaas[0].prefill_s(tokens)
        return self.fast_s.prefill_s(tokens) * slower


def _problems(context: StudyContext) -> dict[str, PlanProblem]:
    """The file's problem with every model that a profile says how fast it is on the PrfaaS cluster's hardware."""
    known, low, high = context.problem, *context.range_tokens
    found = {context.planned.kv_model.name: known}
    profiles = [load_profile(name) for name in profile_names()]
    for profile in profiles:
        covers = profile.prefill.covers(low, high)
        if profile.hardware != known.prfaas[0].hardware or profile.model in found or not covers:
            continue
        near = [
            each for each in profiles if (each.model, each.hardware) == (profile.model, known.pd[0].hardware)
        ]
        near_s = near[0].prefill_s if near else _ScaledTime(profile, known)
        found[profile.model] = replace(
            known,
            prfaas=(replace(known.prfaas[0], prefill_s=profile.prefill_s),),
            pd=(replace(known.pd[0], prefill_s=near_s),),
            kv_bytes=KvSize(published_model(profile.model).kv_model),
        )
    return found


def _break_even(problem: PlanProblem) -> list[float | None]:
    """At every bandwidth; None where nothing is offloaded, or instances have no price."""
    alone = homogeneous(problem)
    price = problem.prices.get(alone.hardware)
    found: list[float | None] = []
    for bandwidth in _BANDWIDTHS:
        links = tuple(replace(link, bandwidth_bits_per_s=bandwidth) for link in problem.links)
        here = replace(problem, links=links)
        point = best_operation(here)
        if price is None or alone.point.lambda_max <= 0:
            found.append(None)
            continue
        same_per_hour = alone.gpus * price * point.lambda_max / alone.point.lambda_max
        found.append(break_even_per_gb(here, point, same_per_hour))
    return found


@lru_cache(maxsize=1)
def _levels(context: StudyContext) -> Mapping[str, Sequence[float | None]]:
    return {name: _break_even(problem) for name, problem in _problems(context).items()}


def _worth_per_gb(context: StudyContext) -> float | None:
    """The price at which the plan's mean offloaded prompt costs as much as its prefill at home is worth."""
    problem, tokens = context.problem, context.optimum.mean_long_tokens
    price = problem.prices.get(problem.pd[0].hardware)
    if tokens is None or price is None or instances_per_hour(problem) is None:
        return None
    length = np.array([tokens])
    per_hour = price * problem.pd[0].gpus_per_instance
    return float(
        per_hour / SECONDS_PER_HOUR * problem.pd[0].prefill_s(length)[0] / problem.kv_bytes(length)[0] * GB
    )


def _runs(context: StudyContext) -> Sequence[Run]:
    worth = _worth_per_gb(context)
    if worth is None:
        return []
    planned = context.planned
    return [
        Run(
            (load, price, seed),
            replace(
                planned, links=tuple(replace(link, egress_per_gb=price * worth) for link in planned.links)
            ),
            context.poisson(load),
            context.requests(_REQUESTS),
            seed,
            policy=_POLICY,
            # So that seconds of prefill at home are comparable.
            allocation=False,
            classes=length_classes(context),
        )
        for load in _LOADS
        for price in (FREE, *_PRICES)
        for seed in context.seeds()
    ]


def _describe(context: StudyContext, outcomes: Outcomes) -> StudySection:
    levels = _levels(context)
    worth = _worth_per_gb(context)
    tables = {
        "Price of a GB at which the advantage at equal cost is gone": StudyTable(
            ["model", *(format_bits_per_s(each) for each in _BANDWIDTHS)],
            [[name, *(_price(each) for each in prices)] for name, prices in levels.items()],
        )
    }
    findings = [*_advantage(context, levels)]
    figures = [_advantages(levels)]
    if worth is not None:
        figures.append(_rules(context, outcomes, worth))
        tables["Egress and prefill at home, per hour, without and with the rule"] = _savings(
            context, outcomes, worth
        )
        tables[TAIL_TITLE] = tail_table(
            "load, price per GB",
            {
                f"{load:g}, {price * worth:.2g}": Repeats.seeded(outcomes, context.seeds(), load, price)
                for load in _LOADS
                for price in (FREE, _PRICES[2], _PRICES[-1])
            },
            length_classes(context),
        )
        findings += _rule(context, outcomes, worth)
    return StudySection(
        question="What may a byte between the clusters cost?",
        setup=(
            "Planned: the file's machines, prompts and prices, with a link of 1 to 100 Gbit/s and every model whose "
            "speed on the PrfaaS cluster's hardware is known. Where it is not known on the other hardware, a model "
            "is taken to be slower there by as much as the file's. Simulated: the file's deployment with "
            f"`{_POLICY}` at {listed([f'{load:g}' for load in _LOADS])} of Λ_max, roles as planned. Prices are parts "
            "of the one at which the plan's mean offloaded prompt is just worth its bytes."
        ),
        findings=findings,
        tables=tables,
        figures=figures,
        notes=[
            'A price of 0: no advantage even if egress is free. "–": nothing is offloaded.',
            "Prefill at home: busy seconds of the PD cluster's prefill instances, at the price of an instance. "
            "Without the rule requests are routed as if bytes were free, and are paid for.",
        ],
    )


def _price(value: float | None) -> str:
    return NONE if value is None else f"{value:.2g}" if value else "0"


def _advantage(context: StudyContext, levels: Mapping[str, Sequence[float | None]]) -> list[str]:
    name = context.planned.kv_model.name
    found = []
    own = [(each, bandwidth) for each, bandwidth in zip(levels[name], _BANDWIDTHS, strict=True) if each]
    if own:
        (least, at_least), (most, at_most) = min(own), max(own)
        found.append(
            f"With {name} the advantage is gone at {_price(least)} per GB over {format_bits_per_s(at_least)} and at "
            f"{_price(most)} over {format_bits_per_s(at_most)}."
        )
        if len(own) < len(_BANDWIDTHS):
            found.append(f"Below {format_bits_per_s(min(at for _, at in own))} there is none.")
    widest = {model: prices[-1] for model, prices in levels.items()}
    without = [model for model, price in widest.items() if not price]
    with_price = sorted((price, model) for model, price in widest.items() if price)
    if len(with_price) > 1:
        (low, lowest), (high, highest) = with_price[0], with_price[-1]
        found.append(
            f"Over {format_bits_per_s(_BANDWIDTHS[-1])} it is {_price(low)} ({lowest}) to {_price(high)} ({highest})."
        )
    if without:
        found.append(f"Without any advantage there: {listed(without)}.")
    return found


@dataclass(frozen=True, slots=True)
class _Spent:
    """Money per hour at one load and price, a number per seed."""

    egress: list[float]
    total: list[float]
    """With prefill at home."""


def _spent(context: StudyContext, runs: Repeats, per_gb: float) -> _Spent:
    pd = context.problem.pd[0]
    per_hour = context.problem.prices[pd.hardware] * pd.gpus_per_instance
    egress = [gb_per_hour(bits_per_s) * per_gb for bits_per_s in runs.values("egress_bits_per_s")]
    busy = [
        outcome.numbers["utilisation"][f"prefill_utilisation_{pd.name}"] * context.optimum.n_prefill
        for outcome in runs.outcomes
    ]
    return _Spent(egress, [sent + used * per_hour for sent, used in zip(egress, busy, strict=True)])


def _savings(context: StudyContext, outcomes: Outcomes, worth: float) -> StudyTable:
    rows = []
    for load in _LOADS:
        for price in _PRICES:
            runs = [Repeats.seeded(outcomes, context.seeds(), load, each) for each in (FREE, price)]
            before, after = (_spent(context, each, price * worth) for each in runs)
            rows.append(
                [
                    f"{load:g}, {price * worth:.2g}",
                    seed_mean(before.egress).text(1),
                    seed_mean(after.egress).text(1),
                    str(difference(after.total, before.total)),
                    *(each.mean("offloaded_fraction").percent() for each in runs),
                    *(each.ttft for each in runs),
                ]
            )
    return StudyTable(
        [
            "load, price per GB",
            "egress without",
            "egress with",
            "egress and prefill",
            "offloaded without",
            "offloaded with",
            "TTFT without (s)",
            "TTFT with (s)",
        ],
        rows,
    )


def _rule(context: StudyContext, outcomes: Outcomes, worth: float) -> list[str]:
    found = [
        f"By routing's rule the plan's mean offloaded prompt is worth its bytes up to {worth:.2g} per GB."
    ]
    grows = []
    for load in _LOADS:
        free = Repeats.seeded(outcomes, context.seeds(), load, FREE)
        clear = []
        for price in _PRICES:
            ruled = Repeats.seeded(outcomes, context.seeds(), load, price)
            before, after = (_spent(context, each, price * worth).total for each in (free, ruled))
            saved = difference(after, before)
            if saved.is_clear and saved.mean < 0:
                clear.append((saved.mean, saved, price, ruled))
            if ruled.verdict == "grows":
                grows.append(f"{load:g} at {price * worth:.2g} per GB")
        if clear:
            _, most, price, ruled = min(clear, key=lambda each: each[0])
            found.append(
                f"At {load:g} of Λ_max the rule changes the sum of egress and prefill at home by up to {most}, and "
                f"the mean TTFT from {free.mean().seconds} to {ruled.mean().seconds} s "
                f"(at {price * worth:.2g} per GB)."
            )
        else:
            found.append(f"At {load:g} of Λ_max it saves nothing that can be told from chance.")
    found.append(f"Queues grow at {listed(grows)}." if grows else "No queue grows at any of these prices.")
    return found


def _advantages(levels: Mapping[str, Sequence[float | None]]) -> StudyFigure:
    gigabits = [bandwidth / 1e9 for bandwidth in _BANDWIDTHS]
    panels = [
        Panel(
            "break-even price (per GB)",
            [
                PlotCurve(name, gigabits, [each or None for each in prices], number)
                for number, (name, prices) in enumerate(levels.items())
                if any(prices)
            ],
            is_log=True,
        )
    ]
    return lines(
        "egress-break-even",
        "The price of a GB at which the advantage at equal cost is gone, over the link's bandwidth. Models without an "
        "advantage are left out.",
        "bandwidth (Gbit/s)",
        panels,
        x_log=True,
        height=3.2,
    )


def _rules(context: StudyContext, outcomes: Outcomes, worth: float) -> StudyFigure:
    prices = [price * worth for price in _PRICES]

    def runs(load: float, price: float, *, has_rule: bool) -> Repeats:
        return Repeats.seeded(outcomes, context.seeds(), load, price if has_rule else FREE)

    def totals(load: float, *, has_rule: bool) -> list[float | None]:
        return [
            seed_mean(_spent(context, runs(load, price, has_rule=has_rule), price * worth).total).mean
            for price in _PRICES
        ]

    def offloaded(load: float, *, has_rule: bool) -> list[float | None]:
        return [runs(load, price, has_rule=has_rule).mean("offloaded_fraction").mean for price in _PRICES]

    return lines(
        "egress-rule",
        "Egress and prefill at home over the price of bytes; solid: with routing's rule, dashed: without.",
        "price per GB",
        [
            Panel(
                title,
                [
                    PlotCurve(
                        f"load {load:g}" if has_rule else "",
                        prices,
                        values(load, has_rule=has_rule),
                        number,
                        is_dashed=not has_rule,
                    )
                    for number, load in enumerate(_LOADS)
                    for has_rule in (True, False)
                ],
            )
            for title, values in (("cost per hour", totals), ("offloaded", offloaded))
        ],
    )


EGRESS = Study("egress", "What a byte may cost", _runs, _describe)
