"""A problem of several clusters is solved again where something is new, and only there."""

from unittest.mock import patch

import numpy as np
import pytest

from prfaas.core.planner import PlanProblem
from prfaas.core.scheduling import threshold as threshold_module
from prfaas.core.scheduling.known_problem import KnownProblem
from prfaas.core.scheduling.threshold import ThresholdOptimiser

from .case_study import observed
from .test_threshold import two_homes

ROLES = {"home": 3, "away": 3}


def sampled(seed: int, count: int, factor: float = 1.0, narrow: float = 100e9) -> PlanProblem:
    return two_homes(observed(np.random.default_rng(seed), count, factor), narrow=narrow)


@pytest.mark.parametrize("count", [100, 1000, 10_000])
def test_another_sample_of_the_same_traffic_is_seldom_new(count: int) -> None:
    new = 0
    for seed in range(60):
        known = KnownProblem()
        assert known.is_new(sampled(2 * seed, count), None, count)
        new += known.is_new(sampled(2 * seed + 1, count), None, count)
    # Three in sixty by the statistic's own word.
    assert new <= 8


def test_other_traffic_links_roles_and_answers_are_new() -> None:
    known = KnownProblem()
    assert known.is_new(sampled(1, 4000), "key", 4000)
    assert not known.is_new(sampled(1, 4000), "key", 4000)
    assert known.is_new(sampled(1, 4000), "other key", 4000)
    assert known.is_new(sampled(1, 4000, factor=1.3), "other key", 4000)
    assert known.is_new(sampled(1, 4000, factor=1.3, narrow=50e9), "other key", 4000)
    assert not known.is_new(sampled(1, 4000, factor=1.3, narrow=50.1e9), "other key", 4000)
    # Without a link the problem has fewer numbers.
    assert known.is_new(sampled(1, 4000, factor=1.3, narrow=0.0), "other key", 4000)


def test_a_slow_drift_is_seen_once_it_is_large() -> None:
    """Each step is far below what chance does: only what was solved for counts."""
    known = KnownProblem()
    drift = (sampled(1, 3000, factor=1 + step / 100) for step in range(41))
    solved = [step for step, problem in enumerate(drift) if known.is_new(problem, None, 3000)]
    assert solved[0] == 0 and 3 <= len(solved) <= 12
    assert solved[-1] >= 30


def test_a_periodic_search_without_news_solves_nothing() -> None:
    optimiser = ThresholdOptimiser()
    with patch.object(threshold_module, "prefill_sides", wraps=threshold_module.prefill_sides) as solves:
        found = optimiser.propose(sampled(1, 3000), ROLES, {}, sample_count=3000, reason="start")
        assert found is not None
        tokens = dict(found.tokens)
        for seed in range(2, 12):
            optimiser.propose(sampled(seed, 3000), ROLES, tokens, sample_count=3000)
        # That of the start, and one since there are thresholds; by chance another.
        assert solves.call_count <= 3
        before = solves.call_count
        optimiser.propose(sampled(12, 3000), ROLES, tokens, sample_count=3000, reason="link")
        assert solves.call_count == before + 1
        optimiser.propose(sampled(13, 3000, factor=1.5), ROLES, tokens, sample_count=3000)
        assert solves.call_count == before + 2
