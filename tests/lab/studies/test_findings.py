"""Whatever simulations find, every study has right words for it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from studies import STUDIES
from studies._rate_search import LARGEST_RPS
from studies._runs import Run, length_classes

from prfaas.lab.studies import StudyContext, page_of
from prfaas.lab.studies.study import StudyOutcome, StudyRun

# The fixture that all share plans every study first.
pytestmark = pytest.mark.slow("plans the cases of every study")

PARTS = 48


def outcome(
    context: StudyContext, ttft_s: float | None, *, stable: bool | None = True, hits: float = 0.0
) -> StudyOutcome:
    numbers: dict[str, Any] = {
        "ttft_mean_s": ttft_s,
        "ttft_p90_s": None if ttft_s is None else 2 * ttft_s,
        "ttft_p99_s": None if ttft_s is None else 4 * ttft_s,
        "ttft_p999_s": None if ttft_s is None else 5 * ttft_s,
        "ttft_by_length": [{"mean_s": ttft_s}] * len(length_classes(context).labels),
        "retries": 6,
        "lost": 0,
        LARGEST_RPS: ttft_s,
        "stable": stable,
        "offloaded_fraction": 0.5,
        "egress_bits_per_s": 1e10,
        "hit_ratio": hits,
        "utilisation": {f"prefill_utilisation_{context.pd}": 0.5},
        "threshold_changes": [],
        "conversions": [],
    }
    names = ("at_s", "ttft_s", f"threshold_tokens_{context.pd}", f"prefill_instances_{context.pd}")
    return StudyOutcome(numbers | {"course": dict.fromkeys(names, [ttft_s] * PARTS)}, 1.0)


@pytest.fixture(scope="module")
def runs(context: StudyContext) -> Mapping[str, list[StudyRun]]:
    return {name: list(study.runs(context)) for name, study in STUDIES.items()}


def told(
    context: StudyContext,
    runs: Mapping[str, list[StudyRun]],
    name: str,
    found: Callable[[Any], StudyOutcome],
) -> tuple[str, str]:
    """The findings and the page of a study."""
    study = STUDIES[name]
    section = study.describe(context, {run.key: found(run) for run in runs[name]})
    for table in section.tables.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
    for figure in section.figures:
        assert figure.svg.startswith("<svg") and figure.svg.count("<svg") == 1
        assert "currentColor" not in figure.svg
    return " ".join(section.findings), page_of(context, {name: (study, section)}, "prfaas study x")


@pytest.mark.parametrize("name", STUDIES)
def test_keys_are_unique(runs: Mapping[str, list[StudyRun]], name: str) -> None:
    assert len({run.key for run in runs[name]}) == len(runs[name])


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("kind", ["nothing done", "noise", "too short"])
def test_every_outcome_can_be_told(
    context: StudyContext, runs: Mapping[str, list[StudyRun]], name: str, kind: str
) -> None:
    rng = np.random.default_rng(4)

    def found(_run: StudyRun) -> StudyOutcome:
        if kind == "nothing done":
            return outcome(context, None, stable=False)
        if kind == "too short":
            return outcome(context, 2.0, stable=None)
        return outcome(context, float(rng.uniform(1, 9)), stable=bool(rng.random() < 0.7))

    findings, page = told(context, runs, name, found)
    assert page.startswith("# ") and page.endswith("\n") and f"`prfaas study {name}`" in page
    assert not re.search(r"\bnan\b|\binf\b|None", page), findings
    if kind == "too short":
        assert "queues grow with" not in findings and "is stable from" not in findings, findings


def test_the_better_policy_is_called_better(
    context: StudyContext, runs: Mapping[str, list[StudyRun]]
) -> None:
    def better(name: str) -> Callable[[Run], StudyOutcome]:
        return lambda run: outcome(context, (1.0 if run.policy == name else 2.0) + 0.001 * run.seed)

    text, _ = told(context, runs, "ablation", better("tilted"))
    assert "`tilted` has a shorter mean TTFT than `paper` everywhere" in text
    text, _ = told(context, runs, "ablation", better("paper"))
    assert "`tilted` is nowhere clearly ahead of `paper`" in text
    text, _ = told(context, runs, "burst", better("least_ttft"))
    assert "At that peak it is, the shortest first: `least_ttft` 1.00" in text


def test_where_it_stops_being_stable_is_found(
    context: StudyContext, runs: Mapping[str, list[StudyRun]]
) -> None:
    text, _ = told(
        context,
        runs,
        "bandwidth",
        lambda run: outcome(context, 2.0, stable=run.planned.links[0].bandwidth_bits_per_s > 1.5e10),
    )
    assert "is stable for all seeds from 21.54 Gbit/s on, however much the link fluctuates" in text


def test_the_largest_rates_are_compared_seed_by_seed(
    context: StudyContext, runs: Mapping[str, list[StudyRun]]
) -> None:
    def found(run: StudyRun) -> StudyOutcome:
        kind, system, _, *_, seed = run.key
        if kind != "largest":
            return outcome(context, 2.0 if system == "PrfaaS" else 4.0, stable=True)
        # Seeds differ by 10 %, but the ratio of two systems is the same for each, but for a hundredth.
        largest = (1.0 + 0.1 * float(seed)) * (1.2 + 0.01 * float(seed) if system == "PrfaaS" else 1.0)
        return StudyOutcome({LARGEST_RPS: largest}, 1.0)

    text, page = told(context, runs, "equal-cost", found)
    assert "PrfaaS carries 19 % more by the planner and, simulated, 24 ± 6 % more with `paper`" in text
    assert "its mean TTFT is shorter at every rate that both carry: 0.50 ± 0.00 times at 0.96 req/s" in text
    assert "| PD, equal cost | 2.7 | 1.35 ± 0.64 | 1.35 ± 0.64 |" in page


def test_a_variant_without_which_queues_grow_is_named(
    context: StudyContext, runs: Mapping[str, list[StudyRun]]
) -> None:
    def found(run: Run) -> StudyOutcome:
        return outcome(context, 2.0, stable=run.policy != "local_only")

    text, page = told(context, runs, "ablation", found)
    assert "*steady*, against the whole of `paper`: queues grow with `local_only`." in text
    assert re.search(r"\| local_only \|[^|]*\| grows \|", page)


def test_too_short_a_run_is_no_variant_whose_queues_grow(
    context: StudyContext, runs: Mapping[str, list[StudyRun]]
) -> None:
    def found(run: Run) -> StudyOutcome:
        return outcome(context, 2.0, stable=None if run.policy == "local_only" else True)

    text, page = told(context, runs, "ablation", found)
    assert "runs are too short to say with `local_only`" in text and "queues grow" not in text
    assert re.search(r"\| local_only \|[^|]*\| too short: 2.00 ± 0.00 \(4.00\) \|", page)


def test_pools_are_told_by_what_they_hit(context: StudyContext, runs: Mapping[str, list[StudyRun]]) -> None:
    def found(run: StudyRun) -> StudyOutcome:
        hits = 0.3
        if run.key[0] == "size":
            hits += {"lru": 0.0, "cost": 0.02}[str(run.key[2])] + float(run.key[3]) / 1e5
        elif run.key[0] == "rule":
            hits += 0.1 if "junctions" in str(run.key[2]) else 0.0
        return outcome(context, 2.0, hits=hits)

    text, page = told(context, runs, "pool", found)
    assert "4 × 272 GiB with `lru` hit 30.3 % of conversation (infinite: 40.0 %; 4 × 16 GiB: 30.0 %)" in text
    assert "± 0.0 % of day" in text
    assert "change the hits by +10.0 points of conversation, +10.0 points of synthetic" in text
    assert "`cost` differs from `lru` by +2.0 points" in text
    assert "| synthetic, cost | 32.0 % |" in page


def test_what_routing_by_price_saves_is_told(
    context: StudyContext, runs: Mapping[str, list[StudyRun]]
) -> None:
    def found(run: StudyRun) -> StudyOutcome:
        load, price, seed = run.key
        told = outcome(context, 2.0, stable=not (price == 3.0 and load == 0.8))
        bits_per_s = 1e10 * (0.5 if price and load == 0.3 else 1.0) + 1e6 * float(seed)
        return replace(told, numbers={**told.numbers, "egress_bits_per_s": bits_per_s})

    text, page = told(context, runs, "egress", found)
    assert "With internal-1t the advantage is gone at 0.0035 per GB over 10 Gbit/s" in text
    assert "and at 0.0043 over 100 Gbit/s. Below 10 Gbit/s there is none." in text
    assert "Without any advantage there: minimax-m2.5." in text
    assert "the plan's mean offloaded prompt is worth its bytes up to 0.016 per GB" in text
    assert "At 0.3 of Λ_max the rule changes the sum of egress and prefill at home by up to −" in text
    assert "and the mean TTFT from 2.00 ± 0.00 to 2.00 ± 0.00 s (at 0.048 per GB)." in text
    assert "At 0.5 of Λ_max it saves nothing that can be told from chance." in text
    assert "Queues grow at 0.8 at 0.048 per GB." in text
    # 10 Gbit/s are 4,500 GB per hour.
    assert "| 0.3, 0.048 | 216." in page
