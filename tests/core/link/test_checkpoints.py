"""How often a prefill sends checkpoints: what they cost on average, and what they spare."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.link.checkpoints import (
    checkpoint_count,
    checkpoint_every_tokens,
    checkpoint_interval_s,
    is_checkpoint_due,
)

KILLS_PER_S = 20 / 3600


@given(st.floats(1e-3, 10.0), st.floats(1e-5, 0.1), st.floats(0.5, 2.0))
def test_no_other_interval_costs_less(checkpoint_s: float, kills_per_s: float, factor: float) -> None:
    """Per second of work: a checkpoint each interval, and half an interval lost at each kill."""

    def cost(interval_s: float) -> float:
        return checkpoint_s / interval_s + kills_per_s * interval_s / 2

    best_s = checkpoint_interval_s(checkpoint_s, kills_per_s)
    assert cost(best_s) <= cost(best_s * factor) * (1 + 1e-9)


def test_without_kills_none_is_sent() -> None:
    assert checkpoint_interval_s(0.1, 0.0) == math.inf
    assert checkpoint_every_tokens(100_000, 90.0, 10**9, 10**8, 1e9, 0.0) == 0


@pytest.mark.parametrize(
    ("prefill_tokens", "checkpoint_bytes", "link_bits_per_s"), [(0, 10**8, 1e9), (100, 0, 1e9), (100, 1, 0.0)]
)
def test_where_there_is_nothing_to_weigh_none_is_sent(
    prefill_tokens: int, checkpoint_bytes: int, link_bits_per_s: float
) -> None:
    args = (prefill_tokens, 90.0, 10**9, checkpoint_bytes, link_bits_per_s, KILLS_PER_S)
    assert checkpoint_every_tokens(*args) == 0


def test_an_example_by_hand() -> None:
    """A state of 180 MB at 10 Gbit/s costs 0.144 s; at 20 kills per hour that is 7.2 s of work."""
    interval_s = math.sqrt(2 * 0.144 / KILLS_PER_S)
    assert interval_s == pytest.approx(7.2)
    every = checkpoint_every_tokens(90_000, 90.0, 10**9, 180_000_000, 1e10, KILLS_PER_S)
    assert every == pytest.approx(7200, abs=1)
    # A link that takes longer than the prefill: what has not left yet can be lost too.
    slow = checkpoint_every_tokens(90_000, 90.0, 225 * 10**9, 180_000_000, 1e10, KILLS_PER_S)
    assert slow == pytest.approx(3600, abs=1)


def test_a_prefill_too_short_for_one_has_none() -> None:
    assert checkpoint_every_tokens(10_000, 10.0, 10**6, 180_000_000, 1e10, KILLS_PER_S) == 0
    assert checkpoint_every_tokens(11_000, 11.0, 10**6, 180_000_000, 1e10, KILLS_PER_S) > 0


@given(st.integers(0, 5000), st.integers(1, 100_000), st.lists(st.integers(1, 4096), max_size=60))
def test_checkpoints_are_apart_and_spare_more_than_they_cost(
    every_tokens: int, num_tokens: int, chunks: list[int]
) -> None:
    """Invariant: the bytes of checkpoints are bounded by the interval, whatever the chunks."""
    last, end, taken = 0, 0, []
    for chunk in chunks:
        end += chunk
        if end >= num_tokens:
            break
        if is_checkpoint_due(every_tokens, last, end, num_tokens):
            taken.append((last, end))
            last = end
    assert all(end - last >= every_tokens > 0 for last, end in taken)
    assert len(taken) <= num_tokens / max(every_tokens, 1)
    assert all((end - last) * (num_tokens - end) >= every_tokens**2 / 2 for last, end in taken)


def test_near_the_end_none_is_due() -> None:
    assert is_checkpoint_due(1000, 0, 1000, 1500)
    assert not is_checkpoint_due(1000, 0, 1000, 1499)
    assert not is_checkpoint_due(1000, 0, 999, 9000)
    # More is at stake, so less need be left.
    assert is_checkpoint_due(1000, 0, 4000, 4125)
    assert not is_checkpoint_due(1000, 0, 4000, 4124)


@given(st.integers(0, 300), st.integers(0, 3000))
def test_the_count_is_that_of_chunks_of_one_token(every_tokens: int, num_tokens: int) -> None:
    last, taken = 0, 0
    for end in range(1, num_tokens + 1):
        if is_checkpoint_due(every_tokens, last, end, num_tokens):
            last, taken = end, taken + 1
    assert checkpoint_count(every_tokens, num_tokens) == taken
