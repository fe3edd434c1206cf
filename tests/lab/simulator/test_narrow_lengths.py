"""Prompts of one length, or almost: what carries the load with a fixed threshold carries it with a searched one."""

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy

from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import LengthDistribution, Uniform
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate

NARROW = {
    "one": fixed(27_000),
    "almost one": Uniform(26_800, 27_200),
    "no less than one": Uniform(27_000, 27_001),
}


def run(case_study: CaseStudy, policy: str, lengths: LengthDistribution, **options: object) -> Result:
    traffic = IndependentTraffic(Poisson(3.0), lengths, fixed(200.0))
    scenario = scenario_of(case_study.planned, policy=policy, roles={"home": 3}, allocation=False, **options)
    return simulate(scenario, traffic.chunks(np.random.default_rng(3)), requests=4000)


@pytest.mark.parametrize("policy", ["paper", "tilted"])
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("first", [19_400.0, 0.0, 1e6])
def test_a_searched_threshold_divides_them(
    case_study: CaseStudy, policy: str, name: str, first: float
) -> None:
    found = run(case_study, policy, NARROW[name], threshold_tokens=first)
    assert found.summary()["ttft_mean_s"] < 6
    assert 26_000 < found.series["threshold_tokens_home"][-1] < 28_000


@pytest.mark.parametrize("threshold", [0.0, float("inf")])
def test_tilted_leaves_a_threshold_that_is_none(case_study: CaseStudy, threshold: float) -> None:
    found = run(case_study, "tilted", fixed(27_000), threshold_tokens=threshold, adapts=False)
    assert found.summary()["ttft_mean_s"] < 6
