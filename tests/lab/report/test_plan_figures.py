"""Plots: what is drawn, where, and that the same numbers give the same file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from matplotlib.figure import Figure

from prfaas.core.planner import OperatingPoint, Plan, Stage
from prfaas.lab.report.plan_figures import (
    KvThroughputCurve,
    plot_allocation,
    plot_kv_throughput,
    plot_threshold,
    short_tokens,
)
from prfaas.lab.report.plan_sweep import PlanSweep


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Every figure that is saved, kept to look into."""
    saved: list[Figure] = []
    original = Figure.savefig

    def savefig(self: Figure, *args: object, **kwargs: object) -> None:
        saved.append(self)
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", savefig)
    yield saved


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def point(
    n_prefill: int = 3,
    n_decode: int = 5,
    *,
    lambda_max: float = 1.0,
    threshold_tokens: float | None = 20_000.0,
    away: float | None = None,
    home: float | None = None,
    decode: float = 4.0,
) -> OperatingPoint:
    """An operating point with the given limits of its stages, as far as plots look at it."""
    return OperatingPoint(
        threshold_tokens=threshold_tokens,
        n_prefill=n_prefill,
        n_decode=n_decode,
        theta_prfaas=None,
        theta_pd_p=None,
        theta_pd_d=decode,
        lambda_max=lambda_max,
        offloaded_fraction=0.5,
        mean_long_tokens=None,
        mean_short_tokens=None,
        egress_bits_per_s=0.0,
        ttft_mean_s=1.0,
        ttft_p90_s=1.0,
        n_prfaas=4,
        cache_policy="own",
        roles=(),
        stages=(
            Stage("east prefill", "prfaas prefill", away, 0.0),
            Stage("east->home link", "link", None, 0.0),
            Stage("home prefill", "pd prefill", home, 0.0),
            Stage("home decode", "pd decode", decode, 0.0),
        ),
        routes=(),
        links=(),
    )


VALUES = (1e9, 1e11)


def swept(threshold: float | None = 20_000.0) -> list[OperatingPoint]:
    return [point(lambda_max=1 + v / 1e11, threshold_tokens=threshold) for v in VALUES]


def plot_sweep(
    values: Sequence[float],
    points: Sequence[OperatingPoint],
    path: Path,
    *,
    missed: bool = False,
    is_rate: bool = False,
) -> None:
    """Beside a homogeneous cluster of 2 requests/s; `missed`: neither keeps the target at the first value."""
    keeps = [not missed, *[True] * (len(points) - 1)]
    plans = [
        SimpleNamespace(
            optimum=each,
            keeps_target=is_kept,
            homogeneous=SimpleNamespace(keeps_target=is_kept, point=point(lambda_max=2.0)),
        )
        for each, is_kept in zip(points, keeps, strict=True)
    ]
    sweep = PlanSweep(
        field="links[0].bandwidth", words="x", values=values, plans=cast("list[Plan]", plans), is_rate=is_rate
    )
    sweep.plot(path, "t")


def test_kv_throughput(tmp_path: Path, figures: list[Figure]) -> None:
    curves = [
        KvThroughputCurve("hybrid", [1024, 131072], [1e9, 5e9], False, [(1024, 1e9)]),
        KvThroughputCurve("dense", [1024, 131072], [5e9, 5e10], True),
    ]
    plot_kv_throughput(curves, tmp_path / "kv.svg")
    assert (tmp_path / "kv.svg").read_text().startswith("<svg")
    (axes,) = figures[0].axes
    assert labels(figures[0]) == ["hybrid", "dense"]
    styles = {str(line.get_label()): line.get_linestyle() for line in axes.lines}
    assert (styles["hybrid"], styles["dense"]) == ("-", "--")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    figures[0].canvas.draw()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        "1K",
        "2K",
        "4K",
        "8K",
        "16K",
        "32K",
        "64K",
        "128K",
    ]
    assert "10 Gbit/s" in [tick.get_text() for tick in axes.get_yticklabels()]


def test_no_two_curves_look_alike(tmp_path: Path, figures: list[Figure]) -> None:
    """Six models of the paper, the internal one, and a deployment's own on two kinds of hardware."""
    curves = [
        KvThroughputCurve(f"curve {number}", [1024, 131072], [1e9, 5e9], number % 3 == 2)
        for number in range(12)
    ]
    plot_kv_throughput(curves, tmp_path / "kv.svg")
    looks = {(line.get_color(), line.get_linestyle()) for line in figures[0].axes[0].lines}
    assert len(looks) == 12


