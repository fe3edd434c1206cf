"""The live optimisers at work in a simulation."""

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy
from tests.lab.simulator.invariants import Invariants

from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import TruncatedLogNormal
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate


def test_the_threshold_finds_the_planners(case_study: CaseStudy) -> None:
    """From a threshold that is far off, in some minutes, and it stays there."""
    assert case_study.optimum.threshold_tokens is not None
    scenario = scenario_of(case_study.planned, policy="paper", threshold_tokens=60_000, allocation=False)
    result = simulate(scenario, case_study.poisson(2.0, seed=4), requests=3000)
    assert result.series["threshold_tokens_home"][-1] == pytest.approx(
        case_study.optimum.threshold_tokens, rel=0.1
    )
    assert 1 <= len(result.changes["threshold_changes"]) <= 4


def test_longer_answers_turn_a_prefill_instance_into_a_decoding_one(case_study: CaseStudy) -> None:
    traffic = IndependentTraffic(Poisson(1.8), TruncatedLogNormal(8.0, 0.5, 128, 32_768), fixed(2500.0))
    scenario = scenario_of(case_study.planned, policy="paper")
    result = simulate(scenario, traffic.chunks(np.random.default_rng(2)), requests=4000)
    conversions = result.changes["conversions"]
    assert conversions and all(each["to_role"] == "decode" for each in conversions)
    assert result.series["prefill_instances_home"][-1] < result.series["prefill_instances_home"][0]
    assert not result.summary()["lost"]


def test_without_allocation_roles_stay(case_study: CaseStudy) -> None:
    traffic = IndependentTraffic(Poisson(1.8), TruncatedLogNormal(8.0, 0.5, 128, 32_768), fixed(2500.0))
    scenario = scenario_of(case_study.planned, policy="paper", allocation=False)
    result = simulate(scenario, traffic.chunks(np.random.default_rng(2)), requests=2000)
    assert set(result.series["prefill_instances_home"]) == {3.0}


@pytest.mark.slow("simulates hours of traffic")
def test_a_role_change_drains_first(case_study: CaseStudy) -> None:
    """Answers get longer than 4 + 4 can decode."""
    scenario = scenario_of(case_study.planned, policy="tilted", roles={"home": 4}, threshold_tokens=23_000)
    traffic = IndependentTraffic(Poisson(1.6), case_study.problem.workload.uncached, fixed(2200.0))
    chunks = traffic.chunks(np.random.default_rng(2))
    result = simulate(scenario, chunks, requests=2500, on_event=Invariants())
    (first, *_) = result.changes["conversions"]
    assert first["to_role"] == "decode" and first["drained_s"] > 0
    at = np.searchsorted(result.series["time_s"], first["at_s"] + first["drained_s"])
    counts = result.series["prefill_instances_home"]
    assert counts[at + 1] == 3 and counts.min() >= 1
