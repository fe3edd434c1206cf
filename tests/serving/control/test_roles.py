"""One conversion at a time: drained, relabelled, told; and how busy instances were."""

import pytest

from prfaas.core.deployment import Deployment
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_metrics import EngineMeter
from prfaas.serving.control.role_allocation import DRAIN_LIMIT_S, RoleChange, RoleChanges, StageUtilisation

from .world import FakeClock, decision


@pytest.fixture
def ended() -> list[RoleChange]:
    return []


@pytest.fixture
def roles(board: ClusterState, clock: FakeClock, ended: list[RoleChange]) -> RoleChanges:
    return RoleChanges(board, clock=clock, on_end=ended.append)


def test_drains_then_relabels(
    roles: RoleChanges, board: ClusterState, clock: FakeClock, ended: list[RoleChange]
) -> None:
    view = board.instance("home-d0")
    with board.decoding("home-d0", 0):
        assert roles.begin("home-d0", "prefill", "prefill is the limit")
        roles.tick()
        assert (view.draining, view.decodes, roles.is_busy) == (True, True, True)
        clock.now_s += 5
    roles.tick()
    assert (view.draining, view.prefills, view.decodes) == (False, True, False)
    assert [(change.outcome, change.drained_s) for change in ended] == [("done", 5.0)]
    assert not roles.is_busy


def test_requests_on_their_way_are_waited_for(roles: RoleChanges, board: ClusterState) -> None:
    with board.prefilling(decision("far-0", "home-d0")):
        roles.begin("home-d0", "prefill", "")
        roles.tick()
        assert roles.is_busy
    roles.tick()
    assert not roles.is_busy


def test_only_one_at_a_time_and_never_to_the_same_role(roles: RoleChanges, board: ClusterState) -> None:
    assert not roles.begin("home-d0", "decode", "")
    assert roles.begin("home-d0", "prefill", "")
    assert not roles.begin("home-d1", "prefill", "")
    assert not board.instance("home-d1").draining


def test_old_work_does_not_hold_it_up_for_ever(
    roles: RoleChanges, board: ClusterState, clock: FakeClock, ended: list[RoleChange]
) -> None:
    with board.decoding("home-d0", 0):
        roles.begin("home-d0", "prefill", "")
        clock.now_s += DRAIN_LIMIT_S
        roles.tick()
        assert board.instance("home-d0").prefills
        assert board.instance("home-d0").in_flight == 1
    assert ended[0].outcome == "done-with-old-work"


def test_a_failing_instance_keeps_its_role(
    roles: RoleChanges, board: ClusterState, ended: list[RoleChange]
) -> None:
    roles.begin("home-p0", "decode", "")
    board.instance("home-p0").healthy = False
    roles.tick()
    view = board.instance("home-p0")
    assert (view.prefills, view.decodes, view.draining) == (True, False, False)
    assert ended[0].outcome == "abandoned"
    assert roles.state(0.0)[0]["outcome"] == "abandoned"


def test_loads_since_the_last_look(deployment: Deployment, board: ClusterState, clock: FakeClock) -> None:
    usage = StageUtilisation(
        deployment, board, {name: EngineMeter(60.0) for name in board.names}, clock=clock
    )
    with board.decoding("home-d0", 0), board.decoding("home-d0", 0):
        with (
            board.prefilling(decision("far-0", "home-d1")),
            board.prefilling(decision("home-p0", "home-d1")),
        ):
            clock.now_s += 4
        clock.now_s += 4
        (load,) = usage.loads()
    # One of two prefill instances, and one of two PrfaaS instances, half of the time; 2 of 32 slots all of it.
    assert load.prefill.utilisation == pytest.approx(0.25)
    assert load.decode.utilisation == pytest.approx(2 / 32)
    assert load.remote is not None and load.remote.utilisation == pytest.approx(0.25)
    assert load.remote_instances == 2
    clock.now_s += 10
    (load,) = usage.loads()
    assert (load.prefill.utilisation, load.decode.utilisation) == (0.0, 0.0)
    board.view.links["far", "home"].up = False
    (load,) = usage.loads()
    assert load.remote is None
