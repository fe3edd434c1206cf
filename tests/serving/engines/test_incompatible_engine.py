"""An engine with another block size, as a process beside good ones: gone around, named, and found when repaired."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from synthetic_world import MODEL, free_ports, random_ids, write_deployment

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.live import serve_live
from prfaas.tools.doctor import check_engines

# A stand-in whose blocks have half as many tokens as the others'.
ODD = """
import sys
from prfaas.serving.engines.synthetic import layout
layout.STATE_BLOCK_TOKENS = 128
from prfaas.serving.engines.synthetic.__main__ import main
sys.exit(main())
"""
ODD_ONE, GOOD = "far-1", ("far-0", "home-prefill", "home-0", "home-1")


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """One PD cluster; every prompt is offloaded that can be."""
    made = write_deployment(tmp_path, speedup=200.0)
    document = json.loads(made.path.read_text()) | {"routing": {"policy": "offload_all"}}
    document["gateway"] |= {"route_header": "full", "admin": {"port": free_ports(1)[0]}}
    document["clusters"] = [each for each in document["clusters"] if each["name"] != "other"]
    made.path.write_text(json.dumps(document))
    return load_deployment(made.path, state_dir=tmp_path)


@contextmanager
def odd_engine(deployment: Deployment) -> Iterator[None]:
    arguments = [str(deployment.path), ODD_ONE, "--state-dir", str(deployment.state_dir)]
    process = subprocess.Popen([sys.executable, "-c", ODD, *arguments], env=os.environ)
    try:
        deadline_s = time.monotonic() + 120
        while not RunningEngines(deployment).answers(ODD_ONE):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Client:
    """Talks to a gateway."""

    def __init__(self, http: aiohttp.ClientSession, admin_url: str) -> None:
        self._http = http
        self._admin_url = admin_url

    async def ask(self, seed: int) -> tuple[dict[str, str], Any]:
        body = {"model": MODEL, "prompt": random_ids(3000, seed), "max_tokens": 8, "return_token_ids": True}
        async with self._http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            route, *fields = response.headers["x-prfaas-route"].split("; ")
            told = {"route": route} | dict(field.split("=", 1) for field in fields)
            return told, (await response.json())["choices"][0]["token_ids"]

    async def state(self) -> Any:
        async with self._http.get(f"{self._admin_url}/prfaas/state") as page:
            return await page.json()

    async def pairs(self) -> set[tuple[str, str]]:
        return {(each["producer"], each["consumer"]) for each in (await self.state())["incompatible"]}

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(120):
            while not is_so(await self.pairs()):
                await asyncio.sleep(0.2)


@pytest.mark.slow("starts each engine as a process, one of them twice")
def test_it_is_gone_around_named_and_found_when_it_is_repaired(deployment: Deployment) -> None:
    engines = RunningEngines(deployment, stand_ins_per_process=4)

    async def check() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
        async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{await port}") as http:
            try:
                await use(Client(http, deployment.gateway.admin.url))
            finally:
                gateway.cancel()
                with suppress(asyncio.CancelledError):
                    await gateway

    async def use(client: Client) -> None:
        answers: dict[int, Any] = {}
        apart = {("far-1", "home-0"), ("far-1", "home-1")}
        with odd_engine(deployment):
            await client.until(lambda pairs: apart <= pairs)
            for seed in range(20):
                route, answers[seed] = await client.ask(seed)
                # Only a pair that connects on demand may be found out by a request.
                assert route.get("fallback", "incompatible") == "incompatible"
                assert route["prefill"] == "far-0", route
            state = await client.state()
            assert all(
                instance["healthy"] and instance["suspicion"] is None
                for cluster in state["clusters"].values()
                for instance in cluster["instances"].values()
            )
            assert state["links"]["far->home"]["up"]
            (told,) = [
                each["reason"]
                for each in state["incompatible"]
                if (each["producer"], each["consumer"]) == ("far-1", "home-0")
            ]
            sentence = "KV layout differs in 'block_tokens': home-0/0 has '256', far-1/0 has '128'"
            assert told == f"home-0/0 rejected the connection: {sentence}"
            async with aiohttp.ClientSession() as session:
                found = await check_engines(deployment, session)
            assert any(
                finding.subject == "KV of far-1/0 for home-0/0" and finding.text == told for finding in found
            )
        await asyncio.to_thread(engines.start, ODD_ONE)
        await asyncio.to_thread(engines.wait_ready, 120)
        await client.until(lambda pairs: not pairs)
        asked = await asyncio.gather(*(client.ask(seed) for seed in range(20)))
        assert [ids for _, ids in asked] == [answers[seed] for seed in range(20)]
        used: set[str] = set()
        async with asyncio.timeout(120):
            # Health probes let it in again a few seconds after its start.
            for wave in range(1, 1000):
                asked = await asyncio.gather(*(client.ask(1000 * wave + seed) for seed in range(6)))
                assert not any("fallback" in route for route, _ in asked)
                used |= {route["prefill"] for route, _ in asked}
                if ODD_ONE in used:
                    break
                await asyncio.sleep(0.2)

    try:
        engines.restart(GOOD)  # in one process
        engines.wait_ready(120)
        asyncio.run(asyncio.wait_for(check(), 400))
    finally:
        engines.stop(timeout_s=10)
