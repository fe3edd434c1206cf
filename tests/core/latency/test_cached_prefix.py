import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.latency.cached_prefix import after_prefix_s
from prfaas.core.latency.service_curve import ServiceCurve

# A dense model: 50 ms for any prefill, 0.1 ms for a token, and attention to each token before it.
FIXED_S, TOKEN_S, PAIR_S = 0.05, 1e-4, 2e-8

LENGTHS = st.integers(1, 200_000)


def dense_s(tokens: float) -> float:
    return FIXED_S + TOKEN_S * tokens + PAIR_S * tokens * tokens / 2


@given(LENGTHS, st.integers(0, 200_000))
def test_new_tokens_attend_to_the_cached_ones(uncached: int, reused: int) -> None:
    pairs = uncached * reused + uncached * uncached / 2
    seconds = after_prefix_s(dense_s, uncached, reused)
    # What is fixed may be counted or not.
    assert TOKEN_S * uncached + PAIR_S * pairs <= seconds * (1 + 1e-9) + 1e-12
    assert seconds <= FIXED_S + TOKEN_S * uncached + PAIR_S * pairs + 1e-9


def test_a_short_turn_of_a_long_conversation() -> None:
    # 1,000 tokens alone take 0.16 s; behind 100,000 of a dense model ten times more than that.
    assert after_prefix_s(dense_s, 1000, 0) == pytest.approx(0.16)
    assert after_prefix_s(dense_s, 1000, 100_000) == pytest.approx(0.1 + 2.0 + 0.01)


@given(st.integers(2, 200_000), st.data())
def test_more_of_a_prompt_in_a_cache_never_takes_longer(num_tokens: int, data: st.DataObject) -> None:
    less, more = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens - 1)] * 2)))
    curve = ServiceCurve()
    for seconds in (dense_s, curve.seconds):
        behind_more = after_prefix_s(seconds, num_tokens - more, more)
        assert behind_more <= after_prefix_s(seconds, num_tokens - less, less) + 1e-9
        assert seconds(num_tokens - more) <= behind_more <= seconds(num_tokens) + 1e-9


@given(LENGTHS, st.integers(0, 200_000))
def test_where_nothing_attends_a_prefix_is_free(uncached: int, reused: int) -> None:
    assert after_prefix_s(lambda tokens: TOKEN_S * tokens, uncached, reused) == pytest.approx(
        TOKEN_S * uncached
    )
