"""The plots of `prfaas plan --plot`: Figures 2 and 5 of the paper for this deployment, and what bandwidth buys."""

from collections.abc import Iterator, Mapping
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.kv import KvModel, published_models
from prfaas.core.latency import LatencyProfile, load_profile, profile_names
from prfaas.core.planner import KvSize, OperatingPoint, Plan, PlanProblem
from prfaas.core.planner.equations import kv_throughput_bits_per_s
from prfaas.core.planner.network import best_network
from prfaas.core.planner.two_clusters import best_point, best_threshold, evaluate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prfaas.lab.report.figures import KvThroughputCurve, SplitPoint, SweepPoint

_BANDWIDTH_POINTS = 61
# Several clusters take about half a second per plan.
_NETWORK_BANDWIDTH_POINTS = 21
_THRESHOLD_POINTS = 200


def write_plots(
    deployment: PlannedDeployment, problem: PlanProblem, plan: Plan, directory: Path
) -> Iterator[Path]:
    """Write what applies to the deployment, one file after the other. Figure 5 is for two clusters.

    Existing files of the same names are replaced.
    """
    from prfaas.lab.report.figures import plot_kv_throughput

    path = directory / f"{deployment.name}-kv-throughput.png"
    plot_kv_throughput(kv_throughput_curves(deployment), path, title="KVCache made per second of prefill")
    yield path
    if len(deployment.prfaas_clusters) == 1 and len(deployment.pd_clusters) == 1:
        yield _plot_allocation(deployment, problem, plan, directory)
        if plan.optimum.threshold_tokens is not None:
            yield _plot_threshold(deployment, problem, plan, directory)
    if deployment.links:
        yield _plot_bandwidth(deployment, problem, plan, directory)


def kv_throughput_curves(deployment: PlannedDeployment | None = None) -> "list[KvThroughputCurve]":
    """Φ_kv (Eq. 1) of the paper's models on 8 × H200, and of a deployment's own on all that it runs on."""
    curves = []
    names = profile_names()
    for model in published_models():
        if model.in_paper and f"{model.name}-h200" in names:
            profile = load_profile(f"{model.name}-h200")
            curves.append(_curve(model.title.split(" (")[0], model.kv_model, profile))
    if deployment is None:
        return curves
    shown = {f"{model.name}-h200" for model in published_models() if model.in_paper}
    own = {cluster.profile.name: cluster.profile for cluster in deployment.clusters}
    for name, profile in own.items():
        if name not in shown:
            label = f"{deployment.kv_model.name}, {profile.hardware}"
            curves.append(_curve(label, deployment.kv_model, profile))
    return curves


def _curve(label: str, kv_model: KvModel, profile: LatencyProfile) -> "KvThroughputCurve":
    import numpy as np

    from prfaas.lab.report.figures import KvThroughputCurve

    low, high = max(profile.range_tokens[0], 1024.0), profile.range_tokens[1]
    tokens = np.geomspace(low, high, 120)
    measured = np.array([at for at, _ in profile.prefill.points if low <= at <= high], dtype=np.float64)

    def rates(lengths: "NDArray[np.float64]") -> list[float]:
        sizes, seconds = KvSize(kv_model)(lengths), profile.prefill_s(lengths)
        return [
            kv_throughput_bits_per_s(*each) for each in zip(sizes.tolist(), seconds.tolist(), strict=True)
        ]

    return KvThroughputCurve(
        label=label,
        tokens=tokens.tolist(),
        bits_per_s=rates(tokens),
        is_dense=not kv_model.is_hybrid,
        measured=list(zip(measured.tolist(), rates(measured), strict=True)) if len(measured) else (),
    )


def _plot_allocation(
    deployment: PlannedDeployment, problem: PlanProblem, plan: Plan, directory: Path
) -> Path:
    from prfaas.lab.report.figures import plot_allocation

    total = problem.pd[0].instances
    threshold = plan.optimum.threshold_tokens
    at = problem.workload.uncached.high if threshold is None else threshold
    points = [_split_point(evaluate(problem, at, n)) for n in range(1, total)] or [
        _split_point(evaluate(problem, at, plan.optimum.n_prefill))
    ]
    path = directory / f"{deployment.name}-split.png"
    plot_allocation(points, path, threshold_tokens=threshold, best=plan.optimum.n_prefill)
    return path