def test_allocation_marks_the_best_split(tmp_path: Path, figures: list[Figure]) -> None:
    points = [
        point(
            n,
            8 - n,
            away=3.3,
            home=1.1 * n,
            decode=0.8 * (8 - n),
            lambda_max=min(3.3, 1.1 * n, 0.8 * (8 - n)),
        )
        for n in range(1, 8)
    ]
    plot_allocation(points, tmp_path / "split.svg", threshold_tokens=19_400, best=3)
    (axes,) = figures[0].axes
    assert "19,400" in axes.get_title(loc="left")
    assert [patch.get_height() for patch in axes.patches] == [each.lambda_max for each in points]
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert [colours.count(colour) for colour in colours] == [6, 6, 1, 6, 6, 6, 6]


def test_allocation_without_a_prfaas_cluster(tmp_path: Path, figures: list[Figure]) -> None:
    points = [point(1, 1, home=1.0, decode=2.0, lambda_max=1.0)]
    plot_allocation(points, tmp_path / "split.svg", threshold_tokens=None, best=1)
    assert labels(figures[0]) == ["limit of home prefill", "limit of home decode", "throughput"]


def test_threshold(tmp_path: Path, figures: list[Figure]) -> None:
    limits = [(2.0, 9.0), (3.0, 3.0), (9.0, 1.0)]
    points = [point(away=away, home=home, lambda_max=min(away, home)) for away, home in limits]
    best = point(threshold_tokens=1e4, lambda_max=3.0)
    plot_threshold([1e3, 1e4, 1e5], points, tmp_path / "t.svg", best=best)
    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "Throughput over the threshold, 3 prefill and 5 decode instances"
    assert "east prefill or its link: Θ(PrfaaS) / p" in labels(figures[0])
    assert "10,000 tokens\n3.00 req/s" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "points, panels, count",
    [(swept(), 2, 3), (swept(threshold=None), 1, 2)],
    ids=["all", "no threshold"],
)
def test_sweep(
    points: list[OperatingPoint], panels: int, count: int, tmp_path: Path, figures: list[Figure]
) -> None:
    path = tmp_path / "s.svg"
    plot_sweep(VALUES, points, path, is_rate=True)
    assert len(figures[0].axes) == panels
    assert len(labels(figures[0])) == count
    assert figures[0].axes[-1].get_xlabel() == "x"


def test_points_that_miss_the_target_are_crossed_out(tmp_path: Path, figures: list[Figure]) -> None:
    plot_sweep(VALUES, swept(), tmp_path / "s.svg", missed=True)
    crosses = figures[0].axes[0].lines[-1]
    assert crosses.get_label() == "misses the target for the TTFT"
    assert list(crosses.get_xdata()) == [VALUES[0]]
    assert not crosses.get_clip_on()


def test_what_misses_the_target_is_no_part_of_a_curve(tmp_path: Path, figures: list[Figure]) -> None:
    """Else a target that can't be kept would seem to carry more than one that can."""
    plot_sweep(VALUES, swept(), tmp_path / "s.svg", missed=True)
    axes = figures[0].axes[0]
    drawn = {str(line.get_label()): [str(y) for y in line.get_ydata()] for line in axes.lines}
    assert drawn["this deployment, best plan"] == ["nan", "2.0"]
    assert drawn["homogeneous PD with as many GPUs"] == ["nan", "2.0"]
    assert axes.get_ylim() == (0, pytest.approx(1.12 * 2))
    # One point alone is no line.
    own = next(line for line in axes.lines if line.get_label() == "this deployment, best plan")
    assert own.get_marker() == "o"


def test_a_short_axis_of_rates_has_more_than_one_tick(tmp_path: Path, figures: list[Figure]) -> None:
    points = [point(), point()]
    plot_sweep([5e10, 4e11], points, tmp_path / "s.svg", is_rate=True)
    axis = figures[0].axes[-1].xaxis
    ticks = [tick for tick in axis.get_majorticklocs() if 5e10 <= tick <= 4e11]
    assert [axis.get_major_formatter()(tick) for tick in ticks] == ["50 Gbit/s", "100 Gbit/s", "200 Gbit/s"]


def test_a_sweep_of_nothing_and_of_one_value(tmp_path: Path) -> None:
    nothing = [point(1, 1, lambda_max=0.0, threshold_tokens=0.0)]
    plot_sweep([1.0], nothing, tmp_path / "s.svg")
    assert (tmp_path / "s.svg").is_file()


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        plot_sweep(VALUES, swept(), tmp_path / "s.svg", is_rate=True)
        drawn.append((tmp_path / "s.svg").read_text())
    assert drawn[0] == drawn[1]
    # matplotlib would write the time there.
    assert "<metadata" not in drawn[0]


@pytest.mark.parametrize("tokens, text", [(128, "128"), (1024, "1K"), (1536, "1.5K"), (131072, "128K")])
def test_short_tokens(tokens: float, text: str) -> None:
    assert short_tokens(tokens) == text
