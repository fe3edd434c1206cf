"""The page that puts our numbers beside the paper's."""

import pytest
from studies._reproduction import (
    Relation,
    ReproducedNumber,
    ReproducedTable,
    reproduction_page,
    unexplained,
)


def page(*rows: ReproducedNumber) -> str:
    return reproduction_page([ReproducedTable("Table 1", "Text.", rows)])


@pytest.mark.parametrize(
    "ours, off", [(100.9, False), (101.1, True), (98.9, True), (99.1, False), (100, False)]
)
def test_one_percent_is_the_tolerance(ours: float, off: bool) -> None:
    assert ReproducedNumber("k", "l", ours, 100).is_off is off


def test_deviations_are_marked_and_explained_together() -> None:
    text = page(
        ReproducedNumber("a", "A", 100.2, 100),
        ReproducedNumber("b", "B", 110, 100, reason="because"),
        ReproducedNumber("c", "C", 95.5, 100, reason="because"),
    )
    assert "Of these 1 agree within 1 %, and 2 do not." in " ".join(text.split())
    assert "| A | 100.2 | 100 | +0.2% | **check** |" in text
    assert "| B | 110 | 100 | **+10.0%** | **check** |" in text
    assert "- B +10.0%; C -4.5%: because" in text


def test_what_went_in_is_not_counted_as_agreement() -> None:
    text = page(
        ReproducedNumber("a", "A", 100, 100, kind="input", because="it went in"),
        ReproducedNumber("b", "B", 100, 100, kind="fitted", because="to it"),
        ReproducedNumber("c", "C", 100.2, 100),
        ReproducedNumber("d", "D", 100.2, 100),
        ReproducedNumber("e", "E", 100, 100, kind="derived", because="of A"),
    )
    words = " ".join(text.split())
    assert "Of 5 numbers 2 are independent checks" in words
    assert "Of these 2 agree within 1 %, and 0 do not." in words
    assert "1 are inputs" in words and "1 are fitted" in words and "1 are derived" in words
    assert "| A | 100 | 100 | (0.0%) | input |" in text
    assert "| C | 100.2 | 100 | +0.2% | **check** |" in text
    assert "No checks:\n\n- A: input, it went in\n- B: fitted, to it" in text


def test_a_table_that_went_in_as_a_whole_is_not_listed() -> None:
    row = ReproducedNumber("a", "A", 100, 100, kind="input", because="it went in")
    assert "- all: input, it went in" in page(row)


@pytest.mark.parametrize(
    ("says", "ours", "off"),
    [
        ("below", 99.0, False),
        ("below", 100.0, True),
        ("order of", 300.0, False),
        ("order of", 330.0, True),
        ("order of", 31.0, True),
    ],
)
def test_bounds_and_orders_hold_or_do_not(says: Relation, ours: float, off: bool) -> None:
    row = ReproducedNumber("a", "A", ours, 100, says=says)
    assert row.is_off is off
    assert f"| {says} 100 | {'no' if off else 'holds'} |" in page(row)


def test_a_reason_that_is_missing_shows() -> None:
    row = ReproducedNumber("b", "B", 110, 100)
    assert unexplained([ReproducedTable("T", "", [row, ReproducedNumber("a", "A", 100, 100)])]) == [row]
    assert "**not explained**" in page(row)


def test_nothing_is_shown_as_minus_zero() -> None:
    assert "| A | 99.99 | 100 | 0.0% |" in page(ReproducedNumber("a", "A", 99.99, 100))
