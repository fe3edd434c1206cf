"""When queues are said to grow."""

import numpy as np
import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of

from prfaas.core.workload.arrivals import Mmpp, Phase, Poisson
from prfaas.lab.simulator.result import dispersion, is_stable, stability
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate


def arrivals_of(process: Poisson | Mmpp, count: int, seed: int) -> np.ndarray:
    times: list[np.ndarray] = []
    for chunk in process.chunks(np.random.default_rng(seed)):
        times.append(chunk)
        if sum(map(len, times)) >= count:
            return np.concatenate(times)[:count]
    raise AssertionError


def left_of(arrived_s: np.ndarray, service_s: float) -> np.ndarray:
    """One server, every service alike."""
    free_s, left = 0.0, []
    for at_s in arrived_s.tolist():
        free_s = max(free_s, at_s) + service_s
        left.append(free_s)
    return np.array(left)


@pytest.mark.parametrize(
    ("load", "stable"), [(0.5, True), (0.9, True), (0.98, True), (1.03, False), (1.5, False)]
)
def test_one_server(load: float, stable: bool) -> None:
    for seed in range(5):
        arrived_s = arrivals_of(Poisson(1.0), 30_000, seed)
        end_s = float(arrived_s[-1])
        assert is_stable(arrived_s, left_of(arrived_s, load), 0.1 * end_s, end_s) is stable


@pytest.mark.parametrize(("load", "stable"), [(0.8, True), (1.2, False)])
def test_bursts_are_no_growth(load: float, stable: bool) -> None:
    bursts = Mmpp((Phase(0.5, 60.0), Phase(3.0, 15.0)))
    for seed in range(5):
        arrived_s = arrivals_of(bursts, 30_000, seed)
        end_s = float(arrived_s[-1])
        assert (
            is_stable(arrived_s, left_of(arrived_s, load / bursts.mean_per_s), 0.1 * end_s, end_s) is stable
        )
        assert dispersion(arrived_s, 0.0, end_s) > 10


def test_what_never_ends_is_a_backlog() -> None:
    arrived_s = np.arange(1000.0)
    left_s = np.where(arrived_s < 500, arrived_s + 1, np.nan)
    assert not is_stable(arrived_s, left_s, 0.0, 1000.0)
    assert is_stable(arrived_s, arrived_s + 1, 0.0, 1000.0)


def test_a_run_of_a_few_answers_says_nothing() -> None:
    arrived_s = np.arange(0.0, 1000.0, 0.5)
    left_s = arrived_s + 1
    assert stability(arrived_s, left_s, 100.0, 1000.0, 150.0) is True
    assert stability(arrived_s, left_s, 100.0, 1000.0, 200.0) is None
    # Nor does one that grows for a while.
    assert stability(arrived_s, 3 * arrived_s, 100.0, 1000.0, 150.0) is False
    assert stability(arrived_s, 3 * arrived_s, 100.0, 1000.0, 200.0) is None


def verdicts_of(load: float, count: int, seeds: int) -> list[bool | None]:
    found = []
    for seed in range(seeds):
        arrived_s = arrivals_of(Poisson(1.0), count, seed)
        end_s = float(arrived_s[-1])
        found.append(stability(arrived_s, left_of(arrived_s, load), 0.1 * end_s, end_s, load))
    return found


@pytest.mark.parametrize("count", [2_000, 4_000, 20_000])
def test_a_small_overload_is_not_called_stable(count: int) -> None:
    assert verdicts_of(1.018, count, seeds=20).count(True) <= 1


def test_what_keeps_up_is_called_stable_when_it_can_be_known() -> None:
    assert verdicts_of(0.8, 2_000, seeds=20).count(True) >= 18
    assert verdicts_of(0.9, 4_000, seeds=20).count(True) >= 18
    assert False not in verdicts_of(0.97, 4_000, seeds=20)


def test_few_requests_show_only_what_is_far_from_the_limit() -> None:
    assert {False} <= set(verdicts_of(1.5, 120, seeds=5)) <= {False, None}
    assert False not in verdicts_of(0.5, 120, seeds=5)
    assert verdicts_of(1.1, 120, seeds=40).count(True) <= 2


def test_a_short_run_at_half_the_capacity_is_too_short_to_say(case_study: CaseStudy) -> None:
    """It was called unstable: the deployment was still filling when the backlog was measured first."""
    scenario = scenario_of(case_study.planned, policy="paper")
    rate_per_s = 0.5 * case_study.optimum.lambda_max
    short = simulate(scenario, case_study.poisson(rate_per_s, seed=1), requests=200)
    assert short.summary()["stable"] is None
    long = simulate(scenario, case_study.poisson(rate_per_s, seed=1), requests=4_000)
    assert long.summary()["stable"] is True


def test_warm_up_lasts_some_answers_but_no_more_than_half_of_the_run(case_study: CaseStudy) -> None:
    scenario = scenario_of(case_study.planned, policy="local_only")
    cluster = scenario.clusters[1]
    assert cluster.decode_step_s is not None
    answer_s = scenario.clusters[1].curve.seconds(1000) + 100 * cluster.decode_step_s(cluster.decode_slots)
    for end_s, start_s in (
        (1000 * answer_s, 100 * answer_s),
        (20 * answer_s, 3 * answer_s),
        (4 * answer_s, 2 * answer_s),
    ):
        arrivals_s = np.linspace(0.0, end_s, 50).tolist()
        result = simulate(scenario, [chunk_of(arrivals_s, [1000] * 50, [100] * 50)])
        assert result.start_s == pytest.approx(start_s)
        assert not result.counted[result.arrival_s < start_s].any()
        assert (
            simulate(scenario, [chunk_of(arrivals_s, [1000] * 50, [100] * 50)], warmup_share=0.0).start_s
            == 0.0
        )
