"""A threshold that an operator holds stays; given back, it is searched again."""

import pytest

from prfaas.core.deployment import Deployment

from .test_slow_loops import Slow
from .world import FakeClock


def test_no_search_moves_a_held_threshold(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    slow.thresholds.hold("home", 123)
    assert slow.threshold == 123.0 and slow.thresholds.held == {"home"}
    assert slow.changes == [("home", "operator")]
    assert slow.thresholds.state(clock.now_s)["thresholds"]["history"][-1]["reason"] == "operator"
    slow.observe(mean_log=9.9)
    slow.search()
    assert slow.threshold == 123.0
    slow.thresholds.hold("home", None)
    assert slow.thresholds.held == set()
    slow.search()
    assert slow.threshold > 1000
    assert slow.changes[-1] == ("home", "policy")


def test_a_policy_with_a_threshold_of_its_own_is_left_alone(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    object.__setattr__(deployment.routing, "policy", "static_threshold")
    with pytest.raises(ValueError, match="keeps routing"):
        slow.thresholds.hold("home", 123)
    assert slow.threshold == 4000.0 and not slow.thresholds.held
