"""Engines as processes, stopped by a signal and let go on again: noticed, answered for, rightly blamed, and back."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from synthetic_world import MODEL, free_ports, random_ids, write_deployment

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.live import serve_live

THRESHOLD_TOKENS = 1000
TOKENS = 200


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    home = tmp_path_factory.mktemp("frozen")
    path = write_deployment(home, speedup=2.0).path
    document = json.loads(path.read_text())
    document["clusters"] = [each for each in document["clusters"] if each["name"] != "other"]
    document["gateway"] |= {"route_header": "full", "admin": {"port": free_ports(1)[0]}}
    # With the prefill's first token the header leaves before the decode engine has answered, or not.
    document["gateway"]["first_token"] = "decode"
    document["control"] = {"silence_s": 2.5}
    document["routing"] = {"policy": "static_threshold", "threshold_tokens": THRESHOLD_TOKENS}
    path.write_text(json.dumps(document))
    return load_deployment(path, state_dir=home)


@pytest.fixture(scope="module")
def engines(deployment: Deployment) -> Iterator[RunningEngines]:
    """For all tests: each leaves them as it found them, and to start them takes longer than a test."""
    running = RunningEngines(deployment, stand_ins_per_process=1)
    try:
        running.start()
        running.wait_ready(300)
        yield running
    finally:
        running.stop(timeout_s=5)


@dataclass
class Client:
    """A client of the gateway, which also looks at its state all the time."""

    session: aiohttp.ClientSession
    url: str
    state_url: str
    unhealthy: dict[str, str] = field(default_factory=dict)

    async def instances(self) -> dict[str, Any]:
        async with self.session.get(self.state_url) as response:
            state = await response.json()
        return {
            name: each
            for cluster in state["clusters"].values()
            for name, each in cluster["instances"].items()
        }

    async def watch(self) -> None:
        while True:
            for name, instance in (await self.instances()).items():
                if not instance["healthy"]:
                    self.unhealthy[name] = instance["suspicion"]
            await asyncio.sleep(0.1)

    async def until_healthy(self, name: str, healthy: bool, limit_s: float = 15.0) -> float:
        began_s = time.monotonic()
        while (await self.instances())[name]["healthy"] is not healthy:
            assert time.monotonic() < began_s + limit_s
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    async def stream(self, ids: list[int], begun: "asyncio.Queue[str] | None" = None) -> tuple[str, str]:
        """The route, and the text of a stream that must end well."""
        asked = {"model": MODEL, "prompt": ids, "max_tokens": TOKENS, "stream": True, "temperature": 0}
        async with self.session.post(self.url + "/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            route = response.headers["x-prfaas-route"]
            raw = await response.content.readany()
            if begun is not None:
                begun.put_nowait(route)
            raw += await response.read()
        events = raw.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""], events[-3:]
        choices = [json.loads(event.removeprefix(b"data: "))["choices"] for event in events[:-2]]
        return route, "".join(choice[0]["text"] for choice in choices if choice)


@asynccontextmanager
async def served(deployment: Deployment) -> AsyncIterator[Client]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
    try:
        done, _ = await asyncio.wait((gateway, port), return_when=asyncio.FIRST_COMPLETED)
        if gateway in done:
            gateway.result()
        timeout = aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            gateway_config = deployment.gateway
            client = Client(session, gateway_config.url, gateway_config.admin.url + "/prfaas/state")
            for name in await client.instances():
                await client.until_healthy(name, True, 60)
            await asyncio.sleep(1.0)
            watching = asyncio.create_task(client.watch())
            yield client
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        gateway.cancel()
        await asyncio.gather(gateway, return_exceptions=True)


@contextmanager
def frozen(engines: RunningEngines, name: str) -> Iterator[None]:
    pid = engines.pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def part(route: str, name: str) -> str:
    return dict(field.split("=", 1) for field in route.split("; ")[1:]).get(name, "")


@pytest.mark.slow("starts each engine as a process, and waits until a frozen one is noticed")
def test_streams_of_a_frozen_decode_engine_go_on_elsewhere(
    deployment: Deployment, engines: RunningEngines
) -> None:
    async def check() -> None:
        async with served(deployment) as client:
            prompts = [random_ids(300 + 900 * (seed % 2), seed) for seed in range(6)]
            truth = [await client.stream(ids) for ids in prompts[:2]]
            begun: asyncio.Queue[str] = asyncio.Queue()
            streams = [asyncio.create_task(client.stream(ids, begun)) for ids in prompts]
            routes = [await begun.get() for _ in prompts]
            name = part(routes[0], "decode")
            blocks = (await client.instances())[name]["blocks"]
            with frozen(engines, name):
                # The goal is 3 s on a machine that has time for its processes.
                assert await client.until_healthy(name, False) < 5
                answers = await asyncio.gather(*streams)
                assert (await client.instances())[name]["blocks"] == blocks > 0
                # What comes now does not wait for it.
                route, text = await client.stream(prompts[0])
                assert part(route, "decode") != name
            assert [text for _, text in answers[:2]] == [text for _, text in truth]
            assert text == truth[0][1]
            assert set(client.unhealthy) == {name}
            assert client.unhealthy[name].startswith("frozen: its ")
            assert await client.until_healthy(name, True) < 5

    asyncio.run(check())


@pytest.mark.slow("starts each engine as a process, and waits until a frozen one is noticed")
@pytest.mark.parametrize(("name", "first_seed"), [("far-0", 100), ("home-0", 200)])
def test_requests_that_a_frozen_engine_was_chosen_for_are_served_by_others(
    deployment: Deployment, engines: RunningEngines, name: str, first_seed: int
) -> None:
    """As the producer of their KV, or as its consumer. Of prompts that no cache holds yet."""

    async def check() -> None:
        async with served(deployment) as client:
            prompts = [random_ids(3000, first_seed + seed) for seed in range(4)]
            with frozen(engines, name):
                answers = await asyncio.gather(*(client.stream(ids) for ids in prompts))
                await client.until_healthy(name, False)
            routes = [route for route, _ in answers]
            if name == "far-0":
                assert "frozen" in {part(route, "fallback") for route in routes}, routes
            used = {part(route, hop) for route in routes for hop in ("prefill", "decode")}
            assert name not in used
            assert set(client.unhealthy) == {name}
            assert await client.until_healthy(name, True) < 5
            again = await asyncio.gather(*(client.stream(ids) for ids in prompts))
            assert [text for _, text in again] == [text for _, text in answers]

    asyncio.run(check())
