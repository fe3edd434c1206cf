"""Two gateways as processes over stand-in engines and a real etcd: one is killed, or etcd is."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from synthetic_world import MODEL, World, free_ports, random_ids, running, write_deployment
from tests.serving.fleet.etcd_process import EtcdProcess, needs_etcd, running_etcd

from prfaas.core.deployment import Deployment, load_deployment

pytestmark = [needs_etcd, pytest.mark.slow("starts etcd and gateways, and waits for the end of a lease")]

LIMIT_S = 60.0
# A lease of 3 s, and what etcd and a busy machine take to notice its end.
NEW_LEADER_S = 20.0
CLIENTS = 4
PAUSE_S = 0.1


@dataclass
class Gateway:
    """A running `prfaas serve`, and what its clients have seen."""

    name: str
    deployment: Deployment
    process: "subprocess.Popen[str]"
    errors: Path
    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    async def state(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get(self.deployment.gateway.admin.url + "/prfaas/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def fleet(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        found: dict[str, Any] = (await self.state(session))["fleet"]
        return found

    async def roles(self, session: aiohttp.ClientSession) -> dict[str, str]:
        clusters = (await self.state(session))["clusters"].values()
        return {name: each["role"] for cluster in clusters for name, each in cluster["instances"].items()}

    async def stream(self, session: aiohttp.ClientSession, ids: list[int]) -> None:
        """One answer, which must be whole."""
        asked = {"model": MODEL, "prompt": ids, "max_tokens": 40, "stream": True}
        try:
            async with session.post(self.deployment.gateway.url + "/v1/completions", json=asked) as response:
                raw = await response.read()
                route = response.headers.get("x-prfaas-route", "").partition(";")[0]
                if response.status != 200 or not raw.endswith(b"data: [DONE]\n\n"):
                    self.failed.append(f"{response.status}: {raw[-200:]!r}")
                else:
                    self.done[route] += 1
        except aiohttp.ClientError as error:
            self.failed.append(repr(error))

    async def load(self, session: aiohttp.ClientSession, client: int, over: asyncio.Event) -> None:
        """One request after the other: short ones, and long ones that are offloaded.

        With a pause, as time passes by leases and not by requests.
        """
        number = 0
        while not over.is_set():
            number += 1
            await asyncio.sleep(PAUSE_S)
            await self.stream(session, random_ids(300 if number % 2 else 2500, 1000 * client + number))


@dataclass
class Site:
    """Everything that runs."""

    session: aiohttp.ClientSession
    etcd: EtcdProcess
    gateways: list[Gateway]
    world: World

    async def until(self, gateway: Gateway, limit_s: float = LIMIT_S, **wanted: object) -> float:
        """Wait until the gateway's word on its fleet has these fields. Returns the seconds that it took."""
        began_s = time.monotonic()
        while True:
            fleet = await gateway.fleet(self.session)
            if all(fleet[name] == value for name, value in wanted.items()):
                return time.monotonic() - began_s
            assert time.monotonic() < began_s + limit_s, (fleet, wanted, gateway.errors.read_text()[-3000:])
            await asyncio.sleep(0.05)

    def said(self) -> list[str]:
        return [gateway.errors.read_text()[-3000:] for gateway in self.gateways]


def write_file(base: Deployment, etcd: EtcdProcess, name: str) -> Deployment:
    document = json.loads(base.path.read_text())
    port, admin_port = free_ports(2)
    document["clusters"] = [each for each in document["clusters"] if each["name"] != "other"]
    document["gateway"] |= {"port": port, "admin": {"port": admin_port}}
    document["routing"] = {"policy": "tilted", "threshold_tokens": 1000}
    document["control"] = {"silence_s": 30, "threshold_period_s": 600, "allocation_period_s": 600}
    document["fleet"] = {"etcd": [etcd.url], "name": name}
    path = base.path.parent / f"{name}.yaml"
    path.write_text(json.dumps(document))
    return load_deployment(path, state_dir=base.state_dir)


