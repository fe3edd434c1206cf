"""A gateway before stand-in engines and a control plane of the tests' own, all in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import aiohttp
from prometheus_client import CollectorRegistry

from prfaas.core.deployment import (
    Cluster,
    ControlConfig,
    Deployment,
    EngineConfig,
    GatewayConfig,
    GatewayLimits,
    Instance,
    Link,
    LocalTransfer,
    PoolSpace,
    Routing,
    Slo,
    TransferLimits,
)
from prfaas.core.deployment.model import ModelRef
from prfaas.core.deployment.security import Security
from prfaas.core.kv.hf_config import model_from_directory
from prfaas.serving.control.members import Members
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import kv_model_of
from prfaas.serving.gateway import Draining, GatewayOptions, GatewayProcess, serve_gateway
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import create_key

from .fixed_plane import FixedPlane
from .stand_in import DENSE_CONFIG, HYBRID_CONFIG, StandInEngine, write_tokenizer

# A stand-in on a busy machine may need many times as long as usual to open a transfer.
OPTIONS = GatewayOptions(
    transfer_grace_s=1.0,
    announce_grace_s=30.0,
    prefill_timeout_s=10.0,
)
HASTY = replace(OPTIONS, announce_grace_s=0.5)
"""For tests in which a transfer is never opened."""
THRESHOLD_TOKENS = 100
# Most tests are about the way of every request; what first tokens from the prefill change has tests of its own.
GATEWAY = GatewayConfig("127.0.0.1", 0, route_header="full", first_token="decode")


@dataclass
class World:
    remote: StandInEngine
    local: StandInEngine
    decode: StandInEngine
    spare: StandInEngine | None
    third: StandInEngine | None
    client: aiohttp.ClientSession
    admin: aiohttp.ClientSession
    gateway: asyncio.Task[None]
    plane: FixedPlane
    live: LivePlane | None

    @property
    def busy(self) -> int:
        """Prefills and decodes that the plane believes to be under way."""
        if self.live is not None:
            return sum(
                self.live.cluster_state.instance(name).in_flight for name in self.live.cluster_state.names
            )
        return self.plane.busy

    @property
    def engines(self) -> tuple[StandInEngine, ...]:
        others = (engine for engine in (self.spare, self.third) if engine is not None)
        return (self.remote, self.local, self.decode, *others)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[aiohttp.ClientResponse, Any]:
        async with self.client.post(path, json=body, **kwargs) as response:
            return response, await response.json()

    async def complete(self, prompt: Any, **fields: Any) -> tuple[dict[str, str], Any]:
        """The route's fields and the answer of a completion that must succeed."""
        response, answer = await self.post(
            "/v1/completions", {"model": "stand-in", "prompt": prompt, **fields}
        )
        assert response.status == 200, answer
        return route_of(response), answer

    async def metric(self, series: str) -> float:
        async with self.admin.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(series))

    async def settled(self) -> None:
        """Everything that a request could leave behind is gone."""
        for _ in range(100):
            left = (
                [
                    await self.metric(f"prfaas_gateway_{name}")
                    for name in ("in_flight_requests", "in_flight_transfers", "background_tasks")
                ],
                [engine.arena.used_blocks for engine in self.engines],
                self.busy,
            )
            if not any(left[0]) and not any(left[1]) and not left[2]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"left behind: in flight {left[0]}, staging blocks {left[1]}, open {left[2]}")


def route_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    route, *fields = response.headers["x-prfaas-route"].split("; ")
    return {"route": route} | dict(part.split("=", 1) for part in fields)


