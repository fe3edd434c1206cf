"""Notice: what an instance still gets, when it is closed, and how it comes back."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.drains import InstanceDrains
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.prefill_admission import PrefillAdmission

from .world import FakeClock, cluster_state_of, deployment_of

NOTICE_S = 30.0


@pytest.fixture
def cluster_state(tmp_path: Path, clock: FakeClock) -> ClusterState:
    return cluster_state_of(deployment_of(tmp_path), clock)


def drains_of(
    cluster_state: ClusterState, told: list[str], meters: Mapping[str, EngineMeter] | None = None
) -> InstanceDrains:
    listeners = Listeners()
    listeners.changed.append(told.append)
    admission = PrefillAdmission(cluster_state, batch_tokens=2048, reusable_at=lambda *_: 0)
    return InstanceDrains(cluster_state, admission, meters or {}, listeners)


def test_notice_closes_an_instance_when_it_is_over(cluster_state: ClusterState, clock: FakeClock) -> None:
    async def main() -> None:
        told: list[str] = []
        drains = drains_of(cluster_state, told)
        view = cluster_state.instance("far-0")
        drains.give_notice("far-0", NOTICE_S)
        drains.give_notice("far-0", 0.05)
        assert cluster_state.view.leaves_s == {"far-0": clock.now_s + 0.05}
        drains.restarted("far-0")
        assert view.takes_prefills and told == ["far-0", "far-0"] and "far-0" in cluster_state.view.leaves_s
        clock.now_s += 0.05
        await asyncio.sleep(0.2)
        assert view.closed and not cluster_state.view.leaves_s and told[2:] == ["far-0"]
        # Only who was given notice comes back by itself.
        drains.drain("far-1", wanted=True)
        for name in ("far-0", "far-1"):
            drains.restarted(name)
        assert view.takes_prefills and cluster_state.instance("far-1").closed

    asyncio.run(main())


def test_an_operator_takes_notice_back(cluster_state: ClusterState, clock: FakeClock) -> None:
    async def main() -> None:
        told: list[str] = []
        drains = drains_of(cluster_state, told)
        drains.give_notice("far-0", 0.05)
        drains.drain("far-0", wanted=False)
        assert not cluster_state.view.leaves_s and told == ["far-0", "far-0"]
        await asyncio.sleep(0.1)
        assert cluster_state.instance("far-0").takes_prefills
        drains.drain("far-0", wanted=False)
        assert len(told) == 2

    asyncio.run(main())


def test_an_engine_that_leaves_is_closed_until_its_next_process_speaks(cluster_state: ClusterState) -> None:
    told: list[str] = []
    drains = drains_of(cluster_state, told)
    view = cluster_state.instance("far-0")
    for _ in range(2):
        drains.hear("far-0", 0, {"leaving": True})
    assert view.closed and told == ["far-0"]
    # No operator opens what is about to end, and the end of one reason is not that of another.
    drains.drain("far-0", wanted=False)
    assert view.closed
    drains.drain("far-0", wanted=True)
    drains.hear("far-0", 0, {"leaving": False})
    assert view.closed
    drains.drain("far-0", wanted=False)
    assert not view.closed and told == ["far-0", "far-0"]
    # One rank of two is enough; an old release says nothing.
    drains.hear("far-0", 1, {"leaving": True})
    drains.hear("far-0", 0, {})
    assert view.closed
    drains.hear("far-0", 1, {})
    assert not view.closed
    drains.hear("nobody", 0, {"leaving": True})


def test_an_engine_that_refuses_what_is_new_is_closed_until_another_process_is_there(
    cluster_state: ClusterState,
) -> None:
    told: list[str] = []
    drains = drains_of(cluster_state, told)
    drains.is_ending("far-0")
    drains.is_ending("nobody")
    drains.hear("far-0", 0, {"leaving": False})
    assert cluster_state.instance("far-0").closed and told == ["far-0"]
    drains.restarted("far-0")
    assert not cluster_state.instance("far-0").closed
    # A process that is gone is not to end any more; what operators want is their own.
    drains.is_ending("far-0")
    drains.hear("far-0", 0, {"leaving": True})
    drains.ended("far-0")
    assert not cluster_state.instance("far-0").closed
    drains.drain("far-0", wanted=True)
    drains.ended("far-0")
    drains.ended("nobody")
    assert cluster_state.instance("far-0").closed
