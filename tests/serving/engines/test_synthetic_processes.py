"""Stand-in engines as processes: started together, killed one by one; their events over the KV port; their deaths."""

import asyncio
import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from synthetic_world import CLUSTERS, MODEL, random_ids, running, write_deployment
from typer.testing import CliRunner

from prfaas.cli.main import app
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.prefix.digests import HeldEvent, StoredDigests, decode_events
from prfaas.core.prefix.events import Cleared
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.requests import FollowedEvents, FollowOrder
from prfaas.serving.transport.protocol.wire import read_body


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return write_deployment(tmp_path)


class Follower:
    """Knows what one engine holds by what its KV port tells: hash and copies, by group."""

    def __init__(self, deployment: Deployment, key: bytes) -> None:
        instance = deployment.instance("home-0")
        self._port = Observer("control", key, instance.host, instance.kv_port, "home-0/0")
        self._order = FollowOrder("", 0)
        self.held: dict[int, dict[int, int]] = {group: {} for group in range(4)}
        self.removed = 0

    async def follow(self) -> None:
        """Until nothing more comes."""
        while True:
            try:
                body = await self._port.request(bytes(16), self._order, 0.3)
            except TimeoutError:
                return
            answer = read_body(FollowedEvents, body)
            for payload in answer.batches:
                for event in decode_events(payload):
                    self._apply(event)
            self._order = FollowOrder(answer.session, answer.first + len(answer.batches))

    def _apply(self, event: HeldEvent) -> None:
        if isinstance(event, Cleared):
            self.held = {group: {} for group in range(4)}
            return
        assert event.group is not None
        group, change = self.held[event.group], 1 if isinstance(event, StoredDigests) else -1
        self.removed += change < 0
        for each in event.hashes:
            group[each] = group.get(each, 0) + change
            if not group[each]:
                del group[each]

    async def close(self) -> None:
        await self._port.close()


@pytest.mark.slow("starts processes, and waits for what they do")
def test_events_over_the_wire_tell_what_is_held(deployment: Deployment) -> None:
    async def check() -> None:
        async with running(deployment) as world:
            early, late = (Follower(deployment, world.key) for _ in range(2))
            await early.follow()
            cache = world.nodes["home-0"].engine.cache
            # Room for little more than one prompt, so that much is evicted.
            cache.pool.capacity = 90
            for seed in range(6):
                ids = random_ids(9000 + 300 * seed, seed % 4)
                await world.complete("home-0", ids, max_tokens=400)
            await world.complete("home-0", random_ids(2000, 9), cache_salt="x")
            ids = random_ids(3000, 10)
            sealed, _ = await world.move(world.ticket("far-0", "home-0", ids[:-1]), ids[:-1])
            await world.complete("home-0", ids, sealed)
            for follower in (early, late):
                await follower.follow()
                assert follower.held == cache.held()
            assert early.removed > 50
            await world.post("home-0", "/reset_prefix_cache", {})
            for follower in (early, late):
                await follower.follow()
                assert follower.held == cache.held() == {g: {} for g in range(4)}
                await follower.close()

    asyncio.run(check())


@pytest.mark.slow("starts processes, and waits for what they do")
def test_a_dead_engine_leaves_its_ports_and_fails_its_transfers(tmp_path: Path) -> None:
    async def check() -> None:
        # Slow enough that the death comes before the prefill's answer, also on a busy machine.
        async with running(write_deployment(tmp_path, speedup=2.0)) as world:
            ids = random_ids(16_000, 12)
            local = (await world.complete("other-0", ids)).ids
            ticket = world.ticket("far-0", "home-0", ids[:-1])
            sealed = ticket.seal(world.key)
            # So slow that the transfer can't end before the death, however late this loop hears of its begin.
            (link,) = [name for name in world.nodes["far-0"].engine.endpoints.sender._pacers if "->" in name]
            assert (
                await world.post("far-0", "/synthetic/link", {"link": link, "bits_per_s": 1e7})
            ).status == 200
            hop = asyncio.create_task(world.complete("far-0", ids[:-1], sealed, max_tokens=1))
            while not world.nodes["home-0"].engine.endpoints.arena.used_blocks:
                await asyncio.sleep(0.002)
            with pytest.raises((OSError, aiohttp.ClientError)):
                await world.post("far-0", "/synthetic/die", {})
                await hop
            await asyncio.wait_for(world.nodes["far-0"].gone.wait(), 120)
            await asyncio.gather(hop, return_exceptions=True)
            status = await world.arrival(ticket)
            assert status.phase == "failed" and "lost" in status.reason
            assert (await world.complete("home-0", ids, sealed)).ids == local
            sealed, status = await world.move(world.ticket("far-1", "home-1", ids[:-1]), ids[:-1])
            assert (await world.complete("home-1", ids, sealed)).ids == local
            await world.settled()

    asyncio.run(check())


