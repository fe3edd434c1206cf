"""What cached prefixes add to prefills in plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prfaas.core.planner.from_deployment import UsualPrefill

RANGE = (100.0, 100_000.0)
TOKEN_S, PAIR_S = 1e-4, 2e-8


def dense_s(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    assert (tokens >= RANGE[0]).all()
    result: NDArray[np.float64] = TOKEN_S * tokens + PAIR_S * tokens**2 / 2
    return result


def usual(uncached: list[float], reused: list[float]) -> UsualPrefill:
    return UsualPrefill.of_prompts(dense_s, np.array(uncached), np.array(reused), RANGE[0])


def test_turns_of_long_conversations_take_what_they_attend_to() -> None:
    seconds = usual([1000.0, 1000.0], [20_000.0, 40_000.0])(np.array([1000.0]))
    each = [TOKEN_S * 1000 + PAIR_S * (1000 * reused + 1000**2 / 2) for reused in (20_000, 40_000)]
    assert seconds == pytest.approx(np.mean(each))


def test_short_and_long_ones_get_what_those_like_them_have() -> None:
    curve = usual([500.0, 32_000.0], [50_000.0, 0.0])
    short_s, long_s = curve(np.array([500.0, 32_000.0]))
    assert short_s == pytest.approx(TOKEN_S * 500 + PAIR_S * (500 * 50_000 + 500**2 / 2))
    assert long_s == pytest.approx(float(dense_s(np.array([32_000.0]))[0]))


@given(
    st.lists(st.tuples(st.floats(1.0, 300_000.0), st.floats(0.0, 300_000.0)), min_size=1, max_size=40),
)
def test_prefixes_never_make_a_prefill_shorter(prompts: list[tuple[float, float]]) -> None:
    """Lengths below the range count as its end."""
    curve = usual([each[0] for each in prompts], [each[1] for each in prompts])
    assert all(ratio >= 1 for ratio in curve.ratios)
    tokens = np.geomspace(*RANGE, 50)
    assert (curve(tokens) >= dense_s(tokens) * (1 - 1e-9)).all()


def test_equal_ones_are_equal() -> None:
    assert usual([1000.0], [500.0]) == usual([1000.0], [500.0])
    assert hash(usual([1000.0], [500.0])) == hash(usual([1000.0], [500.0]))
    assert usual([1000.0], [500.0]) != usual([1000.0], [600.0])
