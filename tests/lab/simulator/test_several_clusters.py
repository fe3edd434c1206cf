"""examples/multi.yaml: one decode pool at 95 % beside one at 70 %, so the wait for a slot decides where requests go."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import PlanProblem, best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import LengthDistribution, Uniform
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

MULTI = Path(__file__).parents[3] / "examples" / "multi.yaml"
LOAD, REQUESTS = 0.85, 6_000
ANSWERS = Uniform(24, 2024)


@pytest.fixture(scope="module")
def planned() -> PlannedDeployment:
    return load_planned(MULTI)


@pytest.fixture(scope="module")
def problem(planned: PlannedDeployment) -> PlanProblem:
    return problem_of(planned)


def simulated(scenario: Scenario, problem: PlanProblem, answers: LengthDistribution | None = None) -> Result:
    rate_per_s = LOAD * best_operation(problem).lambda_max
    lengths = problem.workload.uncached
    answers = answers or fixed(problem.workload.output_tokens)
    traffic = IndependentTraffic(Poisson(rate_per_s), lengths, answers)
    return simulate(scenario, traffic.chunks(np.random.default_rng(1)), seed=1, requests=REQUESTS)


@pytest.mark.slow("simulates hours of traffic")
@pytest.mark.parametrize("policy", ["paper", "tilted", "static_threshold", "least_ttft"])
def test_the_full_decode_pool_gets_what_it_can_take(
    planned: PlannedDeployment, problem: PlanProblem, policy: str
) -> None:
    """With the wait for a slot as a yes or no the means were 12 to 19 s, and grew with the length of the run."""
    result = simulated(scenario_of(planned, policy=policy, adapts=False, allocation=False), problem)
    ttft_s = result.ttft_s[result.counted]
    assert ttft_s.mean() < 5.0
    assert np.quantile(ttft_s, 0.9) < 10.0


@pytest.fixture(scope="module")
def right_mean_s(planned: PlannedDeployment, problem: PlanProblem) -> float:
    """TTFT where the deployment file says how long answers are."""
    scenario = scenario_of(planned, policy="paper", adapts=False, allocation=False)
    result = simulated(scenario, problem, ANSWERS)
    return float(result.ttft_s[result.counted].mean())


@pytest.mark.slow("simulates hours of traffic")
@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_time_of_a_slot_is_learnt_from_the_answers(
    planned: PlannedDeployment, problem: PlanProblem, right_mean_s: float, factor: float
) -> None:
    """Answers of 24 to 2,024 tokens, where the deployment file says a fifth or five times as many."""
    scenario = scenario_of(planned, policy="paper", adapts=False, allocation=False)
    misled = simulated(replace(scenario, output_tokens=factor * scenario.output_tokens), problem, ANSWERS)
    assert right_mean_s < 6.0
    assert misled.ttft_s[misled.counted].mean() == pytest.approx(right_mean_s, rel=0.15)
