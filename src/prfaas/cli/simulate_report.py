"""Results of a simulation as `report` shows them."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prfaas.core.units import format_bits_per_s, format_bytes, format_s
from prfaas.lab.report.simulation import PolicyRun, SimulationReport, StageUse

if TYPE_CHECKING:
    from prfaas.cli.simulate_inputs import SimulatedTraffic
    from prfaas.core.deployment import PlannedDeployment
    from prfaas.lab.simulator import CacheOptions, Result


def simulation_report(
    deployment: "PlannedDeployment",
    document: Mapping[str, Any],
    results: "Mapping[str, Result]",
    traffic: "SimulatedTraffic",
    *,
    caches: "CacheOptions | None",
    fluctuation: str | None,
    changes: Sequence[str],
) -> SimulationReport:
    """`document` is what `--json` prints: its numbers are those shown."""
    load, rate_rps = document["load"], document["rate_rps"]
    return SimulationReport(
        title=f"{deployment.name}: {rate_rps:.4g} requests/s, {load:.3g} of the planner's Λ_max",
        lead=f"{deployment.kv_model.name}; simulated with prfaas simulate, seed {document['seed']}",
        facts=_facts(deployment, document, traffic, caches, fluctuation, changes),
        runs=[_run(deployment, name, result, document["policies"][name]) for name, result in results.items()],
        links={link.name: link.bandwidth_bits_per_s for link in deployment.links},
        command=shlex.join(["prfaas", *sys.argv[1:]]),
        notes=traffic.notes,
        ttft_slo_s=deployment.slo.ttft_s,
    )


def _facts(
    deployment: "PlannedDeployment",
    document: Mapping[str, Any],
    traffic: "SimulatedTraffic",
    caches: "CacheOptions | None",
    fluctuation: str | None,
    changes: Sequence[str],
) -> list[tuple[str, str]]:
    length = (
        f"{document['requests']:,} requests"
        if document["requests"] is not None
        else f"{format_s(document['duration_s'])} of arrivals"
    )
    facts = [
        ("clusters", "; ".join(_clusters(deployment))),
        ("arrivals", traffic.words),
        (
            "load",
            f"{document['load']:.3g} × Λ_max, which is {document['lambda_max_rps']:.4g} requests/s by `prfaas plan`",
        ),
        ("length", f"{length}, a tenth of the time warm-up; seed {document['seed']}"),
        ("caches", _caches(deployment, caches)),
    ]
    if deployment.links:
        links = [f"{link.name} {format_bits_per_s(link.bandwidth_bits_per_s)}" for link in deployment.links]
        facts.insert(1, ("links", "; ".join(links) + _fluctuating(fluctuation)))
    if changes:
        facts.append(("changed in the file", "; ".join(changes)))
    return facts


def _clusters(deployment: "PlannedDeployment") -> Iterator[str]:
    for cluster in deployment.clusters:
        does = "prefill for others" if cluster.kind == "prfaas" else "prefill and decode"
        yield f"{cluster.name}: {cluster.instance_count} × {cluster.gpus_per_instance} {cluster.hardware}, {does}"


def _caches(deployment: "PlannedDeployment", caches: "CacheOptions | None") -> str:
    if caches is None:
        return "none"
    size = format_bytes(caches.capacity_tokens * deployment.kv_model.token_bytes)
    text = f"{size} on every instance ({caches.capacity_tokens:,} tokens)"
    if caches.checkpoint_tokens is not None:
        text += (
            f"; hybrid model: a state, as large as {caches.state_tokens:,} tokens, every "
            f"{caches.checkpoint_tokens:,} tokens and at the end of a prompt"
        )
    return text


def _fluctuating(text: str | None) -> str:
    if text is None:
        return ""
    relative_sd, _, correlation_s = text.partition(":")
    return f"; fluctuating by {float(relative_sd):.0%} (standard deviation), correlated over {float(correlation_s):g} s"


def _run(
    deployment: "PlannedDeployment", name: str, result: "Result", summary: Mapping[str, Any]
) -> PolicyRun:
    import numpy as np

    shown = result.counted & np.isfinite(result.ttft_s)
    return PolicyRun(
        name=name,
        numbers={
            key: value for key, value in summary.items() if value is None or isinstance(value, int | float)
        }
        | {key: len(summary[key]) for key in ("threshold_changes", "conversions")},
        decisions=dict(summary["decisions"]),
        stages=list(_stages(deployment, result)),
        arrival_s=result.arrival_s[shown],
        ttft_s=result.ttft_s[shown],
        series=result.series,
    )


def _stages(deployment: "PlannedDeployment", result: "Result") -> Iterator[StageUse]:
    """Means of what the series say after the warm-up."""
    for cluster in deployment.clusters:
        for what, queue in (("prefill", "queue"), ("decode", "decode_queue")):
            busy = _mean(result, f"{what}_utilisation_{cluster.name}")
            if busy is not None:
                yield StageUse(cluster.name, what, busy, _mean(result, f"{queue}_{cluster.name}"))
    for link in deployment.links:
        rate = _mean(result, f"egress_bits_per_s_{link.name}")
        if rate is not None:
            yield StageUse(link.name, "link", rate / link.bandwidth_bits_per_s, note=format_bits_per_s(rate))


def _mean(result: "Result", key: str) -> float | None:
    import numpy as np

    values = result.series.get(key)
    if values is None:
        return None
    kept = values[result.series["time_s"] > result.start_s]
    kept = kept[np.isfinite(kept)]
    return float(kept.mean()) if len(kept) else None