def deployment_of(
    home: Path,
    engines: dict[str, StandInEngine],
    model_dir: Path,
    tenant_header: str | None = None,
    gateway: GatewayConfig = GATEWAY,
    control: ControlConfig = ControlConfig(),
    *,
    hardware: str = "any",
    decode_lead_s: float = 1.0,
    pool_ports: tuple[int, int] | None = None,
    egress_per_gb: float = 0.0,
    preemptible: bool = False,
    local_transfer: LocalTransfer = "prfaas",
) -> Deployment:
    """A far cluster with `remote`, and one with all others, which decode if they are not called `local`.

    `pool_ports`: the KV ports of their pools; None: they have none.
    """
    far_pool, pd_pool = (
        (PoolSpace(64 << 20, kv_port=port) for port in pool_ports) if pool_ports else (None, None)
    )

    def instance(name: str, cluster: str, role: Any) -> Instance:
        engine = engines[name]
        return Instance(
            name=name,
            cluster=cluster,
            roles=(role,),
            host="127.0.0.1",
            http_port=engine.http_port,
            kv_port=engine.kv_port,
        )

    decoders = [instance(name, "pd", "decode") for name in engines if name not in ("remote", "local")]
    return Deployment(
        name="test",
        path=home / "test.yaml",
        state_dir=home,
        model=ModelRef(
            served_name="stand-in", max_model_len=4000, path=model_dir, adapters={"poet": home / "poet"}
        ),
        clusters=(
            Cluster(
                name="far",
                kind="prfaas",
                hardware="any",
                instances=(instance("remote", "far", "prefill"),),
                pool=far_pool,
                preemptible=preemptible,
            ),
            Cluster(
                name="pd",
                kind="pd",
                hardware=hardware,
                instances=(instance("local", "pd", "prefill"), *decoders),
                pool=pd_pool,
            ),
        ),
        links=(
            Link("far", "pd", 1e9, 2, egress_per_gb=egress_per_gb),
            Link("pd", "far", 1e9, 2, egress_per_gb=2 * egress_per_gb),
        ),
        routing=Routing("static_threshold", THRESHOLD_TOKENS),
        slo=Slo(None, None),
        gateway=gateway,
        security=Security(home / "key", tenant_header),
        engine=EngineConfig(2048, 16, 1, 1 << 20, 1 << 16, None, (), {}, local_transfer=local_transfer),
        transfer=TransferLimits(60.0, 30.0, 20.0, 60.0, 8.0, decode_lead_s=decode_lead_s),
        control=control,
    )


@asynccontextmanager
async def running_world(
    home: Path,
    options: GatewayOptions = OPTIONS,
    *,
    spare: bool = False,
    third: bool = False,
    live: bool = False,
    tenant_header: str | None = None,
    draining: Draining | None = None,
    gateway_config: GatewayConfig = GATEWAY,
    control: ControlConfig = ControlConfig(),
    limits: GatewayLimits | None = None,
    hardware: str = "any",
    decode_lead_s: float = 1.0,
    pool_ports: tuple[int, int] | None = None,
    egress_per_gb: float = 0.0,
    preemptible: bool = False,
    local_transfer: LocalTransfer = "prfaas",
    dense: bool = False,
    **decode: Any,
) -> AsyncIterator[World]:
    """`spare`, `third`: with more decode instances, taken when the first one is out; `decode`: its fields.

    `live`: with the real control plane in place of the tests'. `dense`: a model without linear states.
    """
    model_dir = write_tokenizer(home / "model", DENSE_CONFIG if dense else HYBRID_CONFIG)
    key = create_key(home / "key")
    names = ("remote", "local", "decode", *(("spare",) if spare else ()), *(("third",) if third else ()))
    engines = {
        name: StandInEngine(name, model_dir, key, producers=tuple(n for n in names if n != name))
        for name in names
    }
    engines["decode"] = replace(engines["decode"], **decode)
    for engine in engines.values():
        await engine.start()
    for name in ("remote", "local"):
        engines[name].connect([engines[n] for n in reversed(names) if n != name])
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    admin_port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    if limits is not None:
        gateway_config = replace(gateway_config, limits=limits)
    deployment = deployment_of(
        *(home, engines, model_dir, tenant_header, gateway_config, control),
        hardware=hardware,
        decode_lead_s=decode_lead_s,
        pool_ports=pool_ports,
        egress_per_gb=egress_per_gb,
        preemptible=preemptible,
        local_transfer=local_transfer,
    )
    plane = FixedPlane(deployment)
    plane.prefers = "decode"
    registry = CollectorRegistry()
    live_plane = (
        LivePlane(Members(RunningDeployment(deployment), key), registry, kv_model_of(deployment))
        if live
        else None
    )
    served = serve_gateway(
        deployment,
        live_plane or cast(Any, plane),
        GatewayProcess(
            registry=registry, draining=draining or Draining(), kv_model=model_from_directory(model_dir)
        ),
        ready=port.set_result,
        admin_ready=admin_port.set_result,
        options=options,
    )
    gateway = asyncio.create_task(served)
    either: set[asyncio.Future[Any]] = {gateway, port}
    done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if gateway in done:
        gateway.result()
    client = aiohttp.ClientSession(f"http://127.0.0.1:{port.result()}")
    admin = aiohttp.ClientSession(f"http://127.0.0.1:{admin_port.result()}")
    try:
        yield World(
            **{"spare": None, "third": None} | engines,  # type: ignore[arg-type]
            client=client,
            admin=admin,
            gateway=gateway,
            plane=plane,
            live=live_plane,
        )
    finally:
        await client.close()
        await admin.close()
        gateway.cancel()
        await asyncio.gather(gateway, return_exceptions=True)
        assert plane.closed is not live
        for engine in engines.values():
            await engine.stop()
