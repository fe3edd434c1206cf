"""Pacing keeps the queues of a path empty, and the live budget uses all of a line."""

import pytest

from wan.sharing import line, paced, shared

pytestmark = [pytest.mark.wan, pytest.mark.slow, pytest.mark.timeout(180)]


def test_round_trips_beside_paced_transfers_are_short() -> None:
    found = paced(line().goodput_bits_per_s, 5.0)
    assert found.inflation < 1.2
    assert found.carried_bits_per_s > 0.95 * line().goodput_bits_per_s


def test_who_has_something_to_send_gets_what_others_leave() -> None:
    budget = shared(5.0, budget=True)
    assert budget.of_goodput > 0.9
    assert budget.slow_bits_per_s > 18e6
    assert shared(3.0, budget=False).of_goodput < 0.75
