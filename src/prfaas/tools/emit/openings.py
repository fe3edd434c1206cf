"""Which ports of a deployment are open, and to whom: what firewalls and network policies are made from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prfaas.core.deployment.addresses import is_loopback
from prfaas.core.deployment.peers import peers_of, sources_of
from prfaas.core.deployment.security import GATEWAY
from prfaas.core.deployment.types import Deployment, Instance

CLIENTS = "clients"
"""Whoever sends requests: no part of the deployment."""

OPERATORS = "operators"
"""Who reads metrics and state: Prometheus, and `prfaas status` from elsewhere."""

Purpose = Literal["http", "kv", "events", "nixl", "ranks", "admin"]


@dataclass(frozen=True, slots=True)
class Opening:
    """Ports of one member that others connect to over TCP."""

    owner: str
    """An instance's or a pool's name, or `GATEWAY`."""
    purpose: Purpose
    ports: tuple[int, ...]
    """Empty: any, since what listens there chooses it itself."""
    sources: tuple[str, ...]
    """Names of those who connect: instances, pools, `GATEWAY`, `CLIENTS`, `OPERATORS`."""


def openings_of(deployment: Deployment) -> tuple[Opening, ...]:
    """Every port on which others than its own machine reach the deployment, once, with all that may connect there."""
    return tuple(_openings(deployment))


def _openings(deployment: Deployment) -> Iterator[Opening]:
    for instance in deployment.instances:
        # vLLM has its own metrics on the port that the gateway asks.
        yield Opening(instance.name, "http", (instance.http_port,), (GATEWAY, OPERATORS))
        yield Opening(
            instance.name, "kv", tuple(instance.kv_ports), (GATEWAY, *_producers(deployment, instance))
        )
        if instance.nixl_port is not None:
            together = deployment.cluster_of(instance).instances
            neighbours = tuple(other.name for other in together if other is not instance)
            # Only where engines meet is said; UCX then listens on ports that it chooses itself.
            yield Opening(instance.name, "nixl", (), neighbours)
        ranks = [each.name for each in deployment.ranks_with(instance) if each is not instance]
        if ranks:
            # Only where the ranks meet is said; then they agree on ports that are free.
            yield Opening(instance.name, "ranks", (), tuple(ranks))
    for pool in deployment.pools:
        # A pool connects to send, and to ask for what comes back.
        ways = (*peers_of(deployment, pool), *sources_of(deployment, pool))
        others = dict.fromkeys(way.member.name for way in ways)
        yield Opening(pool.name, "kv", (pool.kv_port,), (GATEWAY, *others))
    yield Opening(GATEWAY, "http", (deployment.gateway.port,), (CLIENTS,))
    if not is_loopback(deployment.gateway.admin.host):
        yield Opening(GATEWAY, "admin", (deployment.gateway.admin.port,), (OPERATORS,))


def _producers(deployment: Deployment, instance: Instance) -> tuple[str, ...]:
    return tuple(source.member.name for source in sources_of(deployment, instance))
