"""Several seeds of one variant, as one cell and one row."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies._repeats import Repeats, tail_table
from studies._runs import LengthClasses, Run, length_classes, of_class

from prfaas.lab.studies import StudyContext
from prfaas.lab.studies.study import StudyOutcome

CLASSES = LengthClasses((1000.0, 32_768.0))


def outcome(ttft_s: float, stable: bool | None = True) -> StudyOutcome:
    numbers = {
        "ttft_mean_s": ttft_s,
        "ttft_p90_s": 2 * ttft_s,
        "ttft_p99_s": 3 * ttft_s,
        "ttft_p999_s": 4 * ttft_s,
        "stable": stable,
        "ttft_by_length": [
            {"requests": 1, "mean_s": ttft_s * number, "p90_s": None, "p99_s": None} for number in (1, 2, 3)
        ],
    }
    return StudyOutcome(numbers, 0.0)


def test_cells_of_runs_that_are_stable() -> None:
    both = Repeats([outcome(0.99), outcome(1.01)])
    assert both.verdict == "stable" and both.is_stable
    assert both.ttft == "1.00 ± 0.13 (2.00)" and both.ttft_mean == "1.00 ± 0.13"
    assert both.against(Repeats([outcome(2 * 0.99), outcome(2 * 1.01)])).times == "0.50 ± 0.00 times"


def test_one_seed_whose_queues_grow_is_enough_to_say_so() -> None:
    some = Repeats([outcome(1.0), outcome(9.0, False), outcome(1.0, None)])
    assert some.verdict == "grows" and some.ttft == "grows (1 of 3)"
    assert Repeats([outcome(9.0, False)] * 2).ttft_mean == "grows"


def test_too_short_to_say_is_neither_stable_nor_growing() -> None:
    short = Repeats([outcome(1.0), outcome(1.0, None)])
    assert short.verdict == "too short to say" and not short.is_stable
    assert short.ttft == "too short: 1.00 ± 0.00 (2.00)"
    assert Repeats([outcome(1.0, None)]).verdict == "too short to say"


def test_a_row_has_tails_and_classes() -> None:
    rows = {"good": Repeats([outcome(1.0), outcome(1.0)]), "bad": Repeats([outcome(1.0, False)] * 2)}
    table = tail_table("policy", rows, CLASSES)
    assert list(table.columns) == [
        "policy", "mean", "P90", "P99", "P99.9", "mean, ≤ 1K", "mean, 1K–32.8K", "mean, > 32.8K"
    ]  # fmt: skip
    good, bad = table.rows
    assert good == ["good", *(f"{value}.00 ± 0.00" for value in (1, 2, 3, 4, 1, 2, 3))]
    assert bad == ["bad", "grows", *["–"] * 6]


def test_a_run_tells_its_tails_and_classes(context: StudyContext) -> None:
    classes = length_classes(context)
    run = Run((1,), context.planned, context.poisson(0.5), 400, 5, classes=classes)
    found = run.outcome()
    by_length = found.numbers["ttft_by_length"]
    assert len(by_length) == len(classes.labels) == 4
    total = sum(each["requests"] for each in by_length)
    assert total == found.numbers["requests"]
    whole = math.fsum(each["requests"] * each["mean_s"] for each in by_length if each["requests"])
    assert whole / total == pytest.approx(found.number("ttft_mean_s"))
    # Of prompts that are all offloaded the longer take longer.
    assert of_class(found, 1, "mean_s") < of_class(found, 2, "mean_s") < of_class(found, 3, "mean_s")
    assert found.number("ttft_p99_s") <= found.number("ttft_p999_s")
    assert "ttft_by_length" not in Run((1,), context.planned, context.poisson(0.5), 60, 5).outcome().numbers


def test_classes_are_the_plan_s_threshold_and_round_lengths(context: StudyContext) -> None:
    threshold = context.optimum.threshold_tokens
    assert threshold is not None
    assert length_classes(context).edges_tokens == (threshold, 32_768.0, 100_000.0)
    assert length_classes(context).labels == ("≤ 19.6K", "19.6K–32.8K", "32.8K–100K", "> 100K")
    assert LengthClasses(()).labels == ("all",)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=20), st.lists(st.floats(10, 1e5), max_size=4))
def test_every_length_is_in_the_class_whose_edges_hold_it(tokens: list[float], edges: list[float]) -> None:
    classes = LengthClasses(tuple(sorted(set(edges))))
    bounds = (0.0, *classes.edges_tokens, math.inf)
    for length, number in zip(tokens, classes.of(np.array(tokens)), strict=True):
        assert bounds[number] < length <= bounds[number + 1]
    assert len(classes.labels) == len(bounds) - 1
