"""The live control plane of one gateway among several."""

import asyncio
import logging
import re
import socket
from typing import Any

from prometheus_client import CollectorRegistry

from prfaas.core.deployment import Deployment, FleetConfig
from prfaas.core.kv import KvModel
from prfaas.serving.control.fleet_control import FleetControl
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.fleet.etcd import EtcdStore
from prfaas.serving.fleet.store import Store

logger = logging.getLogger(__name__)


class FleetPlane(LivePlane):
    """A `LivePlane` that shares what it knows with those of the other gateways. See `FleetControl`."""

    def __init__(
        self,
        deployment: Deployment,
        config: FleetConfig,
        key: bytes,
        registry: CollectorRegistry,
        kv_model: KvModel | None,
        *,
        store: Store | None = None,
        **parts: Any,
    ) -> None:
        """Put the parts together.

        Args:
            deployment: the deployment file.
            config: its fleet.
            key: the deployment's key.
            registry: gets the `prfaas_control_*` metrics.
            kv_model: see `LivePlane`.
            store: what the gateways share; None: the fleet's etcd.
            parts: see `LivePlane`.

        Raises:
            TlsFileError: a file of the fleet's certificates can't be used.
        """
        super().__init__(deployment, key, registry, kv_model, **parts)
        if store is None and config.is_plain and not config.is_local:
            logger.warning(
                "what gateways share goes to etcd unencrypted; who can write there can misroute requests"
            )
        self.fleet = FleetControl(
            deployment,
            config,
            config.name or default_name(deployment),
            EtcdStore(config) if store is None else store,
            registry,
            clock=self.clock,
            cluster_state=self.cluster_state,
            prefill_admission=self.prefill_admission,
            thresholds=self.thresholds,
            role_changes=self.role_changes,
            role_allocation=self.role_allocation,
            budget=self.budget,
            window=self.window,
            drain=lambda name, wanted: super(FleetPlane, self).drain(name, wanted=wanted),
        )

    def observe(self, num_tokens: int, uncached_tokens: int) -> None:
        """One request as the statistics of all gateways should see it."""
        super().observe(num_tokens, uncached_tokens)
        self.fleet.observe(min(uncached_tokens, num_tokens))

    def drain(self, name: str, *, wanted: bool) -> None:
        """Let nothing new go to an instance from any gateway, or let it take part again."""
        super().drain(name, wanted=wanted)
        self.fleet.mark(name, wanted=wanted)

    def give_notice(self, name: str, notice_s: float) -> None:
        """An instance is gone in so many seconds: what is open here goes elsewhere, and no gateway sends more."""
        super().give_notice(name, notice_s)
        self.fleet.mark(name, wanted=True)

    def state(self) -> dict[str, Any]:
        """The deployment as it is now, ready for JSON. An instance is drained when no gateway sends it anything."""
        state = super().state()
        state["fleet"] = self.fleet.state()
        for cluster in state["clusters"].values():
            for name, instance in cluster["instances"].items():
                if instance["drain"] == "drained" and not self.fleet.is_known_drained(name):
                    instance["drain"] = "draining"
        return state

    async def run(self) -> None:
        """All loops, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run())
            group.create_task(self.fleet.run())

    async def close(self) -> None:
        """Leave the fleet and give back connections; after `run` has ended."""
        await self.fleet.close()
        await super().close()


def default_name(deployment: Deployment) -> str:
    """This gateway's name where the file has none: its machine's name and its port."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{socket.gethostname()}-{deployment.gateway.port}")
