"""A dashboard as data: rows of charts, each with its expressions, its unit, and what it means."""

from dataclasses import dataclass
from typing import Literal

Form = Literal["lines", "areas", "number", "states"]
"""Lines over time; stacked areas; one number; a band per thing, coloured by its state."""

RATE = "$__rate_interval"
"""Grafana's own choice of an interval that has enough samples for a rate."""

SECONDS, BYTES, BITS_PER_S, BYTES_PER_S = "s", "decbytes", "bps", "Bps"
SHARE, COUNT, PER_S, REQUESTS_PER_S, MOMENT = "percentunit", "short", "cps", "reqps", "dateTimeAsIso"


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One expression; `legend` names what it draws, from labels."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel."""

    title: str
    meaning: str
    """A sentence or two for who looks at it the first time."""
    queries: tuple[PanelQuery, ...]
    unit: str = COUNT
    form: Form = "lines"
    width: int = 8
    """Of 24."""


@dataclass(frozen=True, slots=True)
class ChartRow:
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    meaning: str
    rows: tuple[ChartRow, ...]
    variables: tuple[str, ...] = ()
    """Labels to choose by, beside `deployment`."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All, in order."""
        return tuple(chart for row in self.rows for chart in row.charts)


def quantiles(series: str, label: str, *shares: float) -> tuple[PanelQuery, ...]:
    """Of a histogram, by one of its labels; 0.95 is what 95 of 100 do not exceed."""
    return tuple(
        PanelQuery(
            f"histogram_quantile({share}, sum by (le, {label}) (rate({series}_bucket[{RATE}])))",
            f"{{{{{label}}}}} {share:.0%}",
        )
        for share in shares
    )


def rates(series: str, label: str) -> tuple[PanelQuery, ...]:
    """How fast a counter grows, by one of its labels."""
    return (PanelQuery(f"sum by ({label}) (rate({series}[{RATE}]))", f"{{{{{label}}}}}"),)


def largest(series: str, label: str) -> tuple[PanelQuery, ...]:
    """A gauge by one of its labels: the largest value that any gateway tells."""
    return (PanelQuery(f"max by ({label}) ({series})", f"{{{{{label}}}}}"),)


def engine_rates(prefix: str, *names: str) -> tuple[PanelQuery, ...]:
    """How fast counters of all engines together grow; each is called by its name behind the prefix."""
    return tuple(
        PanelQuery(f"sum(rate(vllm:prfaas_{prefix}{name}_total[{RATE}]))", name.replace("_", " "))
        for name in names
    )
