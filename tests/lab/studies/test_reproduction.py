"""The page that puts our numbers beside the paper's."""

import pytest
from studies._reproduction import ReproducedNumber, ReproducedTable, reproduction_page, unexplained


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
    assert "Of the other 3 numbers 1 agree within 1 %, and 2 do not." in " ".join(text.split())
    assert "| A | 100.2 | 100 | +0.2% |" in text
    assert "| B | 110 | 100 | **+10.0%** |" in text
    assert "- B +10.0%; C -4.5%: because" in text


def test_what_agrees_by_construction_is_not_counted_as_agreement() -> None:
    given = [ReproducedNumber(each, each.upper(), 100, 100, by_construction="it went in") for each in "ab"]
    text = page(*given, ReproducedNumber("c", "C", 100.2, 100), ReproducedNumber("d", "D", 100.2, 100))
    assert "2 of 4 numbers are given by construction" in text
    assert "Of the other 2 numbers 2 agree within 1 %, and 0 do not." in " ".join(text.split())
    assert "| A | 100 | 100 | (0.0%) |" in text
    assert "| C | 100.2 | 100 | +0.2% |" in text
    assert "By construction:\n\n- A; B: it went in" in text


def test_a_table_that_went_in_as_a_whole_is_not_listed() -> None:
    assert "- all: it went in" in page(ReproducedNumber("a", "A", 100, 100, by_construction="it went in"))


def test_a_reason_that_is_missing_shows() -> None:
    row = ReproducedNumber("b", "B", 110, 100)
    assert unexplained([ReproducedTable("T", "", [row, ReproducedNumber("a", "A", 100, 100)])]) == [row]
    assert "**not explained**" in page(row)


def test_nothing_is_shown_as_minus_zero() -> None:
    assert "| A | 99.99 | 100 | 0.0% |" in page(ReproducedNumber("a", "A", 99.99, 100))
