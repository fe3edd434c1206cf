"""A gateway before three stand-in engines, all in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.deployment import (
    Cluster,
    Deployment,
    EngineConfig,
    GatewayConfig,
    Instance,
    Link,
    ModelRef,
    Routing,
    Security,
    Slo,
    TransferLimits,
)
from prfaas.gateway import GatewayOptions, serve_gateway
from prfaas.transport.keyfile import create_key

from .stand_in import StandInEngine, write_tokenizer

OPTIONS = GatewayOptions(
    suspect_s=0.2,
    probe_interval_s=0.1,
    probe_healthy_interval_s=60.0,
    transfer_grace_s=1.0,
    announce_grace_s=0.5,
    prefill_timeout_s=10.0,
)
THRESHOLD_TOKENS = 100


@dataclass
class World:
    remote: StandInEngine
    local: StandInEngine
    decode: StandInEngine
    client: aiohttp.ClientSession
    gateway: asyncio.Task[None]

    @property
    def engines(self) -> tuple[StandInEngine, ...]:
        return (self.remote, self.local, self.decode)

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
        async with self.client.get("/metrics") as response:
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
            )
            if not any(left[0]) and not any(left[1]):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"left behind: in flight {left[0]}, staging blocks {left[1]}")


def route_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    route, *fields = response.headers["x-prfaas-route"].split("; ")
    return {"route": route} | dict(part.split("=", 1) for part in fields)


def deployment_of(home: Path, engines: dict[str, StandInEngine], model_dir: Path) -> Deployment:
    def instance(name: str, cluster: str, role: Any) -> Instance:
        engine = engines[name]
        return Instance(name, cluster, (role,), "127.0.0.1", engine.http_port, engine.kv_port, 1)

    return Deployment(
        name="test",
        path=home / "test.yaml",
        state_dir=home,
        model=ModelRef("stand-in", 4000, model_dir, None),
        clusters=(
            Cluster("far", "prfaas", "cpu", (instance("remote", "far", "prefill"),)),
            Cluster(
                "pd", "pd", "cpu", (instance("local", "pd", "prefill"), instance("decode", "pd", "decode"))
            ),
        ),
        links=(Link("far", "pd", 1e9, 2),),
        routing=Routing("threshold", THRESHOLD_TOKENS),
        slo=Slo(None, None),
        gateway=GatewayConfig("127.0.0.1", 0),
        security=Security(home / "key"),
        engine=EngineConfig(2048, 16, 1, 1 << 20, 1 << 16, None, (), {}),
        transfer=TransferLimits(60.0, 30.0, 20.0, 60.0, 8.0),
    )


@asynccontextmanager
async def running_world(home: Path, options: GatewayOptions = OPTIONS, **decode: Any) -> AsyncIterator[World]:
    model_dir = write_tokenizer(home / "model")
    key = create_key(home / "key")
    engines = {
        "remote": StandInEngine("remote", model_dir, key),
        "local": StandInEngine("local", model_dir, key),
        "decode": replace(StandInEngine("decode", model_dir, key, producers=("remote", "local")), **decode),
    }
    for engine in engines.values():
        await engine.start()
    for name in ("remote", "local"):
        engines[name].connect([engines["decode"]])
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    deployment = deployment_of(home, engines, model_dir)
    gateway = asyncio.create_task(serve_gateway(deployment, ready=port.set_result, options=options))
    done, _ = await asyncio.wait({gateway, port}, return_when=asyncio.FIRST_COMPLETED)
    if gateway in done:
        gateway.result()
    client = aiohttp.ClientSession(f"http://127.0.0.1:{port.result()}")
    try:
        yield World(**engines, client=client, gateway=gateway)
    finally:
        await client.close()
        gateway.cancel()
        await asyncio.gather(gateway, return_exceptions=True)
        for engine in engines.values():
            await engine.stop()
