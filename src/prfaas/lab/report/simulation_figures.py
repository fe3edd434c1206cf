"""A simulation as one self-contained HTML page with drawings.

The drawings: TTFT, queues, utilisation, egress, thresholds and roles.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prfaas.core.arrays import FloatArray, np
from prfaas.lab.report.drawing import COLOURS, INK, MUTED, drawing
from prfaas.lab.report.simulation import (
    SimulationReport,
    decision_rows,
    headline,
    stage_rows,
)
from prfaas.lab.simulator.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Points per curve: more can't be told apart in print, and every one is in the page's text.
_CURVE_POINTS = 160
_QUANTILES = 400
# A capacity so many times the egress is named, not drawn.
_MOST_ROOM = 4.0
# Beside a policy whose queues grow, the others would be a line at the bottom.
_FAR_APART = 100.0

_TITLES = {
    "queue_": "{}: waiting for prefill",
    "decode_queue_": "{}: waiting for decode",
    "prefill_utilisation_": "{}: prefill",
    "decode_utilisation_": "{}: decode",
    "threshold_tokens_": "{}: threshold (tokens)",
    "prefill_instances_": "{}: instances that prefill",
}
"""Of panels, with the cluster's name, by how the series' names begin."""

Figure = tuple[str, str, str]
"""Heading, drawing (SVG), caption."""


def simulation_page(report: SimulationReport) -> str:
    """The whole HTML file, `data/simulation.html` filled in; the same report gives the same text."""
    import html

    import jinja2
    from markupsafe import Markup

    def escape(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(html.escape(str(value)))

    # With the entities of html.escape, so that the page doesn't depend on the version of markupsafe.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("prfaas.lab.report", "data"),
        autoescape=True,
        finalize=escape,
        keep_trailing_newline=True,
    )
    return environment.get_template("simulation.html").render(
        report=report,
        names=list(report.results),
        headline=headline(report),
        decisions=decision_rows(report),
        stages=stage_rows(report),
        figures=figures(report),
    )


def figures(report: SimulationReport) -> Iterator[Figure]:
    """Whatever the results have series for, in the order in which a request meets it."""
    yield (
        "Time to first token",
        _ttft_distribution(report),
        "The part of requests whose first token came within so many seconds of their arrival (after the warm-up).",
    )
    yield (
        "Time to first token over time",
        _ttft_over_time(report),
        "Of requests by the time of their arrival: mean (solid) and P90 (dashed) of equal stretches of time.",
    )
    queues = _names(report, "queue_") + _names(report, "decode_queue_")
    if queues:
        yield (
            "Queues",
            _panels(report, "queues", queues, "requests"),
            ("Requests that wait: for a prefill instance of a cluster, and for a decode slot."),
        )
    busy = _names(report, "prefill_utilisation_") + _names(report, "decode_utilisation_")
    if busy:
        yield (
            "Utilisation",
            _panels(report, "utilisation", busy, "in use", percent=True),
            ("The part of prefill instances' time, and of decode slots, that was in use."),
        )
    if links := _names(report, "egress_bits_per_s_"):
        yield (
            "Egress",
            _egress(report, links),
            "KV on each link, and dotted its capacity at the time, unless that is far above.",
        )
    thresholds = _names(report, "threshold_tokens_")
    # A cluster without a threshold does nothing but prefill.
    roles = [
        key
        for key in _names(report, "prefill_instances_")
        if any(f"threshold_tokens_{key.partition('instances_')[2]}" in each for each in _series(report))
    ]
    if knobs := thresholds + roles:
        yield (
            "Threshold and roles",
            _panels(report, "knobs", knobs, None),
            "What the slow side of the scheduler changed: the threshold in uncached tokens, and how many instances "
            "of each PD cluster prefill.",
        )


def _ttft_distribution(report: SimulationReport) -> str:
    shares = np.linspace(0.0, 1.0, _QUANTILES + 1)
    # The tail has few requests and most of the interest.
    shares = np.concatenate([shares[:-4], 1 - np.geomspace(1e-2, 1e-3, 16)])
    with drawing("ttft", height=3.4) as drawn:
        (axes,) = drawn.panels
        lowest, highest = np.inf, 0.0
        for number, (name, result) in enumerate(report.results.items()):
            _, seconds = _first_tokens(result)
            if len(seconds) == 0:
                continue
            at = np.quantile(seconds, shares)
            lowest, highest = min(lowest, float(at[4])), max(highest, float(at[-1]))
            axes.plot(at, shares * 100, color=_colour(number), label=name)
        for share in (50, 90, 99):
            axes.axhline(share, color=MUTED, linewidth=0.6, linestyle=":")
        if (slo_s := report.deployment.slo.ttft_s) is not None:
            _mark(axes, slo_s, "SLO")
        if highest > 0:
            _seconds_axis(axes, lowest, highest)
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 25, 50, 75, 90, 99], ["0", "25 %", "50 %", "75 %", "90 %", "99 %"])
        axes.set_ylabel("requests")
        axes.set_xlabel("time to first token (s)")
    return drawn.svg


def _ttft_over_time(report: SimulationReport) -> str:
    by_policy = {name: _first_tokens(result) for name, result in report.results.items()}
    longest = max(
        (float(arrival_s[-1]) for arrival_s, _ in by_policy.values() if len(arrival_s)), default=1.0
    )
    fewest = min(len(arrival_s) for arrival_s, _ in by_policy.values())
    # A P90 of fewer than some forty requests is noise.
    bins = int(np.clip(fewest // 40, 1, 120))
    scale, unit = _time_unit(longest)
    with drawing("ttft-over-time", height=3.0) as drawn:
        (axes,) = drawn.panels
        drawn_s: list[float] = []
        for number, (name, (arrival_s, ttft_s)) in enumerate(by_policy.items()):
            if len(arrival_s) == 0:
                continue
            edges = np.linspace(arrival_s[0], arrival_s[-1], bins + 1)
            groups = np.split(ttft_s, np.searchsorted(arrival_s, edges[1:-1]))
            middle = (edges[:-1] + edges[1:]) / 2 / scale
            means = [float(np.mean(group)) if len(group) else np.nan for group in groups]
            tails = [float(np.quantile(group, 0.9)) if len(group) else np.nan for group in groups]
            axes.plot(middle, means, color=_colour(number), label=name)
            axes.plot(middle, tails, color=_colour(number), linestyle=(0, (3, 1.5)), linewidth=0.9)
            drawn_s += [value for value in (*means, *tails) if value > 0]
        if drawn_s and max(drawn_s) > _FAR_APART * min(drawn_s):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,.6g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        axes.set_xlabel(f"simulated time ({unit})")
    return drawn.svg


def _panels(
    report: SimulationReport,
    name: str,
    keys: Sequence[str],
    label: str | None,
    *,
    percent: bool = False,
) -> str:
    """One panel per key, a line per policy."""
    from matplotlib.ticker import MaxNLocator

    scale, unit = _time_unit(_end_s(report))
    columns = _columns(len(keys))
    with drawing(name, len(keys), columns=columns, height=1.9) as drawn:
        for axes, key in zip(drawn.panels, keys, strict=True):
            highest = _curves(axes, report, key, scale)
            begins, title = next(each for each in _TITLES.items() if key.startswith(each[0]))
            axes.set_title(title.format(key.removeprefix(begins)))
            axes.set_ylim(0, max(1.03, 1.03 * highest) if percent else 1.12 * highest or 1.0)
            axes.yaxis.set_major_formatter("{x:.0%}" if percent else "{x:,.6g}")
            if not percent:
                whole = key.startswith("prefill_instances_")
                axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=whole))
            if label is not None:
                axes.set_ylabel(label)
        _label_time(drawn.panels, columns, unit)
    return drawn.svg


def _curves(
    axes: "Axes", report: SimulationReport, key: str, time_scale_s: float, unit: float = 1.0
) -> float:
    """Draw a series of every policy that has it; its highest value."""
    stepped = key.startswith(("threshold_", "prefill_instances_"))
    highest = 0.0
    for number, (policy, result) in enumerate(report.results.items()):
        if key in result.series:
            time_s, values = thinned(result.series["time_s"], result.series[key], mean=not stepped)
            style = "steps-post" if stepped else "default"
            axes.plot(
                time_s / time_scale_s, values / unit, color=_colour(number), label=policy, drawstyle=style
            )
            highest = max(highest, _highest(values))
    return highest


def _egress(report: SimulationReport, keys: Sequence[str]) -> str:
    from prfaas.core.units import format_bits_per_s

    scale, unit = _time_unit(_end_s(report))
    columns = _columns(len(keys))
    bandwidths = {link.name: link.bandwidth_bits_per_s for link in report.deployment.links}
    with drawing("egress", len(keys), columns=columns, height=2.3) as drawn:
        for axes, key in zip(drawn.panels, keys, strict=True):
            link = key.removeprefix("egress_bits_per_s_")
            highest = _curves(axes, report, key, scale, 1e9)
            first = _series(report)[0]
            time_s, values = thinned(first["time_s"], first[f"capacity_bits_per_s_{link}"])
            axes.plot(time_s / scale, values / 1e9, color=INK, linewidth=0.9, linestyle=":", zorder=1)
            # The capacity of a wide link would make what it carries a line at the bottom.
            if float(values.min(initial=float("inf"))) < _MOST_ROOM * highest:
                highest = max(highest, _highest(values))
            axes.set_title(f"{link}, {format_bits_per_s(bandwidths[link])}")
            axes.set_ylim(0, 1.12 * highest / 1e9 or 1.0)
            axes.set_ylabel("Gbit/s")
        _label_time(drawn.panels, columns, unit)
    return drawn.svg


def thinned(time_s: FloatArray, values: FloatArray, *, mean: bool = True) -> "tuple[FloatArray, FloatArray]":
    """At most some hundred points: means of equal stretches, or (for what moves in steps) every so many-th value."""
    step = -(-len(values) // _CURVE_POINTS)
    if step <= 1:
        return np.asarray(time_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if not mean:
        return np.asarray(time_s[::step], dtype=np.float64), np.asarray(values[::step], dtype=np.float64)
    whole = len(values) // step * step
    return (
        np.asarray(time_s[:whole], dtype=np.float64).reshape(-1, step).mean(axis=1),
        np.asarray(values[:whole], dtype=np.float64).reshape(-1, step).mean(axis=1),
    )


def _first_tokens(result: Result) -> "tuple[FloatArray, FloatArray]":
    """When the counted requests arrived that had a first token, and their TTFT; both in seconds."""
    shown = result.counted & np.isfinite(result.ttft_s)
    return result.arrival_s[shown], result.ttft_s[shown]


def _series(report: SimulationReport) -> "list[Mapping[str, FloatArray]]":
    return [result.series for result in report.results.values()]


def _names(report: SimulationReport, prefix: str) -> list[str]:
    """Keys of series with that beginning, in the order of the first result that has them; all-zero ones left out."""
    found = dict.fromkeys(key for series in _series(report) for key in series if key.startswith(prefix))
    values = {key: [series.get(key, 0.0) for series in _series(report)] for key in found}
    return [key for key in found if any(np.any(np.nan_to_num(each, posinf=0.0)) for each in values[key])]


def _highest(values: FloatArray) -> float:
    return float(np.max(values[np.isfinite(values)], initial=0.0))


def _columns(panels: int) -> int:
    return panels if panels <= 3 else 2 if panels == 4 else 3


def _label_time(panels: "Sequence[Axes]", columns: int, unit: str) -> None:
    """The shared x axis stands below the lowest panel of each column."""
    for axes in panels[-columns:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(f"simulated time ({unit})")


def _seconds_axis(axes: "Axes", low: float, high: float) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(low, max(high, low * 1.01))
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=30))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def _mark(axes: "Axes", x: float, text: str) -> None:
    axes.axvline(x, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate(text, (x, 0), xytext=(4, 5), textcoords="offset points", color=INK, fontsize=8.5)


def _time_unit(end_s: float) -> tuple[float, str]:
    return (3600.0, "h") if end_s > 4 * 3600 else (60.0, "min") if end_s > 300 else (1.0, "s")


def _end_s(report: SimulationReport) -> float:
    times = [series["time_s"] for series in _series(report)]
    return max((float(time_s[-1]) for time_s in times if len(time_s)), default=1.0)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