def test_a_link_can_be_made_slow_without_telling_anyone(deployment: Deployment) -> None:
    async def check() -> None:
        async with running(deployment) as world:
            sender = world.nodes["far-0"].engine.endpoints.sender
            (link,) = [name for name in sender.telemetry()["links"] if "->" in name]
            before = sender.telemetry()["links"][link]["pace_bits_per_s"]
            async with aiohttp.ClientSession() as http:
                url = deployment.instance("far-0").url + "/synthetic/link"
                for body, status in (
                    ({"link": link, "bits_per_s": 1e6}, 200),
                    ({"link": "nowhere", "bits_per_s": 1e6}, 400),
                    ({"link": link, "bits_per_s": 0}, 400),
                    ({}, 400),
                ):
                    async with http.post(url, json=body) as answer:
                        assert answer.status == status
            assert sender._pacers[link].bandwidth_bits_per_s == 1e6
            assert sender.telemetry()["links"][link]["pace_bits_per_s"] == before

    asyncio.run(check())


@pytest.mark.slow("starts processes, and waits for what they do")
def test_a_stalled_engine_answers_but_goes_on_with_nothing(deployment: Deployment) -> None:
    async def check() -> None:
        async with running(deployment, "home-0") as world:
            ids = random_ids(3000, 1)
            plain = await world.complete("home-0", ids)
            clock = world.nodes["home-0"].engine.clock
            decoding = asyncio.create_task(world.complete("home-0", random_ids(300, 2), max_tokens=12_000))
            while not clock.batch:
                await asyncio.sleep(0.002)
            for body in ({}, {"seconds": 0}, {"seconds": "long"}):
                assert (await world.post("home-0", "/synthetic/stall", body)).status == 400
            began_s = asyncio.get_running_loop().time()
            assert (await world.post("home-0", "/synthetic/stall", {"seconds": 1.5})).status == 200
            # A shorter one doesn't end the one that is under way.
            assert (await world.post("home-0", "/synthetic/stall", {"seconds": 0.1})).status == 200
            steps = clock.steps()
            await world.post("home-0", "/reset_prefix_cache", {})
            prefilling = asyncio.create_task(world.complete("home-0", ids))
            await world.get("home-0", "/health")
            await asyncio.sleep(0.5)
            assert clock.steps() == steps
            assert (await prefilling).ids == plain.ids
            assert asyncio.get_running_loop().time() - began_s > 1.5
            assert len((await decoding).ids) == 12_000
            await world.settled()

    asyncio.run(check())


@pytest.fixture
def engines(deployment: Deployment) -> Iterator[RunningEngines]:
    running_engines = RunningEngines(deployment, stand_ins_per_process=4)
    yield running_engines
    running_engines.stop(timeout_s=5)


def complete(deployment: Deployment, name: str) -> Any:
    instance = deployment.instance(name)
    connection = http.client.HTTPConnection(instance.host, instance.http_port, timeout=120)
    try:
        body = json.dumps({"model": MODEL, "prompt": "Hello", "return_token_ids": True})
        connection.request("POST", "/v1/completions", body)
        return json.loads(connection.getresponse().read())["choices"][0]["token_ids"]
    finally:
        connection.close()


