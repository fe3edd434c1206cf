"""Pauses between tries: none without a failure, then twice as long each time, up to a most."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.backoff import Backoff


def test_a_pause_is_twice_the_one_before_up_to_a_most() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.pause_s(failures) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(1, 2000), st.floats(0.1, 10.0), st.floats(10.0, 100.0))
def test_pauses_never_fall_and_are_bounded(failures: int, first_s: float, most_s: float) -> None:
    backoff = Backoff(first_s, most_s)
    assert first_s <= backoff.pause_s(failures) <= backoff.pause_s(failures + 1) <= most_s
