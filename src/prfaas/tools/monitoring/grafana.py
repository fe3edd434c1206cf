"""Boards → Grafana's JSON, by Grafana's own builders (grafana-foundation-sdk)."""

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from prfaas.tools.monitoring.board import Board, Chart
from prfaas.tools.monitoring.caches_board import caches_board
from prfaas.tools.monitoring.catalogue import OWN_INSTANCE, Catalogue
from prfaas.tools.monitoring.engines_board import engines_board
from prfaas.tools.monitoring.links_board import links_board
from prfaas.tools.monitoring.overview_board import overview_board
from prfaas.tools.monitoring.series_board import series_board

VARIABLES: Mapping[str, tuple[str, str]] = {
    "deployment": ("Deployment", "prfaas_build_info"),
    "cluster": ("Cluster", "prfaas_control_instance_info"),
    OWN_INSTANCE: ("Instance", "prfaas_control_instance_healthy"),
    "link": ("Link", "prfaas_control_link_up"),
    "pool": ("Pool", "prfaas_control_pool_up"),
}
"""Label → what a dashboard calls its variable, and the series that has all its values."""

_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "prfaas"
_HEIGHT, _NUMBER_HEIGHT = 8, 4


def boards(catalogue: Catalogue) -> tuple[Board, ...]:
    """All dashboards; the last has every series."""
    return overview_board(), links_board(), engines_board(), caches_board(), series_board(catalogue)


def dashboard_json(board: Board, catalogue: Catalogue) -> str:
    """A file that Grafana imports or is provisioned with.

    Raises:
        UnknownSeriesError: an expression of the board names a series that there is not.
    """
    variables = ("deployment", *board.variables)
    made = (
        grafana.Dashboard(board.title)
        .uid(board.uid)
        .description(board.meaning)
        .tags([_TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone(common.TimeZoneBrowser)
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(
            grafana.DashboardLink("prfaas")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .keep_time(True)
        )
        .with_variable(grafana.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for label in variables:
        made.with_variable(_variable(label, catalogue))
    numbers = count(1)
    for row in board.rows:
        made.with_row(grafana.Row(row.title).id(next(numbers)))
        for chart in row.charts:
            made.with_panel(_panel(chart, catalogue, variables).id(next(numbers)))
    document: dict[str, Any] = json.loads(JSONEncoder(sort_keys=False).encode(made.build()))
    return json.dumps(document, indent=2) + "\n"


def _variable(label: str, catalogue: Catalogue) -> grafana.QueryVariable:
    title, series = VARIABLES[label]
    within = catalogue.within(series, ("deployment",) if label != "deployment" else ())
    return (
        grafana.QueryVariable(label)
        .label(title)
        .datasource(_SOURCE)
        .query(f"label_values({within}, {label})")
        .multi(True)
        .include_all(True)
        # Series without the label are meant too: a scrape configuration need not give `deployment`.
        .all_value(".*")
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )


def _panel(
    chart: Chart, catalogue: Catalogue, variables: tuple[str, ...]
) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    panel = _formed(chart)
    panel.title(chart.title).description(chart.meaning).unit(chart.unit).datasource(_SOURCE)
    panel.span(chart.width).height(_NUMBER_HEIGHT if chart.form == "number" else _HEIGHT)
    for letter, query in zip(_letters(), chart.queries, strict=False):
        panel.with_target(
            prometheus.Dataquery()
            .ref_id(letter)
            .datasource(_SOURCE)
            .expr(catalogue.within(query.expression, variables))
            .legend_format(query.legend)
        )
    return panel


def _formed(chart: Chart) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    if chart.form == "number":
        return stat.Panel().reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]))
    if chart.form == "states":
        states = {"0": _state(0, "no", "red"), "1": _state(1, "yes", "green")}
        return (
            statetimeline.Panel()
            .mappings([dashboard.ValueMap(options=states)])
            .show_value(common.VisibilityMode.NEVER)
        )
    panel = timeseries.Panel().legend(
        options.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
    )
    panel.tooltip(
        options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    panel.min(0.0)
    if chart.form == "areas":
        panel.fill_opacity(30).stacking(options.StackingConfig().mode(common.StackingMode.NORMAL))
    return panel


def _state(index: int, text: str, color: str) -> dashboard.ValueMappingResult:
    return dashboard.ValueMappingResult(text=text, color=color, index=index)


def _letters() -> Iterator[str]:
    return iter("ABCDEFGHIJ")
