"""KV ports of a deployment's engines and pools, and the observers that ask there."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.deployment import Deployment, Instance, PoolNode, TransferLimits
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.tls_identity import TlsIdentity


@dataclass(frozen=True, slots=True)
class KvPorts:
    """Makes the observers of one side, each of which connects when it is first used; see `Observer`."""

    name: str
    """Of the observing side."""
    key: bytes
    """Of the deployment, 32 bytes."""
    tls: TlsIdentity | None = None
    """Its identity, for engines and pools with TLS."""
    silence_s: float = TransferLimits().silence_s
    clock: Callable[[], float] = time.monotonic

    def of_rank(self, instance: Instance, rank: int) -> Observer:
        """Of one rank of an engine."""
        return self._observer(instance, instance.kv_ports[rank], f"{instance.name}/{rank}")

    def of_ranks(self, instance: Instance) -> tuple[Observer, ...]:
        """Of all ranks of an engine, in their order."""
        return tuple(self.of_rank(instance, rank) for rank in range(instance.kv_ranks))

    def of_pool(self, pool: PoolNode) -> Observer:
        """Of a pool."""
        return self._observer(pool, pool.kv_port, pool.name)

    def of_pools(self, deployment: Deployment) -> dict[str, Observer]:
        """Of all pools, by name."""
        return {pool.name: self.of_pool(pool) for pool in deployment.pools}

    def _observer(self, member: Instance | PoolNode, port: int, peer_name: str) -> Observer:
        return Observer(
            name=self.name,
            key=self.key,
            host=member.host,
            port=port,
            peer_name=peer_name,
            tls=self.tls if member.tls else None,
            silence_s=self.silence_s,
            clock=self.clock,
        )
