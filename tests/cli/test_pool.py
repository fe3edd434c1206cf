"""`prfaas pool status`, `clear` and `verify`."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from tests.ports import free_ports

from prfaas.cli.main import main
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageGroup, PageIdentity, PoolGeometry
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.running import RunningPools

LIMIT_S = 60.0
GEOMETRY = PoolGeometry("model", 1, (PageGroup(0, GroupKind.FULL, 16, 0, 4096),))
FILE = """\
name: pools
model: {{served_name: m, path: model, max_model_len: 4096}}
clusters:
  - name: home
    kind: pd
    hardware: cpu
    pool: {{memory: 8 MiB, ssd: 16 MiB, kv_port: {ports[0]}}}
    instances:
      - {{name: home-0, roles: [prefill, decode], host: 127.0.0.1, http_port: {ports[1]}, kv_port: {ports[2]}}}
  - name: east
    kind: prfaas
    hardware: cpu
    pool: {{memory: 8 MiB, kv_port: {ports[3]}}}
    instances:
      - {{name: east-0, roles: [prefill], host: 127.0.0.1, http_port: {ports[4]}, kv_port: {ports[5]}}}
links: [{{source: east, target: home, bandwidth: 1 Gbit/s}}]
engine: {{kv_cache_gib: 1}}
pool: {{staging: 1 MiB}}
"""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "s"))
    path = tmp_path / "pools.yaml"
    path.write_text(FILE.format(ports=free_ports(6)))
    return load_deployment(path)


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "pool", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def store_pages(deployment: Deployment, count: int) -> None:
    """Have an engine store so many pages in home-pool, and wait until they are on disk, too."""
    chain = KeyChain(16, "", "")
    chain.extend(range(16 * count))
    pages = [
        (page_id(key, 0), PageIdentity(chain.keys[number - 1] if number else b"", bytes(64), "", ""))
        for number, key in enumerate(chain.keys)
    ]
    client = PoolClient(deployment.pool_socket(deployment.pool_named("home-pool")), "worker", GEOMETRY)

    def figures() -> dict[str, object]:
        return client.stats() or {}

    try:
        assert client.connect()
        await_true(
            lambda: "memory_bytes" in figures() and figures()["provided_bytes"] == figures()["memory_bytes"]
        )
        refs = client.reserve(b"", pages)
        assert refs is not None
        with client.writing(client.epoch):
            for ref in refs:
                assert ref is not None
                client.arena[ref.offset : ref.offset + 4096] = 7
        client.commit([(ref, xxhash.xxh3_64_intdigest(b"\7" * 4096)) for ref in refs if ref is not None])
        await_true(lambda: figures()["ssd_pages"] == figures()["memory_pages"] == {"0": count})
    finally:
        client.close()


def test_without_a_pool_here_there_is_one_sentence(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "clear", "verify"):
        assert run(monkeypatch, command, deployment.path) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == (
            f"prfaas: no pool runs here; start one on its machine: prfaas pool {deployment.path} home-pool\n"
        )
    assert run(monkeypatch, "status", deployment.path, "nobody") == 2
    assert 'has no pool "nobody"; it has home-pool, east-pool' in capsys.readouterr().err


def test_a_pool_that_has_ended_does_not_answer(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = deployment.pool_socket(deployment.pool_named("home-pool"))
    socket.parent.mkdir(parents=True)
    socket.touch()
    for command in ("status", "clear", "verify"):
        assert run(monkeypatch, command, deployment.path) == 1
        assert "does not answer" in capsys.readouterr().out
        assert run(monkeypatch, command, deployment.path, "--json") == 1
        assert json.loads(capsys.readouterr().out) == {"pools": [{"name": "home-pool", "answers": False}]}


@pytest.mark.slow("starts processes")
def test_pools_are_shown_verified_and_cleared(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunningPools(deployment) as pools:
        pools.wait_ready(LIMIT_S)
        assert run(monkeypatch, "status", deployment.path) == 0
        assert capsys.readouterr().out.count("waits for its first engine") == 2
        assert run(monkeypatch, "verify", deployment.path, "east-pool") == 0
        assert capsys.readouterr().out == ("east-pool: memory 0 right, 0 wrong; disk 0 right, 0 wrong\n")

        store_pages(deployment, 12)
        assert run(monkeypatch, "status", deployment.path) == 0
        shown = capsys.readouterr().out
        assert "12, disk 12" in shown
        assert "serves" in shown
        assert run(monkeypatch, "status", deployment.path, "home-pool", "--json") == 0
        (home,) = json.loads(capsys.readouterr().out)["pools"]
        assert (home["name"], home["answers"], home["ssd_state"]) == ("home-pool", True, "writable")

        assert run(monkeypatch, "verify", deployment.path, "home-pool") == 0
        assert capsys.readouterr().out == ("home-pool: memory 12 right, 0 wrong; disk 12 right, 0 wrong\n")
        folder = deployment.pool_named("home-pool").path
        (pages,) = folder.glob("*.pages")
        with pages.open("r+b") as file:
            file.write(b"wrong")
        assert run(monkeypatch, "verify", deployment.path, "home-pool", "--json") == 1
        (home,) = json.loads(capsys.readouterr().out)["pools"]
        assert (home["right_pages"], home["ssd_right_pages"], home["ssd_wrong_pages"]) == (12, 11, 1)

        assert run(monkeypatch, "clear", deployment.path, "home-pool") == 0
        assert capsys.readouterr().out == "home-pool: 12 pages dropped\n"
        assert run(monkeypatch, "verify", deployment.path, "home-pool") == 0
        assert capsys.readouterr().out == ("home-pool: memory 0 right, 0 wrong; disk 0 right, 0 wrong\n")