async def started(deployment: Deployment, name: str) -> Gateway:
    errors = deployment.path.parent / f"{name}.txt"
    command = [sys.executable, "-m", "prfaas.cli.main", "serve", str(deployment.path)]
    with errors.open("w") as told:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env={**os.environ, "PRFAAS_HOME": str(deployment.state_dir)},
        )
    assert process.stdout is not None
    # The engines of this test need its event loop meanwhile.
    first = await asyncio.to_thread(process.stdout.readline)
    assert first.startswith("ready: "), errors.read_text()
    return Gateway(name, deployment, process, errors)


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    # What a killed gateway had begun ends with its lease.
    base = write_deployment(folder, transfer={"lease_s": 10, "staging_ttl_s": 10})
    names = ("far-0", "far-1", "home-prefill", "home-0", "home-1")
    gateways: list[Gateway] = []
    with running_etcd(folder / "etcd") as etcd:
        files = [write_file(base, etcd, name) for name in ("a", "b")]
        async with (
            running(files[0], *names) as world,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
        ):
            try:
                for file, name in zip(files, ("a", "b"), strict=True):
                    gateways.append(await started(file, name))
                    # So it is known who leads.
                    await Site(session, etcd, gateways, world).until(gateways[-1], connected=True)
                here = Site(session, etcd, gateways, world)
                for gateway in gateways:
                    await here.until(gateway, leader="a")
                yield here
            finally:
                for gateway in gateways:
                    gateway.process.kill()
                    gateway.process.communicate()


async def under_load(here: Site, scene: Any) -> None:
    """The scene, while every gateway has clients that ask all the time."""
    over = asyncio.Event()
    clients = [
        asyncio.create_task(gateway.load(here.session, 10 * index + client, over))
        for index, gateway in enumerate(here.gateways)
        for client in range(CLIENTS)
    ]
    try:
        await asyncio.sleep(1.0)
        await scene()
        await asyncio.sleep(1.0)
    finally:
        over.set()
        await asyncio.gather(*clients)


def test_a_leader_that_is_killed_takes_nobody_elses_request_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with site(tmp_path) as here:
            a, b = here.gateways
            roles = await b.roles(here.session)
            seen: list[dict[str, str]] = []

            async def scene() -> None:
                a.process.send_signal(signal.SIGKILL)
                # Its clients are told nothing more: their connections are cut.
                took_s = await here.until(b, NEW_LEADER_S, leader="b", leads=True)
                print(f"new leader after {took_s:.1f} s")
                seen.append(await b.roles(here.session))
                assert list((await b.fleet(here.session))["members"]) == ["b"]
                # Stop its clients' hammering at a closed port.
                a.deployment = b.deployment

            await under_load(here, scene)
            assert b.failed == [], here.said()
            assert len(b.done) == 2, (b.done, here.said())
            assert seen == [roles]
            # It comes back, and follows.
            file = write_file(b.deployment, here.etcd, "c")
            here.gateways.append(await started(file, "c"))
            await here.until(here.gateways[-1], connected=True, leader="b")
            assert await here.gateways[-1].roles(here.session) == roles
            await here.world.settled()

    asyncio.run(main())


def test_without_etcd_every_request_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with site(tmp_path) as here:
            a, b = here.gateways

            async def scene() -> None:
                here.etcd.stop()
                for gateway in here.gateways:
                    await here.until(gateway, connected=False, leader="a")
                    assert "etcd" in (await gateway.fleet(here.session))["problem"]
                # Longer than a lease.
                await asyncio.sleep(4.0)
                here.etcd.start()
                for gateway in here.gateways:
                    await here.until(gateway, connected=True, leader="a")

            await under_load(here, scene)
            assert a.failed == b.failed == [], here.said()
            assert len(a.done) == len(b.done) == 2, here.said()
            await here.world.settled()

    asyncio.run(main())


def test_a_drain_holds_in_both_gateways(tmp_path: Path) -> None:
    async def main() -> None:
        async with site(tmp_path) as here:
            a, b = here.gateways

            async def drain_of(gateway: Gateway) -> str | None:
                state = await gateway.state(here.session)
                drain: str | None = state["clusters"]["home"]["instances"]["home-0"]["drain"]
                return drain

            async def scene() -> None:
                url = b.deployment.gateway.admin.url + "/prfaas/instances/home-0/drain"
                async with here.session.post(url) as response:
                    assert response.status == 200
                until_s = time.monotonic() + LIMIT_S
                while [await drain_of(a), await drain_of(b)] != ["drained", "drained"]:
                    assert time.monotonic() < until_s
                    await asyncio.sleep(0.1)
                engine = here.world.nodes["home-0"].engine
                assert engine.counts.running + engine.counts.waiting == 0
                await asyncio.sleep(1.5)
                assert engine.counts.running + engine.counts.waiting == 0

            await under_load(here, scene)
            assert a.failed == b.failed == [], here.said()

    asyncio.run(main())
