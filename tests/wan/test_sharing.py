"""Pacing keeps the queues of a path empty, and the live budget uses all of a line."""

import pytest

from wan.sharing import line, paced, shared

pytestmark = [
    pytest.mark.wan,
    pytest.mark.slow("shares of a line show only once TCP has settled on it"),
    pytest.mark.timeout(180),
]


def skip_if_slow(share_of_goodput: float) -> None:
    """What a machine without a free core carries says nothing of pacing."""
    if share_of_goodput < 0.9:
        pytest.skip(f"this machine is too busy to fill the line: {share_of_goodput:.0%} of its goodput")


def test_round_trips_beside_paced_transfers_are_short() -> None:
    goodput = line().goodput_bits_per_s
    found = paced(goodput, 5.0)
    skip_if_slow(found.carried_bits_per_s / goodput)
    assert found.inflation < 1.3


@pytest.mark.extended("paces of those who share a line are in `make test` without one")
def test_who_has_something_to_send_gets_what_others_leave() -> None:
    budget, static = shared(5.0, budget=True), shared(3.0, budget=False)
    assert static.of_goodput < 0.75
    assert budget.of_goodput > 1.15 * static.of_goodput
    skip_if_slow(budget.of_goodput)
    assert budget.slow_bits_per_s > 15e6
