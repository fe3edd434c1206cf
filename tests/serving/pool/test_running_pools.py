"""Pools as child processes: who starts, ends and restarts them, and that nothing stays."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas.core.backoff import Backoff
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.supervisor import RestartLimits, Supervisor
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.daemon import arena_path
from prfaas.serving.pool.running import RunningPools

pytestmark = pytest.mark.slow("pools as processes of their own")

LIMIT_S = 60.0
FILE = """\
name: pools
model: {{served_name: m, path: model, max_model_len: 4096}}
clusters:
  - name: home
    kind: pd
    hardware: cpu
    pool: {{memory: {memory}, kv_port: {ports[0]}}}
    instances:
      - {{name: home-0, roles: [prefill, decode], host: 127.0.0.1, http_port: {ports[1]}, kv_port: {ports[2]}}}
  - name: east
    kind: prfaas
    hardware: cpu
    pool: {{memory: 8 MiB, ssd: 16 MiB, kv_port: {ports[3]}}}
    instances:
      - {{name: east-0, roles: [prefill], host: 127.0.0.1, http_port: {ports[4]}, kv_port: {ports[5]}}}
links: [{{source: east, target: home, bandwidth: 1 Gbit/s}}]
engine: {{kv_cache_gib: 1}}
pool: {{staging: 1 MiB}}
"""


def written(tmp_path: Path, memory: str = "8 MiB") -> Deployment:
    path = tmp_path / "pools.yaml"
    path.write_text(FILE.format(memory=memory, ports=free_ports(6)))
    return load_deployment(path, state_dir=tmp_path / "s")


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return written(tmp_path)


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_pools_run_between_entry_and_exit(deployment: Deployment) -> None:
    with RunningPools(deployment) as pools:
        pools.wait_ready(LIMIT_S)
        assert pools.names == ("home-pool", "east-pool")
        pids = [pools.pid(name) for name in pools.names]
        for node in deployment.pools:
            assert pools.is_running(node.name) and pools.answers(node.name)
            path = deployment.pool_socket(node)
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert "engines connect at" in pools.log_path(node.name).read_text()
        with pytest.raises(EngineError, match="pool home-pool runs already"):
            pools.start()
    assert all(map(is_gone, pids))
    for node in deployment.pools:
        assert not pools.answers(node.name)
        assert not deployment.pool_socket(node).exists()
        assert not arena_path(deployment.pool_socket(node)).exists()
    pools.stop()


def test_a_deployment_without_pools_starts_nothing(deployment: Deployment) -> None:
    bare = replace(deployment, clusters=tuple(replace(each, pool=None) for each in deployment.clusters))
    with RunningPools(bare) as pools:
        pools.wait_ready(1)
        assert not pools.names


def test_a_killed_pool_is_started_again_by_the_supervisor(deployment: Deployment) -> None:
    told: list[str] = []

    async def check(pools: RunningPools) -> None:
        limits = RestartLimits(backoff=Backoff(0.05, 60.0))
        supervisor = Supervisor(
            pools, [node.name for node in deployment.pools], limits, told.append, kind="pool"
        )
        first = pools.pid("home-pool")
        os.kill(first, signal.SIGKILL)
        until_s = time.monotonic() + LIMIT_S
        while not any("ready again" in each for each in told):
            assert time.monotonic() < until_s, told
            await supervisor.look()
            await asyncio.sleep(0.05)
        assert pools.pid("home-pool") != first

    with RunningPools(deployment) as pools:
        pools.wait_ready(LIMIT_S)
        asyncio.run(check(pools))
        assert pools.is_running("east-pool")
    assert told[0].startswith("pool home-pool has ended (signal 9; see ")
    assert "restart 1 of 5 in 0.05 s" in told[0]


def test_engines_find_a_pool_that_comes_later(deployment: Deployment) -> None:
    node = deployment.pool_named("home-pool")
    client = PoolClient(deployment.pool_socket(node), "tool", None)
    try:
        assert not client.connect()
        with RunningPools(deployment, ["home-pool"]) as pools:
            pools.wait_ready(LIMIT_S)
            await_true(lambda: client.stats() is not None)
    finally:
        client.close()


def test_a_taken_port_is_one_sentence(deployment: Deployment) -> None:
    port = deployment.pool_named("east-pool").kv_port
    with socket.create_server(("127.0.0.1", port)):
        pools = RunningPools(deployment)
        with pytest.raises(
            EngineError, match=f"pool east-pool can't start: 127.0.0.1:{port} is already in use"
        ):
            pools.start()
        assert not pools.is_running("home-pool")


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    deployment = written(tmp_path, memory="900 TiB")
    with RunningPools(deployment) as pools:
        with pytest.raises(
            EngineError, match="pool home-pool ended with exit code 1 before it was ready"
        ) as error:
            pools.wait_ready(LIMIT_S)
        assert "/dev/shm" in str(error.value)
        assert "Traceback" not in str(error.value)


def test_a_second_daemon_of_a_pool_is_refused(deployment: Deployment) -> None:
    with RunningPools(deployment, ["home-pool"]) as pools:
        pools.wait_ready(LIMIT_S)
        command = [sys.executable, "-m", "prfaas.serving.pool", "--state-dir", str(deployment.state_dir)]
        second = subprocess.run(
            [*command, str(deployment.path), "home-pool"], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert second.returncode == 1
        assert "Traceback" not in second.stderr
        assert pools.answers("home-pool")


PARENT = """
import sys, time
from pathlib import Path
from prfaas.core.deployment import load_deployment
from prfaas.serving.pool.running import RunningPools
deployment = load_deployment(Path(sys.argv[1]), state_dir=Path(sys.argv[2]))
pools = RunningPools(deployment)
pools.start()
pools.wait_ready(60)
print(*(pools.pid(name) for name in pools.names), flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_parent_is_killed(deployment: Deployment) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(deployment.path), str(deployment.state_dir)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.communicate()
    await_true(lambda: all(map(is_gone, pids)))
    assert not any(deployment.pool_socket(node).exists() for node in deployment.pools)
