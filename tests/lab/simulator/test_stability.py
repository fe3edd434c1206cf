"""When queues are said to grow."""

import numpy as np
import pytest

from prfaas.core.workload.arrivals import Mmpp, Phase, Poisson
from prfaas.lab.simulator.result import dispersion, is_stable


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
