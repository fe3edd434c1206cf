"""The part of a plan that is about pools, for people and for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import OperatingPoint, PlanProblem, best_operation, problem_of_trace, range_tokens
from prfaas.core.planner.pool_worth import TierWorth, tier_worths
from prfaas.core.units import format_bits_per_s, format_bytes, format_s
from prfaas.core.workload.requests import RequestTrace
from prfaas.lab.report.plan import new_table
from prfaas.lab.simulator.machine_pool import MachinePool, PoolOptions, replayed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class PoolHits:
    """The best operation for a trace without pools and with the hits that it has in them."""

    trace: str
    hit_ratio: float
    """Part of all prompt tokens that the pools spare."""
    without: OperatingPoint
    with_hits: OperatingPoint

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "trace": self.trace,
            "hit_ratio": self.hit_ratio,
            "lambda_max_without": self.without.lambda_max,
            "lambda_max_with": self.with_hits.lambda_max,
            "ttft_mean_without_s": self.without.ttft_mean_s,
            "ttft_mean_with_s": self.with_hits.ttft_mean_s,
        }


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The worth of a deployment's pools and of their tiers."""

    pools: Mapping[str, PoolOptions]
    """By cluster, of each machine."""
    tiers: tuple[TierWorth, ...]
    hits: PoolHits | None
    """None without a trace."""

    @classmethod
    def of(
        cls,
        planned: PlannedDeployment,
        problem: PlanProblem,
        pools: Mapping[str, PoolOptions],
        trace: RequestTrace | None,
    ) -> "PoolPlan":
        """Plan with pools; a trace is replayed through those of all machines, and planned for."""
        lengths, hits = range_tokens(planned), None
        if trace is not None:
            reuses = list(replayed(trace, list(_machines(planned, pools, trace.block_tokens))))
            left = [each.input_tokens - each.reused_tokens for each in reuses]
            ratio = 1 - sum(left) / sum(each.input_tokens for each in reuses)
            cached, problem = (problem_of_trace(problem, trace, lengths[0], each) for each in (left, None))
            hits = PoolHits(Path(trace.name).name, ratio, best_operation(problem), best_operation(cached))
        bandwidths = {
            cluster.name: _bandwidths(pools[cluster.name], cluster.instance_count)
            for cluster in planned.clusters
            if cluster.name in pools
        }
        return cls(pools, tier_worths(problem, bandwidths, lengths), hits)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "clusters": {name: asdict(options) for name, options in self.pools.items()},
            "worth": None if self.hits is None else self.hits.to_json(),
            "tiers": [asdict(tier) | {"pays": tier.pays} for tier in self.tiers],
        }


def _bandwidths(options: PoolOptions, instances: int) -> dict[str, float]:
    """Of each tier, for one of the instances that share it."""
    together = min(options.instances_per_machine, instances)
    found = {"memory": options.memory_bits_per_s / together}
    if options.ssd_bytes:
        found["SSD"] = options.ssd_bits_per_s / together
    if instances > together:
        found["other machines"] = options.network_bits_per_s / together
    return found


def _machines(
    planned: PlannedDeployment, pools: Mapping[str, PoolOptions], block_tokens: int
) -> Iterator[MachinePool]:
    for cluster in planned.clusters:
        options = pools.get(cluster.name)
        if options is not None:
            between_s = ServiceCurve.of_profile(cluster.profile).between_s
            for _ in range(-(-cluster.instance_count // options.instances_per_machine)):
                yield MachinePool(options, cluster.kv_model or planned.kv_model, block_tokens, between_s)


def print_pools(console: "Console", plan: PoolPlan) -> None:
    """Write it to a rich console: a sentence and a table of tiers."""
    from rich.text import Text

    console.print()
    console.print(Text(_sizes(plan.pools), style="bold"))
    console.print(Text(_worth(plan.hits)))
    console.print()
    console.print(_tiers(plan.tiers))
    console.print()
    console.print(
        Text(
            "A tier pays where it loads a prefix sooner than an instance computes it: above the KV throughput "
            f"(Φ_kv), here of {plan.tiers[0].tokens:,.0f} tokens. Its bandwidth is divided among the instances of a "
            "machine.",
            style="dim",
        )
    )


def _sizes(pools: Mapping[str, PoolOptions]) -> str:
    told = [
        f"{name} {format_bytes(options.memory_bytes)}"
        + (f" and {format_bytes(options.ssd_bytes)} of SSD" if options.ssd_bytes else "")
        for name, options in pools.items()
    ]
    return f"Pools of each machine: {'; '.join(told)}."


def _worth(hits: PoolHits | None) -> str:
    if hits is None:
        return "Give --trace FILE to see what they are worth."
    before, after = hits.without, hits.with_hits
    gain = f" ({after.lambda_max / before.lambda_max - 1:+.0%})" if before.lambda_max else ""
    return (
        f"They spare {hits.hit_ratio:.1%} of all prompt tokens ({hits.trace}, replayed through the pools of all "
        f"machines): {after.lambda_max:.4g} requests/s in place of {before.lambda_max:.4g}{gain}, a mean prefill of "
        f"{format_s(after.ttft_mean_s)} in place of {format_s(before.ttft_mean_s)}."
    )


def _tiers(tiers: tuple[TierWorth, ...]) -> "Table":
    table = new_table("tier", "for an instance", "Φ_kv", "pays", "for prefixes from")
    for tier in tiers:
        table.add_row(
            f"{tier.cluster} {tier.tier}",
            format_bits_per_s(tier.bandwidth_bits_per_s),
            format_bits_per_s(tier.kv_bits_per_s),
            "yes" if tier.pays else "no",
            "none" if tier.pays_from_tokens is None else f"{tier.pays_from_tokens:,.0f} tokens",
        )
    return table
