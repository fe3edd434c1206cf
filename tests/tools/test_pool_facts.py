"""What `prfaas doctor` finds out about pools."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serving.pool.pool_daemon import DENSE, HYBRID, wait_until
from tests.serving.pool.test_running_pools import written

from prfaas.core.deployment import Deployment
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.engines.preparation import ensure_key
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.running import RunningPools
from prfaas.tools.finding import Finding
from prfaas.tools.pool_facts import check_pools, check_room


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = written(tmp_path)
    ensure_key(made)
    return made


def problems(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.subject: finding.text for finding in findings if finding.level == "problem"}


def found(deployment: Deployment) -> list[Finding]:
    return asyncio.run(check_pools(deployment))


def sessions(deployment: Deployment, name: str, geometry: PoolGeometry) -> list[PoolClient]:
    """Those of one engine."""
    path = deployment.pool_socket(deployment.pool_named(name))
    clients = [PoolClient(path, kind, geometry, engine_id="e") for kind in ("scheduler", "worker")]
    assert all(client.connect() for client in clients)
    return clients


def test_pools_that_do_not_run(deployment: Deployment) -> None:
    found_problems = problems(found(deployment))
    assert set(found_problems) == {"pool home-pool", "pool east-pool"}
    assert all("compute every prefix" in text for text in found_problems.values())
    mend = next(each.mend for each in found(deployment) if each.subject == "pool east-pool")
    assert mend == f"start it on its machine: prfaas pool {deployment.path} east-pool"


@pytest.mark.slow("starts processes")
def test_pools_and_their_engines(deployment: Deployment) -> None:
    with RunningPools(deployment) as pools:
        pools.wait_ready()
        assert problems(found(deployment)) == {
            "pool home-pool": "has 0 of 2 sessions of home-0",
            "pool east-pool": "has 0 of 2 sessions of east-0",
        }
        clients = [each for name in pools.names for each in sessions(deployment, name, HYBRID)]
        try:
            wait_until(lambda: not problems(found(deployment)))
            texts = {each.subject: each.text for each in found(deployment)}
            assert "used by home-0" in texts["pool home-pool"]
        finally:
            for client in clients:
                client.close()


@pytest.mark.slow("starts processes")
def test_pools_of_different_models(deployment: Deployment) -> None:
    with RunningPools(deployment) as pools:
        pools.wait_ready()
        clients = sessions(deployment, "home-pool", HYBRID) + sessions(deployment, "east-pool", DENSE)
        try:
            wait_until(lambda: "pools" in problems(found(deployment)))
        finally:
            for client in clients:
                client.close()
        assert "pages are of different models: " in problems(found(deployment))["pools"]


def test_room_for_memory_and_disk(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    node = deployment.pool_named("east-pool")
    assert check_room(deployment, node, is_running=False) == []
    large = replace(node, memory_bytes=1 << 50, ssd_bytes=1 << 60)
    texts = [each.text for each in check_room(deployment, large, is_running=False)]
    assert texts[0].startswith("needs 1024.0 TiB in /dev/shm, which has ")
    assert f"at {node.path}, where " in texts[1]
    assert len(check_room(deployment, large, is_running=True)) == 1
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = check_room(deployment, node, is_running=False)
    assert "can't be written to" in finding.text
