"""What the order of waiting prefills does to short and to long prompts."""

import numpy as np
import pytest
from studies._traffic import bursts

from prfaas.core.deployment import load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate

REQUESTS = 8_000
LONG_TOKENS = 100 * 1024


def ttft_s(policy: str, **params: float) -> tuple[float, float]:
    """The mean, and the P99 of prompts over 100K, of the same bursts."""
    planned = load_planned("examples/paper.yaml")
    problem = problem_of(planned)
    arrivals = bursts(0.8 * best_operation(problem).lambda_max, 2.2)
    traffic = IndependentTraffic(arrivals, problem.workload.uncached, fixed(1024))
    scenario = scenario_of(planned, policy=policy, params=params, adapts=False, allocation=False)
    result = simulate(scenario, traffic.chunks(np.random.default_rng(1)), seed=1, requests=REQUESTS)
    long = result.input_tokens > LONG_TOKENS
    return float(result.ttft_s.mean()), float(np.quantile(result.ttft_s[long], 0.99))


def test_short_prompts_gain_in_bursts_and_long_ones_lose_little() -> None:
    mean_s, long_s = ttft_s("paper")
    ours_s, ours_long_s = ttft_s("tilted")
    assert ours_s < 0.85 * mean_s
    assert ours_long_s < 1.4 * long_s


@pytest.mark.slow("simulates hours of traffic")
def test_fairness_trades_the_mean_against_long_prompts() -> None:
    means_s, longs_s = zip(*(ttft_s("tilted", fairness=each) for each in (0.1, 0.5, 1.0)), strict=True)
    assert list(means_s) == sorted(means_s)
    assert list(longs_s) == sorted(longs_s, reverse=True)
