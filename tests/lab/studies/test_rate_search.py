"""The search for the largest rate that is carried."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies._rate_search import LARGEST_RPS, STEP, RateSearch, hidden_overload, largest_factor
from studies._runs import Run
from studies._traffic import SharedPrefixes

from prfaas.lab.studies import StudyContext


@given(st.floats(0.25, 1.9))
def test_the_step_is_found_wherever_it_is(limit: float) -> None:
    asked: list[float] = []

    def grows_at(factor: float) -> bool:
        asked.append(factor)
        return factor > limit

    found = largest_factor(grows_at)
    assert found is not None and abs(found - limit) <= STEP
    assert len(asked) <= 15 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("grows", [True, False])
def test_what_always_says_the_same_has_no_largest_rate(grows: bool) -> None:
    assert largest_factor(lambda _: grows) is None


@pytest.mark.slow("simulates the cases of a study")
def test_a_better_guess_does_not_change_the_rate(context: StudyContext) -> None:
    run = Run((1,), context.planned, context.poisson(0.5), 2_000, 5)
    rates = [
        RateSearch(run, factor * context.lambda_max).outcome().number(LARGEST_RPS) for factor in (0.8, 1.0)
    ]
    slack = hidden_overload(run.requests)
    assert rates[0] == pytest.approx(rates[1], rel=0.03)
    assert 0.8 * context.lambda_max < rates[1] < (1 + 2 * slack) * context.lambda_max


def test_only_independent_requests_can_be_searched(context: StudyContext) -> None:
    run = Run((1,), context.planned, SharedPrefixes(context.poisson(0.5), 0.5, 2), 50, 5)
    with pytest.raises(TypeError, match="not with SharedPrefixes"):
        RateSearch(replace(run), 1.0).outcome()


def test_what_overload_stays_hidden() -> None:
    # 0.6 × 0.9 × 20,000 = 10,800 arrivals between the fifths: 2 / √10,800.
    assert hidden_overload(20_000) == pytest.approx(0.01925, rel=1e-3)
    assert hidden_overload(10**7) == 0.01
