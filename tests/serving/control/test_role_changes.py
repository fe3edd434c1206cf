"""One conversion at a time: drained, relabelled, told; and how busy instances were."""

import pytest

from prfaas.core.scheduling.allocation import DRAIN_LIMIT_S
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.role_allocation import RoleChange, RoleChanges, stage_utilisation

from .world import FakeClock, decision


@pytest.fixture
def ended() -> list[RoleChange]:
    return []


@pytest.fixture
def roles(cluster_state: ClusterState, ended: list[RoleChange]) -> RoleChanges:
    return RoleChanges(cluster_state, on_end=ended.append)


def test_drains_then_relabels(
    roles: RoleChanges, cluster_state: ClusterState, clock: FakeClock, ended: list[RoleChange]
) -> None:
    view = cluster_state.instance("home-d0")
    with cluster_state.decoding("home-d0", 0):
        assert roles.begin("home-d0", "prefill", "prefill is the limit")
        roles.tick()
        assert (view.draining, view.decodes, roles.is_busy) == (True, True, True)
        clock.now_s += 5
    roles.tick()
    assert (view.draining, view.prefills, view.decodes) == (False, True, False)
    assert [(change.outcome, change.drained_s) for change in ended] == [("done", 5.0)]
    assert not roles.is_busy


def test_requests_on_their_way_are_waited_for(roles: RoleChanges, cluster_state: ClusterState) -> None:
    with cluster_state.prefilling(decision("far-0", "home-d0")):
        roles.begin("home-d0", "prefill", "")
        roles.tick()
        assert roles.is_busy
    roles.tick()
    assert not roles.is_busy


def test_only_one_at_a_time_and_never_to_the_same_role(
    roles: RoleChanges, cluster_state: ClusterState
) -> None:
    assert not roles.begin("home-d0", "decode", "")
    assert roles.begin("home-d0", "prefill", "")
    assert not roles.begin("home-d1", "prefill", "")
    assert not cluster_state.instance("home-d1").draining


def test_old_work_does_not_hold_it_up_for_ever(
    roles: RoleChanges, cluster_state: ClusterState, clock: FakeClock, ended: list[RoleChange]
) -> None:
    with cluster_state.decoding("home-d0", 0):
        roles.begin("home-d0", "prefill", "")
        clock.now_s += DRAIN_LIMIT_S
        roles.tick()
        assert cluster_state.instance("home-d0").prefills
        assert cluster_state.instance("home-d0").in_flight == 1
    assert ended[0].outcome == "done-with-old-work"


def test_a_failing_instance_keeps_its_role(
    roles: RoleChanges, cluster_state: ClusterState, ended: list[RoleChange]
) -> None:
    roles.begin("home-p0", "decode", "")
    cluster_state.instance("home-p0").healthy = False
    roles.tick()
    view = cluster_state.instance("home-p0")
    assert (view.prefills, view.decodes, view.draining) == (True, False, False)
    assert ended[0].outcome == "abandoned"
    assert roles.state(0.0)[0]["outcome"] == "abandoned"


def test_loads_since_the_last_look(cluster_state: ClusterState, clock: FakeClock) -> None:
    engines = {name: EngineMeter(60.0) for name in cluster_state.names}
    usage = stage_utilisation(cluster_state, engines, lambda _cluster: 0)
    with cluster_state.decoding("home-d0", 0), cluster_state.decoding("home-d0", 0):
        with (
            cluster_state.prefilling(decision("far-0", "home-d1")),
            cluster_state.prefilling(decision("home-p0", "home-d1")),
        ):
            clock.now_s += 4
        clock.now_s += 4
        (load,) = usage.loads(clock.now_s)
    # One of two prefill instances, and one of two PrfaaS instances, half of the time; 2 of 32 slots all of it.
    assert load.prefill.utilisation == pytest.approx(0.25)
    assert load.decode.utilisation == pytest.approx(2 / 32)
    assert load.remote is not None and load.remote.utilisation == pytest.approx(0.25)
    assert load.remote_instances == 2
    clock.now_s += 10
    (load,) = usage.loads(clock.now_s)
    assert (load.prefill.utilisation, load.decode.utilisation) == (0.0, 0.0)
    cluster_state.view.links["far", "home"].up = False
    (load,) = usage.loads(clock.now_s)
    assert load.remote is None
