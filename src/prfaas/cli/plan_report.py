"""A plan as `report` shows it."""

from prfaas.deployment import PlannedDeployment
from prfaas.planner import Baseline, OperatingPoint, Plan
from prfaas.report.plan import LinkRow, PlanReport, PriceRow, RouteRow, SetupColumn, StageRow


def plan_report(deployment: PlannedDeployment, plan: Plan) -> PlanReport:
    """What `prfaas plan` prints."""
    return PlanReport(
        title=f"{deployment.name}: {deployment.kv_model.name}",
        verdict=plan.verdict,
        setups=_setups(deployment, plan),
        stages=_stages(deployment, plan.optimum),
        prices=[
            PriceRow(_resource(price.resource, price.unit), price.gain_req_per_s, price.gain_ratio)
            for price in plan.shadow_prices
        ],
        links=[
            LinkRow(link.name, link.egress_bits_per_s, link.bandwidth_bits_per_s, link.needed_bits_per_s)
            for link in plan.optimum.links
        ],
        load=plan.ttft_estimate.load,
        routes=_routes(plan.optimum),
        notes=_notes(plan),
    )


def _setups(deployment: PlannedDeployment, plan: Plan) -> list[SetupColumn]:
    point, estimate = plan.optimum, plan.ttft_estimate
    columns = [
        SetupColumn(
            title="optimum",
            lambda_max=point.lambda_max,
            ratio=plan.ratio_to_homogeneous,
            threshold_tokens=point.threshold_tokens,
            instances=_instances(point),
            gpus=_gpus(deployment),
            cost_ratio=None if plan.cost is None else 1.0,
            offloaded_fraction=point.offloaded_fraction,
            ttft_mean_s=point.ttft_mean_s,
            ttft_p90_s=point.ttft_p90_s,
            ttft_queued_mean_s=estimate.mean_s,
            ttft_queued_p90_s=estimate.p90_s,
            cost_per_million_tokens=None if plan.cost is None else plan.cost.per_million_tokens,
        )
    ]
    base = plan.homogeneous.point.lambda_max
    titles = {
        "homogeneous": plan.homogeneous,
        "at equal cost": plan.homogeneous_equal_cost,
        "naive": plan.naive,
    }
    for title, baseline in titles.items():
        if baseline is not None:
            gpus = _gpus(deployment) if baseline is plan.naive else f"{baseline.gpus} {baseline.hardware}"
            columns.append(_baseline(title, baseline, base, gpus))
    return columns


def _baseline(title: str, baseline: Baseline, base: float, gpus: str) -> SetupColumn:
    point = baseline.point
    return SetupColumn(
        title=title,
        lambda_max=point.lambda_max,
        ratio=point.lambda_max / base if base > 0 else None,
        instances=_instances(point),
        gpus=gpus,
        cost_ratio=None if baseline.cost_ratio is None else 1 / baseline.cost_ratio,
        ttft_mean_s=point.ttft_mean_s,
        ttft_p90_s=point.ttft_p90_s,
    )


def _instances(point: OperatingPoint) -> str:
    home = f"{point.n_prefill} + {point.n_decode}"
    return f"{point.n_prfaas} + {home}" if point.n_prfaas else home


def _gpus(deployment: PlannedDeployment) -> str:
    by_hardware: dict[str, int] = {}
    for cluster in deployment.clusters:
        by_hardware[cluster.hardware] = by_hardware.get(cluster.hardware, 0) + cluster.gpus
    return " + ".join(f"{count} {hardware}" for hardware, count in by_hardware.items())


def _stages(deployment: PlannedDeployment, point: OperatingPoint) -> list[StageRow]:
    counts = {f"{cluster.name} prefill": cluster.instance_count for cluster in deployment.prfaas_clusters}
    for roles in point.roles:
        counts[f"{roles.cluster} prefill"] = roles.prefill
        counts[f"{roles.cluster} decode"] = roles.decode
    return [
        StageRow(stage.name, str(counts.get(stage.name, "")), stage.capacity, stage.name in point.binding)
        for stage in point.stages
    ]


def _routes(point: OperatingPoint) -> list[RouteRow]:
    return [
        RouteRow(
            route.prefill, route.decode, route.fraction, route.from_tokens, route.to_tokens, route.mean_tokens
        )
        for route in point.routes
        if route.fraction > 5e-4
    ]


def _resource(name: str, unit: str) -> str:
    return f"{unit} on {name}" if unit == "Gbit/s" else f"{unit} in {name}"


def _notes(plan: Plan) -> list[str]:
    notes = [
        "Throughput takes each stage's time at the mean length, as the paper does; by the lengths one by one it "
        f"is {plan.lambda_max_by_length:.4g} req/s. TTFT is the time of prefill without waiting.",
        "Instances are PrfaaS + PD prefill + PD decode, in a column without PrfaaS the latter two.",
    ]
    if plan.bound_gap > 1e-4:
        notes.append(f"The search stopped early: the true optimum may be up to {plan.bound_gap:.1%} higher.")
    return notes
