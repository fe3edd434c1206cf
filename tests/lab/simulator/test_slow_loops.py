"""The live optimisers at work in a simulation."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy
from tests.lab.simulator.invariants import Invariants

from prfaas.core.planner.role_latency import QueueingModel, latency_with_roles
from prfaas.core.planner.two_clusters import best_threshold
from prfaas.core.scheduling.forecast import SeenTraffic, TrafficMeans
from prfaas.core.workload import TruncatedLogNormal, fixed
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.traffic import IndependentTraffic
from prfaas.lab.simulator import scenario_of, simulate


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


# The tolerance is for 5,000 requests and for what the formula leaves out: links, and waits that policies balance.
@pytest.mark.slow("simulates hours of traffic")
@pytest.mark.parametrize(
    ("policy", "is_shortest_first", "tolerance"), [("static_threshold", False, 0.15), ("tilted", True, 0.2)]
)
@pytest.mark.parametrize(("prefill", "load"), [(3, 0.7), (4, 0.8), (3, 0.88), (4, 0.88)])
def test_the_predicted_ttft_is_the_simulated(
    case_study: CaseStudy, policy: str, is_shortest_first: bool, tolerance: float, prefill: int, load: float
) -> None:
    rate = load * case_study.optimum.lambda_max
    scenario = scenario_of(
        case_study.planned,
        policy=policy,
        roles={"home": prefill},
        threshold_tokens=best_threshold(case_study.problem, prefill).threshold_tokens,
        adapts=False,
        allocation=False,
    )
    times = [
        simulate(scenario, case_study.poisson(rate, seed), requests=5000).summary()["ttft_mean_s"]
        for seed in (1, 2, 3)
    ]
    queues = QueueingModel(is_shortest_first, answer_variation=0.0)
    predicted = latency_with_roles(case_study.problem, {"home": prefill}, rate, queues).ttft_s
    assert predicted == pytest.approx(sum(times) / 3, rel=tolerance)


@dataclass(frozen=True)
class Evening:
    """Twice as long answers are foreseen, which never come."""

    def learn(self, seen: SeenTraffic, requests: float) -> None:
        pass

    def ahead(self, seen: SeenTraffic, at_s: float) -> TrafficMeans:
        return replace(seen.means, output_tokens=2.2 * seen.means.output_tokens)


def test_roles_move_for_what_is_foreseen(case_study: CaseStudy) -> None:
    """From 4 + 4 to decode, at a load that 4 + 4 carries; who only reacts stays."""
    moved = {}
    for foresight in (None, Evening()):
        scenario = scenario_of(
            case_study.planned,
            policy="tilted",
            roles={"home": 4},
            threshold_tokens=23_000,
            foresight=foresight,
        )
        result = simulate(scenario, case_study.poisson(1.6, seed=2), requests=2500)
        moved[foresight is None] = [each["to_role"] for each in result.changes["conversions"]]
        assert not result.summary()["lost"]
    assert moved[False] and set(moved[False]) == {"decode"}
    assert not moved[True]
    reason = result.changes["conversions"][0]["reason"]
    assert "(forecast)" in reason and "mean TTFT" in reason


@pytest.mark.slow("simulates hours of traffic")
def test_a_role_change_drains_first(case_study: CaseStudy) -> None:
    scenario = scenario_of(
        case_study.planned, policy="tilted", roles={"home": 4}, threshold_tokens=23_000, foresight=Evening()
    )
    result = simulate(scenario, case_study.poisson(1.6, seed=2), requests=2500, on_event=Invariants())
    (first, *_) = result.changes["conversions"]
    assert first["drained_s"] > 0
    at = np.searchsorted(result.series["time_s"], first["at_s"] + first["drained_s"])
    counts = result.series["prefill_instances_home"]
    assert counts[at + 1] == 3 and counts.min() >= 1