def _split_point(point: OperatingPoint) -> "SplitPoint":
    from prfaas.lab.report.figures import SplitPoint

    limits = _limits(point)
    return SplitPoint(
        n_prefill=point.n_prefill,
        n_decode=point.n_decode,
        prefill_away=limits.get("away"),
        prefill_home=limits.get("home", inf),
        decode=limits["decode"],
        lambda_max=point.lambda_max,
    )


def _limits(point: OperatingPoint) -> Mapping[str, float]:
    """Of each kind of stage the lowest limit; links belong to the prefill that uses them."""
    sides = {"prfaas prefill": "away", "link": "away", "pd prefill": "home", "pd decode": "decode"}
    found: dict[str, float] = {}
    for stage in point.stages:
        if stage.capacity is not None:
            side = sides[stage.kind]
            found[side] = min(stage.capacity, found.get(side, inf))
    return found


def _plot_threshold(deployment: PlannedDeployment, problem: PlanProblem, plan: Plan, directory: Path) -> Path:
    import numpy as np

    from prfaas.lab.report.figures import ThresholdCurves, plot_threshold

    lengths = problem.workload.uncached
    best = best_threshold(problem, plan.optimum.n_prefill)
    chosen = best.threshold_tokens
    assert chosen is not None
    # Where nearly nobody is on one side of the threshold there is nothing to see.
    low, high = min(lengths.quantile(0.03), chosen / 2), max(lengths.quantile(0.97), chosen)
    tokens = np.unique(np.append(np.geomspace(low, high, _THRESHOLD_POINTS), chosen)).tolist()
    points = [evaluate(problem, threshold, best.n_prefill) for threshold in tokens]
    limits = [_limits(point) for point in points]
    path = directory / f"{deployment.name}-threshold.png"
    plot_threshold(
        ThresholdCurves(
            tokens=tokens,
            prefill_away=[each.get("away", nan) for each in limits],
            prefill_home=[each.get("home", nan) for each in limits],
            decode=best.theta_pd_d,
            lambda_max=[point.lambda_max for point in points],
        ),
        path,
        best_tokens=chosen,
        best_lambda=best.lambda_max,
        split=(best.n_prefill, best.n_decode),
    )
    return path


def _plot_bandwidth(deployment: PlannedDeployment, problem: PlanProblem, plan: Plan, directory: Path) -> Path:
    from prfaas.lab.report.figures import plot_sweep

    has = max(link.bandwidth_bits_per_s for link in problem.links)
    wanted = max([link.needed_bits_per_s or 0.0 for link in plan.optimum.links] + [has])
    points = list(_bandwidth_points(problem, plan, low=has / 100, high=3 * wanted))
    several = len(problem.links) > 1
    path = directory / f"{deployment.name}-bandwidth.png"
    plot_sweep(
        points,
        path,
        title=f"{deployment.name}: what bandwidth buys",
        label="bandwidth of the widest link, the others in proportion"
        if several
        else "bandwidth of the link",
        scale="bits_per_s",
        has=has,
    )
    return path


def _bandwidth_points(problem: PlanProblem, plan: Plan, *, low: float, high: float) -> "Iterator[SweepPoint]":
    from dataclasses import replace

    from prfaas.lab.report.figures import SweepPoint

    widest = max(link.bandwidth_bits_per_s for link in problem.links)
    count = _BANDWIDTH_POINTS if problem.is_two_cluster else _NETWORK_BANDWIDTH_POINTS
    values = [low * (high / low) ** (index / (count - 1)) for index in range(count)]
    # The deployment's own value too, so that the curve is right where it is marked.
    for value in sorted({*values, widest}):
        links = tuple(
            replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s * value / widest)
            for link in problem.links
        )
        point = _best(replace(problem, links=links))
        yield SweepPoint(
            value,
            point.lambda_max,
            plan.homogeneous.point.lambda_max,
            point.threshold_tokens,
            f"{point.n_prefill} + {point.n_decode}",
            point.egress_bits_per_s,
            ", ".join(point.binding),
        )


def _best(problem: PlanProblem) -> OperatingPoint:
    return best_point(problem) if problem.is_two_cluster else best_network(problem).point
