import math

import numpy as np
import pytest

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanError, best_operation
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.core.workload.lengths import WorkloadError

from .case_study import H20, LENGTHS, kv_bytes, observed, problem_of


def test_the_papers_deployment_alive_has_the_papers_optimum() -> None:
    point = best_operation(problem_of(), "mean length")
    assert (point.n_prefill, point.n_decode) == (3, 5)
    assert point.threshold_tokens == pytest.approx(19_371, rel=0.005)
    assert point.lambda_max == pytest.approx(3.2589, rel=0.005)
    sampled = best_operation(problem_of(observed(np.random.default_rng(0), 20_000)), "mean length")
    assert sampled.n_prefill == 3 and sampled.lambda_max == pytest.approx(3.2589, rel=0.03)


def clusters(prfaas: int, home: int, away: int) -> list[ClusterFacts]:
    curve = ServiceCurve.of_profile(H20)
    return [
        ClusterFacts("east", "prfaas", prfaas, curve),
        ClusterFacts("home", "pd", home, curve, 20, 0.025),
        ClusterFacts("away", "pd", away, curve, 20, 0.025),
    ]


LINKS = [
    LinkFacts("east", "home", 1e9),
    LinkFacts("east", "away", 0.0),
    LinkFacts("home", "east", 2e9),
    LinkFacts("east", "nowhere", 1e9),
]


def test_what_is_dead_or_carries_nothing_is_left_out() -> None:
    problem = problem_now(clusters(2, 3, 0), LINKS, LENGTHS, 100, kv_bytes)
    assert [cluster.name for cluster in problem.clusters] == ["east", "home"]
    assert [link.name for link in problem.links] == ["east->home", "home->east"]
    alone = problem_now(clusters(0, 3, 1), LINKS, LENGTHS, 100, kv_bytes)
    assert alone.prfaas == () and alone.links == () and len(alone.pd) == 2


def test_lengths_are_uncached_already() -> None:
    problem = problem_now(clusters(2, 3, 1), LINKS, LENGTHS, 100, kv_bytes)
    assert problem.workload.prefix_hit_ratio == 0
    assert all(problem.hit_ratio(cluster) == 0 for cluster in problem.clusters)


def test_without_decode_there_is_no_problem() -> None:
    with pytest.raises(PlanError, match="no PD cluster"):
        problem_now(clusters(2, 0, 0), LINKS, LENGTHS, 100, kv_bytes)
    with pytest.raises(WorkloadError):
        problem_now(clusters(2, 1, 0), LINKS, LENGTHS, math.nan, kv_bytes)


def test_a_problem_does_not_change_under_the_planner() -> None:
    facts = clusters(2, 3, 1)
    problem = problem_now(facts, LINKS, LENGTHS, 100, kv_bytes)
    before = problem.prfaas[0].prefill_s(np.array([5000.0]))
    facts[0].curve.add(5000, 500, 0)
    assert problem.prfaas[0].prefill_s(np.array([5000.0])) == before
    # Clusters with the same curve are equal to the planner.
    assert problem.pd[0].prefill_s == problem.pd[1].prefill_s
