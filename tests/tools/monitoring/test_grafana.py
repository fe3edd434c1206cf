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

from prfaas.tools.monitoring import dashboards

from .catalogue import OWN_INSTANCE, TARGET_LABELS, catalogue
from .promql import result_labels

CATALOGUE = catalogue()
Board = dict[str, Any]
BOARDS: list[Board] = [json.loads(path.read_text()) for path in dashboards()]
SAMPLES = {**CATALOGUE.samples, "up": TARGET_LABELS}
UNITS = {value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str)}


def panels(board: Board) -> Iterator[dict[str, Any]]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def variables(board: Board) -> set[str]:
    return {variable["name"] for variable in board["templating"]["list"]} - {"datasource"}


def expressions(board: Board) -> Iterator[str]:
    """As Grafana sends them, with an interval in place of its own."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield re.sub(r"\$__(rate_interval|range)", "5m", target["expr"])


each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])


@each_board
def test_grafanas_own_types_read_all_of_it(board: Board) -> None:
    register_default_plugins()
    read = Dashboard.from_json(board)
    assert json.loads(JSONEncoder(sort_keys=False).encode(read)) == board
    assert board["schemaVersion"] >= 41
    ids = [panel["id"] for panel in board["panels"]]
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
    chosen = variables(board)
    assert chosen <= {"deployment", "cluster", OWN_INSTANCE, "link", "pool"}
    for expression in expressions(board):
        for name, matchers in re.findall(
            r"((?:prfaas_|vllm:prfaas_|process_)\w+)(?:\{([^}]*)\})?", expression
        ):
            possible = {label for label in chosen if label in SAMPLES[name]}
            assert {label for label in possible if f'{label}=~"${label}"' in matchers} == possible, expression


@each_board
def test_variables_are_labels_of_the_series_that_they_ask(board: Board) -> None:
    for variable in board["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"])
        assert found is not None and found[2] == variable["name"]
        assert found[2] in SAMPLES[found[1]]
        assert variable["allValue"] == ".*" and variable["current"]["value"] == "$__all"


@each_board
def test_panels_fill_rows_and_do_not_overlap(board: Board) -> None:
    cells = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not covered & cells, panel["title"]
        cells |= covered


def test_dashboards_are_told_apart() -> None:
    assert len({board["uid"] for board in BOARDS}) == len({board["title"] for board in BOARDS}) == len(BOARDS)
    for path, board in zip(dashboards(), BOARDS, strict=True):
        titles = [panel["title"] for panel in panels(board)]
        assert len(titles) == len(set(titles)) and path.stem == board["uid"]


def test_every_series_has_a_panel_of_its_own() -> None:
    """A new one gets a panel like its neighbours'; its title is its name, and what it means is said there."""
    (every,) = (board for board in BOARDS if board["uid"] == "prfaas-series")
    shown = {panel["title"]: panel["description"] for panel in panels(every)}
    assert shown == {name: series.meaning for name, series in CATALOGUE.series.items()}


@each_board
def test_every_variable_is_used(board: Board) -> None:
    for name in variables(board):
        assert any(f"${name}" in expression for expression in expressions(board)), name
