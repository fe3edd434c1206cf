"""A gateway's control plane follows the daemon of a pool in its own process: what it holds, its figures, its death."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.ports import free_ports

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.core.prefix.index import NOTHING, PoolHit
from prfaas.serving.control.members import Members
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.running import RunningPools
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import load_key

from .pool_daemon import is_provided, store_prompt, wait_until

LIMIT_S = 30.0
SHAPE = PoolGeometry(
    "followed",
    1,
    (
        PageGroup(0, GroupKind.FULL, 32, 0, 4096),
        PageGroup(1, GroupKind.STATE, 32, 0, 65536),
        PageGroup(2, GroupKind.WINDOW, 32, 40, 2048),
    ),
)
TOKENS = 320
PROMPT = list(range(TOKENS))
FILE = """\
name: followed
model: {{served_name: m, path: model, max_model_len: 4096}}
clusters:
  - name: home
    kind: pd
    hardware: cpu
    pool: {{memory: 8 MiB, ssd: 16 MiB, kv_port: {ports[0]}}}
    instances:
      - {{name: home-0, roles: [prefill, decode], host: 127.0.0.1, http_port: {ports[1]}, kv_port: {ports[2]}}}
engine: {{kv_cache_gib: 1}}
pool: {{staging: 1 MiB}}
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    ports = free_ports(5)
    path = tmp_path / "followed.yaml"
    path.write_text(FILE.format(ports=ports))
    return load_deployment(path, state_dir=tmp_path / "s")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow("starts pools as processes")
def test_what_a_daemon_holds_is_known_from_its_start_to_its_next_life(deployment: Deployment) -> None:
    with RunningPools(deployment) as pools:
        pools.wait_ready(LIMIT_S)
        client = PoolClient(deployment.pool_socket(deployment.pools[0]), "worker", SHAPE)
        try:
            assert client.connect()
            wait_until(lambda: is_provided(client))
            assert store_prompt(client, PROMPT) > 0
            asyncio.run(follow(deployment, pools, client))
        finally:
            client.close()


async def follow(deployment: Deployment, pools: RunningPools, client: PoolClient) -> None:
    plane = LivePlane(
        Members(RunningDeployment(deployment), load_key(deployment.security.key_file)),
        CollectorRegistry(),
        None,
    )
    running = asyncio.create_task(plane.run())

    def hit(token_ids: list[int]) -> PoolHit:
        match = plane.prefixes.match(plane.prefixes.chains([*token_ids, 0], "", ""))
        return match.pools.get("home-pool", PoolHit(NOTHING, NOTHING))

    def daemon() -> dict[str, int]:
        found = plane.state()["pools"]["home-pool"]["daemon"]
        return {} if found is None else found

    try:
        # It stored before anybody followed it.
        await until(lambda: hit(PROMPT).in_memory.reusable_tokens == TOKENS)
        await until(lambda: daemon().get("stored_bytes"))
        assert plane.state()["pools"]["home-pool"]["up"]
        assert daemon()["sessions"] == 1
        other = [*range(5000, 5064)]
        await asyncio.to_thread(store_prompt, client, other)
        await until(lambda: hit(other).every_tier.reusable_tokens == 64)
        epoch = daemon()["epoch"]
        # All is on disk by now, so that the next daemon has it whatever becomes of the arena.
        await until(lambda: daemon()["ssd_queued_bytes"] == 0 and daemon()["bytes"]["ssd"] > 0)
        pools.kill("home-pool")
        await until(lambda: hit(PROMPT) == PoolHit(NOTHING, NOTHING))
        assert not plane.prefixes.blocks("home-pool")
        await asyncio.to_thread(pools.restart, ["home-pool"])
        await asyncio.to_thread(pools.wait_ready, LIMIT_S)
        await until(lambda: hit(PROMPT).every_tier.reusable_tokens == TOKENS)
        await until(lambda: daemon()["epoch"] > epoch)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await plane.close()
