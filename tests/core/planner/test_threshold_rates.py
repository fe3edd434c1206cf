"""One search knows the rates with all thresholds: they are those that each threshold has alone."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.planner import PlanProblem, ServiceModel
from prfaas.core.planner.threshold_rates import ThresholdRates
from prfaas.core.planner.two_clusters import rate_at

from .oracle import TwoClusters
from .problems import continuous, two_clusters

Case = tuple[PlanProblem, Callable[[list[tuple[float, float]]], TwoClusters]]


def found(problem: PlanProblem, by_length: bool) -> tuple[ThresholdRates, Callable[[float], float]]:
    """The search, and the rates of thresholds alone."""
    service: ServiceModel = "by length" if by_length else "mean length"
    return ThresholdRates.of(problem, 1, service), lambda tokens: rate_at(problem, tokens, 1, service)


@settings(deadline=None, max_examples=200)
@given(two_clusters(), st.lists(st.floats(0, 1e5) | st.just(math.inf), min_size=1, max_size=4), st.booleans())
def test_the_rate_of_any_threshold_is_what_it_has_alone(
    case: Case, thresholds: list[float], by_length: bool
) -> None:
    problem, _ = case
    rates, alone = found(problem, by_length)
    atoms = problem.workload.lengths.atoms()
    assert atoms is not None
    # At the atoms themselves a threshold takes another side.
    for tokens in [*thresholds, rates.best_threshold(), *(atoms * rates.split.own_share).tolist()]:
        assert rates.rate(tokens) == pytest.approx(alone(tokens), rel=1e-9)


@settings(deadline=None, max_examples=5)
@given(two_clusters(continuous), st.floats(0, 1e5), st.booleans())
def test_so_it_is_where_lengths_have_no_atoms(case: Case, tokens: float, by_length: bool) -> None:
    problem, _ = case
    rates, alone = found(problem, by_length)
    assert rates.rate(tokens) == alone(tokens)
    best = rates.best_tokens()
    if best is not None:
        assert rates.rate(best) >= rates.rate(tokens) * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(two_clusters(), st.booleans())
def test_no_threshold_has_a_higher_rate(case: Case, by_length: bool) -> None:
    problem, _ = case
    rates, _ = found(problem, by_length)
    best = rates.rate(rates.best_threshold())
    assert rates.rates is not None and best == pytest.approx(float(np.max(rates.rates)), rel=1e-9)
