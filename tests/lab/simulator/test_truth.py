"""What is known without a simulator."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import best_operation, problem_of
from prfaas.lab.simulator.scenario import Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate


def quiet(scenario: Scenario) -> Scenario:
    """Roles and threshold stay, and the links take no time of their own."""
    links = tuple(replace(link, rtt_s=0.0) for link in scenario.links)
    return replace(scenario, adapts=False, allocation=False, links=links)


def first_free(arrivals_s: list[float], services_s: list[float], servers: int) -> list[float]:
    """The closed recursion of a first-come-first-served queue: Kiefer and Wolfowitz 1955."""
    free_s = [0.0] * servers
    ends = []
    for arrival_s, service_s in zip(arrivals_s, services_s, strict=True):
        start_s = max(arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + service_s)
        ends.append(start_s + service_s)
    return ends


@pytest.mark.parametrize(("policy", "cluster", "servers"), [("local_only", 1, 3), ("offload_all", 0, 4)])
def test_one_stage_is_its_closed_recursion(
    case_study: CaseStudy, policy: str, cluster: int, servers: int
) -> None:
    scenario = quiet(scenario_of(case_study.planned, policy=policy))
    rng = np.random.default_rng(7)
    count = 2000
    lengths = rng.integers(128, 131072, count).tolist()
    curve: ServiceCurve = scenario.clusters[cluster].curve
    services_s = [curve.seconds(length) for length in lengths]
    arrivals_s = np.cumsum(rng.exponential(np.mean(services_s) / (0.95 * servers), count)).tolist()
    result = simulate(scenario, [chunk_of(arrivals_s, lengths)], warmup_share=0.0)
    ends_s = np.array(first_free(arrivals_s, services_s, servers))
    came_s = arrivals_s + result.ttft_s
    if policy == "local_only":
        np.testing.assert_allclose(came_s, ends_s, rtol=0, atol=1e-7)
    else:
        # Streamed while it is made: at the end only the linear state is left, which nobody else wants then.
        state_s = 8 * scenario.kv_model.fixed_bytes / 100e9
        assert np.all(came_s >= ends_s + state_s - 1e-7)
        assert np.all(came_s <= ends_s + 2.5 * state_s)


@pytest.mark.slow("a queue's stability shows only after many thousands of requests")
def test_light_load_is_table_6(case_study: CaseStudy) -> None:
    """TTFT of PrfaaS-PD and of the naive deployment (arXiv 2604.15039, Table 6) within 1 %: service, and the transfer's
    tail, with 10,000 prompts at the middles of equal parts of the distribution in place of chance."""
    count = 10_000
    lengths = [round(case_study.lengths.quantile((k + 0.5) / count)) for k in range(count)]
    order = np.random.default_rng(3).permutation(count)
    chunk = chunk_of([30.0 * k for k in range(count)], np.array(lengths)[order].tolist(), blocks=[[]] * count)
    for policy, mean_s, p90_s in (("static_threshold", 2.22, 3.51), ("offload_all", 1.74, 3.51)):
        scenario = scenario_of(case_study.planned, policy=policy, adapts=False, allocation=False)
        found = simulate(scenario, [chunk], warmup_share=0.0).summary()
        assert found["ttft_mean_s"] == pytest.approx(mean_s, rel=0.01)
        assert found["ttft_p90_s"] == pytest.approx(p90_s, rel=0.01)
        assert found["stable"]


def test_the_homogeneous_deployment_is_table_6(case_study: CaseStudy) -> None:
    """12 instances of the PD cluster's kind, 9 of which prefill: 4.44 s and 9.73 s within 1 %."""
    count = 10_000
    lengths = [round(case_study.lengths.quantile((k + 0.5) / count)) for k in range(count)]
    chunk = chunk_of([30.0 * k for k in range(count)], lengths, blocks=[[]] * count)
    scenario = quiet(scenario_of(case_study.planned, policy="local_only"))
    homogeneous = replace(scenario.clusters[1], instances=12, prefill_instances=9)
    alone = replace(scenario, clusters=(homogeneous,), links=())
    found = simulate(alone, [chunk], warmup_share=0.0).summary()
    assert found["ttft_mean_s"] == pytest.approx(4.44, rel=0.01)
    assert found["ttft_p90_s"] == pytest.approx(9.73, rel=0.01)


@pytest.mark.slow("a queue's stability shows only after many thousands of requests")
def test_the_largest_stable_rate_is_the_planners(case_study: CaseStudy) -> None:
    """What `stable` says on both sides of Λ_max by E[T(L)], which is what long queues see: within 2 to 3 %."""
    by_length = best_operation(case_study.problem, "by length")
    assert by_length.threshold_tokens is not None
    scenario = quiet(
        scenario_of(
            case_study.planned, policy="static_threshold", threshold_tokens=by_length.threshold_tokens
        )
    )
    for share, stable in ((0.97, True), (1.02, False)):
        found = simulate(scenario, case_study.poisson(share * by_length.lambda_max, seed=5), requests=60_000)
        assert found.summary()["stable"] is stable, share


@pytest.mark.parametrize("policy", ["paper", "tilted"])
def test_a_plan_without_prefill_at_home_is_simulated_as_it_is(case_study: CaseStudy, policy: str) -> None:
    """With one of home's four instances for prefill, decode would carry three quarters of what is planned."""
    east, home = case_study.planned.clusters
    sizes = replace(east, instance_count=12), replace(home, instance_count=4)
    planned = replace(case_study.planned, clusters=sizes)
    point = best_operation(problem_of(planned))
    assert (point.n_prefill, point.n_decode) == (0, 4)
    scenario = scenario_of(planned, policy=policy)
    found = simulate(scenario, case_study.poisson(0.9 * point.lambda_max, seed=5), requests=6000)
    assert found.summary()["stable"]


@pytest.mark.parametrize("policy", ["paper", "tilted"])
def test_same_seed_same_bytes(case_study: CaseStudy, policy: str) -> None:
    scenario = scenario_of(case_study.planned, policy=policy)
    runs = [simulate(scenario, case_study.poisson(3.0, seed=9), seed=9, requests=3000) for _ in range(2)]
    assert runs[0].ttft_s.tobytes() == runs[1].ttft_s.tobytes()
    assert runs[0].e2e_s.tobytes() == runs[1].e2e_s.tobytes()
    assert runs[0].summary() == runs[1].summary()
