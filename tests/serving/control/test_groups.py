"""Ranks of a data-parallel group fail, drain, leave and change their roles together."""

import asyncio
from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.role_allocation import RoleChange, RoleChanges

from .test_drains import drains_of
from .test_health import Watched
from .world import FakeClock, grouped_deployment_of

RANKS = ["home-d0", "home-d1"]


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return grouped_deployment_of(tmp_path)


@pytest.fixture
def watched(deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> Watched:
    return Watched(deployment, cluster_state, clock)


def test_a_dead_rank_takes_the_others_with_it_until_all_answer(watched: Watched) -> None:
    watched.http.healthy["home-d1"] = False
    watched.watch.suspect("home-d1", "unreachable", lost_cache=True)
    for _ in range(8):
        watched.probe()
        assert [watched.healthy(name) for name in (*RANKS, "home-p0")] == [False, False, True]
    assert watched.lost == ["home-d1"]
    assert watched.watch.reason("home-d0") == "frozen: home-d1, a rank of its group, has ended"
    watched.http.healthy["home-d1"] = True
    watched.probe()
    watched.probe()
    assert all(map(watched.healthy, RANKS))
    of_d0 = [reason for name, reason in watched.frozen if name == "home-d0"]
    assert len(of_d0) == 2 and of_d0[1] is None


def test_a_group_that_has_started_again_is_back(watched: Watched) -> None:
    watched.http.healthy.update(dict.fromkeys(RANKS, False))
    watched.probe()
    # One after the other: neither may wait for the other for ever.
    watched.http.healthy["home-d0"] = True
    watched.probe(4.0)
    assert not any(map(watched.healthy, RANKS))
    watched.http.healthy["home-d1"] = True
    watched.probe()
    watched.probe()
    assert all(map(watched.healthy, RANKS)) and sorted(watched.lost) == RANKS


def test_a_rank_that_dies_again_takes_the_others_again(watched: Watched) -> None:
    watched.watch.suspect("home-d1", "unreachable", lost_cache=True)
    for answers in (True, False):
        watched.http.healthy["home-d1"] = answers
        watched.probe()
        watched.probe()
        assert watched.healthy("home-d0") == answers and not watched.healthy("home-d1")


def test_a_rank_that_stands_still_holds_up_all(watched: Watched) -> None:
    watched.stuck_s["home-d0"] = 61.0
    watched.probe()
    assert not any(map(watched.healthy, RANKS))
    assert watched.watch.reason("home-d1") == (
        "frozen with a rank of its group; home-d0 is stalled: its running requests have made no progress for 60 s"
    )
    watched.stuck_s["home-d0"] = 0.0
    watched.probe()
    watched.probe()
    assert all(map(watched.healthy, RANKS))


def test_a_failed_request_is_its_rank_s_own(watched: Watched) -> None:
    watched.watch.suspect("home-d0", "http-500")
    watched.probe()
    assert [watched.healthy(name) for name in RANKS] == [False, True]


def test_roles_change_together(cluster_state: ClusterState, clock: FakeClock) -> None:
    ended: list[RoleChange] = []
    begun: list[str] = []
    roles = RoleChanges(cluster_state, on_end=ended.append, on_begin=begun.append)
    views = [cluster_state.instance(name) for name in RANKS]
    with cluster_state.decoding("home-d1", 0):
        assert roles.begin("home-d0", "prefill", "")
        roles.tick()
        assert all(view.draining for view in views) and roles.is_busy and begun == RANKS
    roles.tick()
    assert all(view.prefills and not view.decodes and not view.draining for view in views)
    assert len(ended) == 1
    # A rank that is given another role by the file ends what was begun for all.
    assert roles.begin("home-d1", "decode", "")
    roles.give_up("home-d0")
    assert not any(view.draining for view in views) and not roles.is_busy


def test_drains_and_departures_are_the_whole_group_s(cluster_state: ClusterState) -> None:
    async def main() -> None:
        told: list[str] = []
        drains = drains_of(cluster_state, told)
        drains.drain("home-d1", wanted=True)
        assert all(cluster_state.instance(name).closed for name in RANKS) and sorted(told) == RANKS
        drains.drain("home-d0", wanted=False)
        assert not any(cluster_state.instance(name).closed for name in RANKS)
        drains.give_notice("home-d0", 30.0)
        assert sorted(cluster_state.view.leaves_s) == RANKS
        drains.drain("home-d0", wanted=False)

    asyncio.run(main())
    drains = drains_of(cluster_state, [], {name: EngineMeter(60.0) for name in cluster_state.names})
    with cluster_state.decoding("home-d1", 0):
        assert not drains.is_idle("home-d0")
    assert drains.is_idle("home-d0")
    cluster_state.leave("home-d0")
    assert cluster_state.together("home-d1") == ["home-d1"]
