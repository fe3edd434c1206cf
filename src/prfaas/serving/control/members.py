"""Members of a running control plane, instances and pools, and the connections to them."""

import asyncio
from collections.abc import Callable, Mapping

from prfaas.core.deployment import CONTROL, AppliedDeployment, Instance
from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.control.part import Part
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import BackgroundTasks
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.tls_identity import TlsIdentity


class Members(Part):
    """Instances by name, with one connection to each of their KV ports; and those to the pools.

    A connection is made when it is first used.
    """

    def __init__(
        self,
        running: RunningDeployment,
        key: bytes,
        tls: TlsIdentity | None = None,
        *,
        http: EngineHttp | None = None,
        sender_of: Callable[[Instance, int], Observer] | None = None,
        pool_ports: Mapping[str, Observer] | None = None,
    ) -> None:
        """
        Args:
            running: whose instances and pools.
            key: the deployment's key.
            tls: who the gateway is, for instances that it speaks TLS with.
            http: how engines are asked for /health and /metrics; None: over the network.
            sender_of: how the KV port of an instance's rank is asked; None: over the network.
            pool_ports: how the KV ports of pools are asked, by name; None: over the network.
        """
        self.running = running
        self.key = key
        self.http: EngineHttp = http or EngineHttp(tls)
        kv_ports = KvPorts(CONTROL, key, tls, running.current.transfer.silence_s)
        self._sender_of = sender_of or kv_ports.of_rank
        self.instances: dict[str, Instance] = {}
        self.kv_ports: dict[str, tuple[Observer, ...]] = {}
        self.pool_ports = kv_ports.of_pools(running.current) if pool_ports is None else pool_ports
        self._closing = BackgroundTasks()
        for instance in running.current.instances:
            self.join(instance)

    def instance(self, name: str) -> Instance:
        """A member by name. Raises DeploymentError where there is none."""
        found = self.instances.get(name)
        return found if found is not None else self.running.current.instance(name)

    def join(self, instance: Instance) -> None:
        """Make its connections."""
        self.instances[instance.name] = instance
        self.kv_ports[instance.name] = tuple(
            self._sender_of(instance, rank) for rank in range(instance.kv_ranks)
        )

    def follow(self, _before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Their roles may be others."""
        self.instances |= {instance.name: instance for instance in now.running.instances}

    def leave(self, name: str) -> None:
        """Close its connections, in the background."""
        del self.instances[name]
        ports = self.kv_ports.pop(name)

        async def close() -> None:
            await asyncio.gather(*(port.close() for port in ports), return_exceptions=True)

        self._closing.start(close())

    async def close(self) -> None:
        """Close all connections, and wait until those of who has left are closed."""
        ports = [port for ranks in self.kv_ports.values() for port in ranks]
        ports += self.pool_ports.values()
        await asyncio.gather(
            self._closing.finish(), *(port.close() for port in ports), return_exceptions=True
        )
        await self.http.close()
