"""Drawings: nothing from elsewhere, the reader's colours."""

import re

import pytest

from prfaas.lab.report.drawing import INK, drawing


def drawn(name: str = "lines", panels: int = 1, columns: int = 1) -> str:
    with drawing(name, panels, columns=columns) as picture:
        for axes in picture.panels:
            axes.plot([1, 2, 3], [3, 1, 2], label="a")
            axes.set_title("A title")
    return picture.svg


def test_a_drawing_takes_the_colour_of_the_page_and_brings_nothing_from_elsewhere() -> None:
    svg = drawn()
    assert svg.startswith("<svg") and svg.endswith("</svg>")
    assert INK not in svg
    assert "currentColor" in svg
    assert "<metadata" not in svg
    assert "A title" in svg  # letters, not outlines
    assert re.search(r"<svg[^>]* viewBox=", svg)
    assert not re.search(r"<svg[^>]* (width|height)=", svg)
    for link in re.findall(r'href="([^"]*)"', svg):
        assert link.startswith("#")


def test_references_within_a_drawing_hold() -> None:
    svg = drawn()
    ids = re.findall(r'\bid="([^"]*)"', svg)
    used = re.findall(r'href="#([^"]*)"', svg) + re.findall(r"url\(#([^)]*)\)", svg)
    assert used
    assert set(used) <= set(ids)
    assert len(ids) == len(set(ids))


def test_two_drawings_share_no_id() -> None:
    first, second = (set(re.findall(r'\bid="([^"]*)"', drawn(name))) for name in ("one", "two"))
    assert first and not first & second


def test_the_same_numbers_give_the_same_drawing() -> None:
    assert drawn() == drawn()


@pytest.mark.parametrize("panels, columns", [(1, 1), (3, 2), (4, 2), (5, 3)])
def test_as_many_panels_as_asked_for(panels: int, columns: int) -> None:
    with drawing("grid", panels, columns=columns) as picture:
        assert len(picture.panels) == panels
        assert len(picture.figure.axes) == panels


def test_one_legend_for_all_panels() -> None:
    with drawing("grid", 2, columns=2) as picture:
        for axes in picture.panels:
            axes.plot([1, 2], [1, 2], label="same")
    assert picture.svg.count(">same<") == 1


@pytest.mark.parametrize(
    "labels, columns", [(["short"] * 6, 6), (["a label of thirty-five letters or so"] * 5, 3)]
)
def test_a_legend_stays_within_the_figure(labels: list[str], columns: int) -> None:
    with drawing("grid") as picture:
        for number, label in enumerate(labels):
            picture.panels[0].plot([1, 2], [1, 2], label=f"{label}{number}")
    (legend,) = picture.figure.legends
    # matplotlib has no public name for it.
    assert vars(legend)["_ncols"] == columns
