"""The bounds of bench/policy_bounds.py are bounds."""

import numpy as np
import pytest

from policies import DEPLOYMENTS, Spec
from policy_bounds import Case, _least_left_first
from prfaas.core.deployment import load_planned


@pytest.mark.parametrize("load", [0.3, 0.95])
def test_no_rule_is_below_the_bound(load: float) -> None:
    case = Case(load_planned(DEPLOYMENTS["paper"]), load, 80, seed=3)
    bound_s = case.bound_s()
    assert bound_s < min(case.preemptive_s(), case.policy_s(Spec("paper")), case.policy_s(Spec("tilted")))
    # Nobody is done before its prefill is, but for what a slot leaves open.
    shortest_s = float(np.minimum(*case.work_s).mean())
    assert bound_s > shortest_s * (1 - 1 / 8)


def test_the_least_left_goes_first_and_interrupts() -> None:
    arrivals_s, work_s = np.array([0.0, 1.0, 1.0, 9.0]), np.array([5.0, 1.0, 2.0, 1.0])
    # One machine: the second from 1 to 2, the third until 4, the first until 8; the last when it comes.
    assert _least_left_first(arrivals_s, work_s, 1).tolist() == [8.0, 1.0, 3.0, 1.0]
    # Two: the first waits from 1 to 2, until the second is done.
    assert _least_left_first(arrivals_s, work_s, 2).tolist() == [6.0, 1.0, 2.0, 1.0]
