"""Dashboards: what Grafana takes, of series that there are, with a sentence for each panel."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from prfaas.tools.monitoring.board import Board, Chart, ChartRow, PanelQuery
from prfaas.tools.monitoring.catalogue import TARGET_LABELS, Catalogue, Series, UnknownSeriesError, catalogue
from prfaas.tools.monitoring.grafana import VARIABLES, boards, dashboard_json

from .promql import result_labels

CATALOGUE = catalogue()
BOARDS = boards(CATALOGUE)
SAMPLES = {**CATALOGUE.samples, "up": TARGET_LABELS}
UNITS = {value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str)}


def document(board: Board) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(dashboard_json(board, CATALOGUE))
    return made


def panels(board: Board) -> Iterator[dict[str, Any]]:
    return (panel for panel in document(board)["panels"] if panel["type"] != "row")


def expressions(board: Board) -> Iterator[str]:
    """As Grafana sends them, with an interval in place of its own."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield re.sub(r"\$__(rate_interval|range)", "5m", target["expr"])


each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


@each_board
def test_grafanas_own_types_read_all_of_it(board: Board) -> None:
    register_default_plugins()
    made = document(board)
    read = Dashboard.from_json(made)
    assert json.loads(JSONEncoder(sort_keys=False).encode(read)) == made
    assert made["schemaVersion"] >= 41
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))


@each_board
def test_expressions_name_series_and_labels_that_there_are(board: Board) -> None:
    for panel in panels(board):
        for target in panel["targets"]:
            expression = re.sub(r"\$__(rate_interval|range)", "5m", target["expr"])
            labels = result_labels(expression, SAMPLES)
            assert labels is not None
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= labels, f"{panel['title']}: {target['legendFormat']} of {expression}"
            # What two queries of one panel differ in must be in their names.
            assert labels - set(TARGET_LABELS) <= named | {"instance"}, f"{panel['title']}: {expression}"


@each_board
def test_every_panel_says_what_it_shows_and_in_what(board: Board) -> None:
    for panel in panels(board):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]


@each_board
def test_every_expression_follows_the_variables(board: Board) -> None:
    chosen = {variable["name"] for variable in document(board)["templating"]["list"]} - {"datasource"}
    assert chosen == {"deployment", *board.variables}
    for expression in expressions(board):
        for name, matchers in re.findall(
            r"((?:prfaas_|vllm:prfaas_|process_)\w+)(?:\{([^}]*)\})?", expression
        ):
            possible = {label for label in chosen if label in SAMPLES[name]}
            assert {label for label in possible if f'{label}=~"${label}"' in matchers} == possible, expression


@each_board
def test_variables_are_labels_of_the_series_that_they_ask(board: Board) -> None:
    for variable in document(board)["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"])
        assert found is not None and found[2] == variable["name"]
        assert found[2] in SAMPLES[found[1]]
        assert variable["allValue"] == ".*" and variable["current"]["value"] == "$__all"


@each_board
def test_panels_fill_rows_and_do_not_overlap(board: Board) -> None:
    cells = set()
    for panel in document(board)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not covered & cells, panel["title"]
        cells |= covered


def test_dashboards_are_told_apart() -> None:
    assert len({board.uid for board in BOARDS}) == len({board.title for board in BOARDS}) == len(BOARDS)
    for board in BOARDS:
        titles = [chart.title for chart in board.charts]
        assert len(titles) == len(set(titles))


def test_every_series_has_a_panel_of_its_own() -> None:
    (every,) = (board for board in BOARDS if board.uid == "prfaas-series")
    assert sorted(chart.title for chart in every.charts) == sorted(CATALOGUE.series)


def test_a_new_series_is_shown_without_further_work() -> None:
    new = Series("prfaas_gateway_new_bytes_total", "counter", ("link",), "Bytes of something new.")
    larger = Catalogue([*CATALOGUE.series.values(), new])
    chart = next(chart for board in boards(larger) for chart in board.charts if chart.title == new.name)
    assert (chart.meaning, chart.unit) == (new.meaning, "Bps")
    assert chart.queries[0].legend == "{{link}}"


def test_a_series_that_is_gone_ends_the_making() -> None:
    chart = Chart("Gone", "Nothing.", (PanelQuery("sum(prfaas_gateway_gone_total)", ""),))
    with pytest.raises(UnknownSeriesError, match="prfaas_gateway_gone_total"):
        dashboard_json(Board("u", "t", "m", (ChartRow("r", (chart,)),)), CATALOGUE)


def test_every_variable_is_used() -> None:
    assert VARIABLES.keys() == {"deployment"} | {label for board in BOARDS for label in board.variables}
