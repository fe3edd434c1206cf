import heapq
import random
from dataclasses import replace

import numpy as np
import pytest

from prfaas.core.planner import make_plan
from prfaas.core.planner.ttft import (
    PrefillPoolLoad,
    StageWork,
    TtftDistribution,
    decode_queues,
    erlang_c,
    service_ttft,
)

from .problems import paper_problem


def pool(instances: int, *pairs: tuple[float, float], smooth: bool = False) -> PrefillPoolLoad:
    seconds, weights = zip(*pairs, strict=True)
    return PrefillPoolLoad("pool", instances, np.array(seconds), np.array(weights), smooth=smooth)


def test_erlang_c_by_hand() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    # Two servers at 1 Erlang: (1/2! × 2/(2-1)) / (1 + 1 + 1) = 1/3.
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(500, 450.0) < 0.02


def test_decode_slots_by_hand() -> None:
    """Five instances of 20 slots are M/M/100. The cluster decodes half of the requests."""
    problem, work = paper_problem(), StageWork((), {}, {"home": 0.5})
    answer_s, rate = 1024 * 0.025, 6.0
    (queue,) = decode_queues(problem, {"home": 3}, work, rate)
    offered = rate / 2 * answer_s
    assert (queue.part, queue.utilisation) == (0.5, pytest.approx(offered / 100))
    assert queue.wait.chance == pytest.approx(erlang_c(100, offered))
    assert queue.wait.mean_s == pytest.approx(answer_s / (100 - offered))
    (none,) = decode_queues(problem, {"home": 8}, work, rate)
    (full,) = decode_queues(problem, {"home": 3}, work, 2 * 100 / answer_s)
    assert none.utilisation == np.inf and full.utilisation >= 1
    assert decode_queues(problem, {"home": 3}, StageWork((), {}, {"home": 0.0}), rate) == ()


def test_service_times_are_those_of_the_mixture() -> None:
    mean, p90 = service_ttft((pool(1, (1.0, 0.6), (2.0, 0.25)), pool(1, (5.0, 0.15))))
    assert mean == pytest.approx(0.6 + 0.5 + 0.75) and p90 == 5.0
    assert service_ttft((pool(1, (1.0, 0.9), (2.0, 0.1)),))[1] == 1.0


def test_md1_is_exact() -> None:
    """One server, constant service: the mean wait is ρ / (2 (1 − ρ)) × s, as Pollaczek and Khinchine have it."""
    found = TtftDistribution((pool(1, (2.0, 1.0)),), 0.4)
    assert found.mean_s() == pytest.approx(2 + 0.8 / (2 * 0.2) * 2)
    assert found.busiest_utilisation == pytest.approx(0.8)


def simulated(instances: int, seconds: list[float], rate: float, seed: int) -> tuple[float, float]:
    """TTFT mean and P90 of one first-come-first-served pool."""
    draw, now, free, times = random.Random(seed), 0.0, [0.0] * instances, []
    for _ in range(60_000):
        now += draw.expovariate(rate)
        start = max(now, heapq.heappop(free))
        service = draw.choice(seconds)
        heapq.heappush(free, start + service)
        times.append(start + service - now)
    times.sort()
    return sum(times) / len(times), times[int(0.9 * len(times))]


@pytest.mark.parametrize("instances", [1, 3])
def test_close_to_a_simulation(instances: int) -> None:
    seconds = [0.5, 0.7, 1.0, 1.2, 4.0]
    work = sum(seconds) / len(seconds)
    full = instances / work
    found = TtftDistribution((pool(instances, *((each, 0.2) for each in seconds)),), 0.8 * full)
    mean, p90 = simulated(instances, seconds, 0.8 * full, seed=3)
    assert found.mean_s() == pytest.approx(mean, rel=0.1)
    assert found.quantile_s(0.9) == pytest.approx(p90, rel=0.12)


@pytest.mark.parametrize(
    ("load", "mean_s", "p90_s"), [(0.8, 3.52, 6.48), (0.9, 5.83, 11.41), (0.95, 12.1, 25.8)]
)
def test_close_to_the_simulations_of_the_papers_case(load: float, mean_s: float, p90_s: float) -> None:
    """notes/simulators.md: static threshold, M/G/k pools, simulated."""
    estimate = make_plan(paper_problem(load=load), "mean length").ttft_estimate
    assert estimate.mean_s == pytest.approx(mean_s, rel=0.05)
    assert estimate.p90_s == pytest.approx(p90_s, rel=0.08)


def test_overload_has_no_estimate() -> None:
    """Near Λ_max by the paper's T(E[L]) there is more work than time by E[T(L)]."""
    estimate = make_plan(paper_problem(load=0.99), "mean length").ttft_estimate
    assert estimate.mean_s is None and estimate.p90_s is None and estimate.busiest_utilisation > 1


def test_nobody_to_prefill_has_no_estimate() -> None:
    assert not TtftDistribution((pool(0, (1.0, 1.0)),), 0.5).is_finite


def test_waiting_grows_with_load() -> None:
    waits = [make_plan(replace(paper_problem(), load=load)).ttft_estimate.mean_s for load in (0.1, 0.5, 0.9)]
    assert None not in waits and waits == sorted(waits)  # type: ignore[type-var]
    assert waits[0] == pytest.approx(make_plan(paper_problem()).optimum.ttft_mean_s, rel=0.01)