@pytest.mark.slow("starts processes, and waits for what they do")
def test_engines_share_processes_and_die_alone(deployment: Deployment, engines: RunningEngines) -> None:
    engines.start()
    engines.wait_ready(300)
    names = [name for _, members in CLUSTERS.values() for name in members]
    assert len({engines.pid(name) for name in names}) == 2
    answers = {tuple(complete(deployment, name)) for name in names}
    assert len(answers) == 1
    killed, neighbour = "far-1", "far-0"
    assert engines.pid(killed) == engines.pid(neighbour)
    engines.kill(killed)
    assert not engines.is_running(killed) and engines.exit_status(killed) == -9
    assert not engines.answers(killed)
    assert engines.is_running(neighbour) and engines.answers(neighbour)
    engines.start(killed)
    engines.wait_ready(300)
    assert engines.pid(killed) != engines.pid(neighbour)
    assert tuple(complete(deployment, killed)) in answers
    pids = {engines.pid(name) for name in names}
    stop_s = 60.0
    began_s = time.monotonic()
    engines.stop(timeout_s=stop_s)
    assert time.monotonic() - began_s < stop_s  # they end when asked
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow("starts processes, and waits for what they do")
def test_the_last_of_a_process_takes_it_along(deployment: Deployment, engines: RunningEngines) -> None:
    engines.start("home-0")
    engines.wait_ready(300)
    pid = engines.pid("home-0")
    engines.kill("home-0")
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow("starts processes, and waits for what they do")
def test_a_process_whose_engines_have_all_died_ends(deployment: Deployment, engines: RunningEngines) -> None:
    engines.start("home-0")
    engines.wait_ready(300)
    instance = deployment.instance("home-0")
    connection = http.client.HTTPConnection(instance.host, instance.http_port, timeout=120)
    try:
        connection.request("POST", "/synthetic/die")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        pass  # the answer may die with the engine
    finally:
        connection.close()
    deadline_s = time.monotonic() + 120
    while engines.is_running("home-0") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert engines.exit_status("home-0") == 0


def test_prfaas_engine_prints_how(deployment: Deployment) -> None:
    os.environ["PRFAAS_HOME"] = str(deployment.state_dir)
    try:
        done = CliRunner().invoke(app, ["engine", str(deployment.path), "home-0", "--print"])
    finally:
        del os.environ["PRFAAS_HOME"]
    assert done.exit_code == 0, done.output
    assert "-m prfaas.serving.engines.synthetic" in done.stdout and "home-0" in done.stdout
    assert "vllm" not in done.stdout


@pytest.mark.parametrize("name", ["synthetic", "local-wide"])
def test_examples_can_be_stood_in_for(name: str, tmp_path: Path) -> None:
    deployment = load_deployment(Path(__file__).parents[3] / "examples" / f"{name}.yaml", state_dir=tmp_path)
    synthetic = [c for c in deployment.clusters if c.hardware == "synthetic"]
    assert sum(len(cluster.instances) for cluster in synthetic) >= 10
    for link in deployment.links:
        kinds = {deployment.cluster(end).hardware == "synthetic" for end in (link.source, link.target)}
        assert len(kinds) == 1, f"{link.name} joins real engines and stand-ins"


@pytest.mark.slow("starts processes, and waits for what they do")
def test_engines_of_other_layouts_refuse_each_other(tmp_path: Path) -> None:
    async def check() -> None:
        for directory in ("one", "two"):
            (tmp_path / directory).mkdir()
        one = write_deployment(tmp_path / "one")
        text = (tmp_path / "one" / "deployment.yaml").read_text()
        two = write_deployment(tmp_path / "two", model="gpt-oss")
        document = json.loads(text) | {"model": json.loads(two.path.read_text())["model"]}
        two.path.write_text(json.dumps(document))
        two = load_deployment(two.path, state_dir=tmp_path / "two")
        two.security.key_file.write_bytes(one.security.key_file.read_bytes())
        for file in one.security.certificates.iterdir():
            (two.security.certificates / file.name).write_bytes(file.read_bytes())
        async with running(one, "far-0") as far, running(two, "home-0") as home:
            ids = random_ids(300, 1)
            ticket = far.ticket("far-0", "home-0", ids)
            await far.complete("far-0", ids, ticket.seal(far.key), max_tokens=1)
            for _ in range(200):
                if await far.metric("far-0", "prfaas_sends_failed_total"):
                    break
                await asyncio.sleep(0.02)
            assert await far.metric("far-0", "prfaas_sends_failed_total") == 1
            assert home.nodes["home-0"].engine.endpoints.receiver.stats()["producer_connections"] == 0

    asyncio.run(check())


@pytest.mark.slow("starts processes, and waits for what they do")
def test_ports_are_free_again(deployment: Deployment) -> None:
    async def check() -> None:
        for _ in range(2):
            async with running(deployment, "home-0") as world:
                await world.get("home-0", "/health")

    asyncio.run(check())
