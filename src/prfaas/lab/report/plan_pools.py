"""The part of a plan that is about pools, for people and for programs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prfaas.core.planner.pool_worth import PoolWorth, TierWorth
from prfaas.core.units import format_bits_per_s, format_bytes, format_s
from prfaas.lab.simulator import PoolOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The worth of a deployment's pools and of their tiers."""

    pools: Mapping[str, PoolOptions]
    """By cluster, of each machine."""
    hits: str
    """Where the hits are from; empty if nothing says."""
    worth: PoolWorth | None
    """None without hits."""
    tiers: tuple[TierWorth, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "clusters": {name: asdict(options) for name, options in self.pools.items()},
            "hits": self.hits or None,
            "worth": None if self.worth is None else self.worth.to_json(),
            "tiers": [asdict(tier) | {"pays": tier.pays} for tier in self.tiers],
        }


def print_pools(console: "Console", plan: PoolPlan) -> None:
    """Write it to a rich console: a sentence and a table of tiers."""
    from rich.text import Text

    console.print()
    console.print(Text(_sizes(plan.pools), style="bold"))
    console.print(Text(_worth(plan)))
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


def _worth(plan: PoolPlan) -> str:
    worth = plan.worth
    if worth is None:
        return "Give --trace FILE or --pool-hits RATIO to see what they are worth."
    before, after = worth.without, worth.with_hits
    spared = [f"{count} of {name}" for name, count in worth.spared_instances.items() if count]
    gain = f" ({after.lambda_max / before.lambda_max - 1:+.0%})" if before.lambda_max else ""
    text = (
        f"They spare {worth.hit_ratio:.1%} of all prompt tokens ({plan.hits}): {after.lambda_max:.4g} requests/s in "
        f"place of {before.lambda_max:.4g}{gain}"
    )
    if before.ttft_mean_s is not None and after.ttft_mean_s is not None:
        text += (
            f", a mean prefill of {format_s(after.ttft_mean_s)} in place of {format_s(before.ttft_mean_s)}"
        )
    return f"{text}. The same rate without: {' or '.join(spared) if spared else 'no instance fewer'}."


def _tiers(tiers: tuple[TierWorth, ...]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("tier")
    for title in ("for an instance", "Φ_kv", "pays", "for prefixes from"):
        table.add_column(title, justify="right")
    for tier in tiers:
        table.add_row(
            f"{tier.cluster} {tier.tier}",
            format_bits_per_s(tier.bandwidth_bits_per_s),
            format_bits_per_s(tier.kv_bits_per_s),
            "yes" if tier.pays else "no",
            "none" if tier.pays_from_tokens is None else f"{tier.pays_from_tokens:,.0f} tokens",
        )
    return table
