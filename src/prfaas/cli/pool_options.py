"""The pools that `prfaas plan` and `prfaas simulate` are asked for: the file's, or others by options."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from prfaas.cli.common import CliError
from prfaas.cli.option_groups import options_of_panel

if TYPE_CHECKING:
    from prfaas.core.deployment import PlannedDeployment
    from prfaas.lab.simulator.machine_pool import PoolOptions

_TIERS = ("memory", "ssd", "network")

pool_option = options_of_panel("Prefix-cache pools")


@dataclass(frozen=True, slots=True)
class PoolsAsked:
    """The options for pools."""

    pool: str | None = pool_option(
        None, "Memory of every machine's pool, in place of what the file gives; 0: no pools.", metavar="SIZE"
    )
    pool_ssd: str | None = pool_option(
        None, "SSD of every machine's pool, in place of what the file gives.", metavar="SIZE"
    )
    pool_rate: list[str] | None = pool_option(
        None,
        f"How fast a machine loads from a tier ({', '.join(_TIERS)}), e.g. ssd=48Gbit/s; may be repeated.",
        metavar="TIER=RATE",
    )

    @property
    def is_given(self) -> bool:
        """True if any option is."""
        return any(getattr(self, each.name) not in (None, []) for each in fields(self))


def pools_asked(planned: "PlannedDeployment", asked: PoolsAsked) -> "dict[str, PoolOptions]":
    """The pool of each machine, by cluster; clusters without one are left out.

    Raises:
        CliError: a size or rate that is none, SSD without memory, or a model that keeps nothing per token.
    """
    from prfaas.lab.simulator.machine_pool import PoolOptions
    from prfaas.lab.simulator.scenario import pools_of

    pools = pools_of(planned)
    if asked.pool is not None:
        size = _size("--pool", asked.pool)
        pools = {
            cluster.name: PoolOptions(
                size,
                checkpoint_tokens=planned.pool.checkpoint_tokens,
                eviction=planned.pool.eviction,
                instances_per_machine=cluster.instances_per_machine,
            )
            for cluster in planned.clusters
            if size
        }
    if not pools:
        if asked.pool_ssd is not None or asked.pool_rate:
            raise CliError("--pool-ssd and --pool-rate need pools: give --pool, or pools in the file")
        return {}
    if planned.kv_model.token_bytes == 0:
        raise CliError(f"--pool: {planned.kv_model.name} has no full-attention layers, so it gets no pool")
    if asked.pool_ssd is not None:
        size = _size("--pool-ssd", asked.pool_ssd)
        pools = {name: replace(options, ssd_bytes=size) for name, options in pools.items()}
    given: dict[str, Any] = dict(_rate(text) for text in asked.pool_rate or ())
    return {
        name: replace(options, **{f"{tier}_bits_per_s": rate for tier, rate in given.items()})
        for name, options in pools.items()
    }


def _size(option: str, text: str) -> int:
    from prfaas.core.units import parse_bytes

    if text.strip() == "0":
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CliError(f"{option}: {error}") from None


def _rate(text: str) -> tuple[str, float]:
    from prfaas.core.units import parse_bits_per_s

    tier, sign, rate = text.partition("=")
    if not sign or tier not in _TIERS:
        raise CliError(f'--pool-rate "{text}": write TIER=RATE with one of {", ".join(_TIERS)}')
    try:
        return tier, parse_bits_per_s(rate)
    except ValueError as error:
        raise CliError(f"--pool-rate {tier}: {error}") from None
