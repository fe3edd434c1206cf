"""The last dashboard: a panel for every series, made from the list of them. A new series needs no work here."""

from collections.abc import Mapping
from itertools import groupby

from prfaas.tools.monitoring.board import (
    BITS_PER_S,
    BYTES,
    BYTES_PER_S,
    COUNT,
    MOMENT,
    PER_S,
    RATE,
    SECONDS,
    SHARE,
    Board,
    Chart,
    ChartRow,
    PanelQuery,
)
from prfaas.tools.monitoring.catalogue import OWN_INSTANCE, Catalogue, Series

# The longest beginning that fits counts.
_PLACES: Mapping[str, str] = {
    "prfaas_gateway_": "Gateway",
    "prfaas_build_": "Gateway",
    "prfaas_control_": "Control plane",
    "prfaas_control_instance_": "Control plane: instances",
    "prfaas_control_link_": "Control plane: links",
    "prfaas_control_pool_": "Control plane: pools",
    "vllm:prfaas_": "Engines",
    "process_": "Processes",
}
_UNITS: Mapping[str, str] = {
    "_timestamp_seconds": MOMENT,
    "_start_time_seconds": MOMENT,
    "_bits_per_second": BITS_PER_S,
    "_seconds": SECONDS,
    "_bytes": BYTES,
    "_ratio": SHARE,
}


def series_board(catalogue: Catalogue) -> Board:
    """Every series of the catalogue."""
    placed = sorted(catalogue.series.values(), key=lambda each: (_place(each.name), each.name))
    rows = tuple(
        ChartRow(place, tuple(map(_chart, each)))
        for place, each in groupby(placed, lambda each: _place(each.name))
    )
    return Board(
        "prfaas-series",
        "prfaas: every series",
        "A panel for each series that gateways and engines tell, with its meaning.",
        rows,
        ("cluster", OWN_INSTANCE, "link", "pool"),
    )


def _place(name: str) -> str:
    return _PLACES[
        max((each for each in _PLACES if name.startswith(each)), key=len, default="prfaas_control_")
    ]


def _chart(series: Series) -> Chart:
    # Engines are told apart by their target; in what a gateway tells, by a label.
    own = series.labels if series.name.startswith("prfaas_") else ("instance",)
    legend = " ".join(f"{{{{{label}}}}}" for label in own) or series.name
    by = f" by ({', '.join(own)})" if own else ""
    unit = next(
        (unit for end, unit in _UNITS.items() if series.name.removesuffix("_total").endswith(end)), COUNT
    )
    if series.kind == "counter":
        expression = f"sum{by} (rate({series.name}[{RATE}]))"
        unit = BYTES_PER_S if unit == BYTES else SHARE if unit == SECONDS else PER_S
    elif series.kind == "histogram":
        grouped = ", ".join((*own, "le"))
        expression = f"histogram_quantile(0.95, sum by ({grouped}) (rate({series.name}_bucket[{RATE}])))"
        legend += " 95%"
    else:
        expression = f"max{by} ({series.name})" + (" * 1000" if unit == MOMENT else "")
    return Chart(series.name, series.meaning, (PanelQuery(expression, legend),), unit, width=6)
