"""The prefix-cache pools of a deployment: one per machine of a cluster, shared by the engines there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prfaas.core.deployment.field_types import GIVEN, Folder, Port, Seconds, Size, SizeOrZero, Whole, needs
from prfaas.core.deployment.section import POOLS_AGAIN, Section
from prfaas.core.units import MIB

EvictionName = Literal["lru", "cost"]
"""Which page goes when a pool is full: the least recently used, or what is cheapest to compute per byte."""


@dataclass(frozen=True, slots=True)
class PoolSettings(Section, on_change=POOLS_AGAIN):
    """What all pools of a deployment have in common."""

    checkpoint_tokens: Whole = 32768
    """Distance of the linear states that are kept inside long prompts; 0: only at ends and where prompts part."""
    tenant_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.5
    """A tenant that fills more than this part of a pool loses its own pages first."""
    eviction: EvictionName = "lru"
    """Which page goes when a pool is full."""
    staging_bytes: Annotated[Size, Field(alias="staging", ge=MIB)] = 256 * MIB
    """Memory of a pool, beside its pages, for those that arrive from other machines."""
    timeout_s: Annotated[Seconds, Field(le=30)] = 2.0
    """An engine waits so long at most for a pool's answer; then the pool counts as empty."""


@dataclass(frozen=True, slots=True)
class PoolSpace(Section):
    """What each machine of a cluster gives to its pool, and where it is reached."""

    memory_bytes: Annotated[Size, Field(alias="memory", ge=MIB)]
    """Shared memory for pages."""
    ssd_bytes: Annotated[SizeOrZero, Field(alias="ssd")] = 0
    """Disk for pages; 0: none."""
    path: Annotated[
        Folder | None,
        GIVEN,
        needs("ssd_bytes", "is where the SSD's share lies, but pool.ssd is 0; say how much it may take"),
    ] = None
    """The folder on the disk that may be used; left out: the deployment's own."""
    kv_port: Annotated[Port | None, GIVEN] = None
    """Where pools of other machines and the gateway reach it; needed unless it is only planned with."""


@dataclass(frozen=True, slots=True)
class PoolNode:
    """The pool of one machine: memory and disk behind the engines that a cluster has there."""

    name: str
    cluster: str
    host: str
    kv_port: int
    memory_bytes: int
    ssd_bytes: int
    path: Path
    """A folder of its own on the disk, relative paths resolved."""
    instances: tuple[str, ...]
    """The engines that use it, by name."""
    tls: bool
    """The gateway and the tools speak TLS at its KV port, as with its engines."""


def pool_names(cluster: str, machines: int) -> tuple[str, ...]:
    """The names of a cluster's pools, in the order of its machines."""
    if machines == 1:
        return (f"{cluster}-pool",)
    return tuple(f"{cluster}-pool-{number}" for number in range(machines))
