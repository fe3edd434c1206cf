import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prfaas.core.workload.arrivals import Arrivals, Diurnal, Mmpp, Phase, Poisson
from prfaas.core.workload.lengths import WorkloadError

MMPP = Mmpp((Phase(2, 60), Phase(20, 5), Phase(0, 10)))
PROCESSES: list[Arrivals] = [Poisson(5), MMPP, Diurnal(5, 0.9, 600), Diurnal(5, 1.0, 600, phase=0.75)]
seeds = st.integers(0, 2**32)


def first(process: Arrivals, seed: int, count: int) -> NDArray[np.float64]:
    pieces, got = [], 0
    for times in process.chunks(np.random.default_rng(seed)):
        pieces.append(times)
        got += len(times)
        if got >= count:
            break
    return np.concatenate(pieces)[:count]


rates = st.floats(1e-3, 1e3)
# Phases in which hardly anything arrives would need millions of dwells for 20,000 arrivals.
busy = st.floats(0.1, 1e3)
phases = st.lists(st.builds(Phase, st.just(0.0) | busy, st.floats(1.0, 1e3)), min_size=2, max_size=4)
processes = st.one_of(
    st.builds(Poisson, rates),
    st.builds(Diurnal, rates, st.floats(0, 1), st.floats(1e-2, 1e5), st.floats(0, 1)),
    phases.filter(lambda given: any(phase.rate_per_s for phase in given)).map(
        lambda given: Mmpp(tuple(given))
    ),
)


@settings(max_examples=50, deadline=None)
@given(processes, seeds)
def test_times_ascend_and_a_seed_repeats_them(process: Arrivals, seed: int) -> None:
    times = first(process, seed, 20_000)
    assert len(times) == 20_000 and times[0] >= 0 and np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
    assert np.array_equal(times, first(process, seed, 20_000))


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_another_seed_is_independent(process: Arrivals) -> None:
    """Counts per second of two seeds don't correlate, beyond what the common sine of a diurnal rate makes."""
    counts = []
    for seed in range(6):
        times = first(process, seed, 30_000)
        counted = np.bincount(times.astype(int), minlength=3000)[:3000].astype(float)
        if isinstance(process, Diurnal):
            at = np.arange(3000) + 0.5
            counted -= process.rate_per_s * (
                1 + process.swing * np.sin(2 * np.pi * (at / process.period_s + process.phase))
            )
        counts.append(counted)
    for one, other in pairwise(counts):
        # 3000 pairs that are independent correlate by 0.018; bursts make neighbours alike, so fewer are.
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.25


def test_nothing_is_common_to_two_seeds() -> None:
    """Equal phases make a Poisson process, whose times would betray a part that is always drawn alike."""
    for process in (Mmpp((Phase(3, 10), Phase(3, 20))), Diurnal(3, 0), Poisson(3)):
        one, other = first(process, 1, 5000), first(process, 2, 5000)
        assert np.intersect1d(np.round(one, 6), np.round(other, 6)).size < 50


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_the_mean_rate_is_what_it_says(process: Arrivals) -> None:
    end_s = 60_000.0
    counts = []
    for seed in range(8):
        times = first(process, seed, int(process.mean_per_s * end_s * 1.5))
        assert times[-1] > end_s
        counts.append(float(np.searchsorted(times, end_s)) / end_s)
    assert np.mean(counts) == pytest.approx(process.mean_per_s, rel=0.02)


def test_gaps_of_poisson_arrivals_are_exponential() -> None:
    gaps = np.diff(first(Poisson(4), 3, 100_000))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.02)
    for level in (0.1, 0.5, 1.0):
        assert (gaps > level).mean() == pytest.approx(math.exp(-4 * level), abs=0.005)


def test_phases_have_their_rates_and_times() -> None:
    """Two phases a factor of 100 apart: gaps tell them apart, and bursts are as long as they should be."""
    process = Mmpp((Phase(0.5, 100), Phase(50, 10)))
    times = first(process, 5, 400_000)
    per_s = np.bincount(times.astype(int))
    busy = per_s > 15
    share = busy.mean()
    assert share == pytest.approx(10 / 110, rel=0.1)
    assert per_s[busy].mean() == pytest.approx(50, rel=0.05)
    assert per_s[~busy].mean() == pytest.approx(0.5, rel=0.35)
    bursts = (np.diff(busy.astype(int)) == 1).sum()
    assert busy.sum() / bursts == pytest.approx(10, rel=0.1)
    # Far burstier than a Poisson process of the same rate.
    assert per_s.var() / per_s.mean() > 10


def test_a_process_of_phases_is_stationary_from_the_beginning() -> None:
    process = Mmpp((Phase(0, 1000), Phase(10, 1000)))
    early = [float(np.searchsorted(first(process, seed, 10_000), 100.0)) for seed in range(300)]
    assert np.mean(early) == pytest.approx(500, rel=0.2)


def test_the_rate_follows_the_sine() -> None:
    process = Diurnal(20, 0.8, period_s=1000)
    times = first(process, 2, 200_000)
    quarters = np.bincount((times % 1000 // 250).astype(int))
    rising = 250 * 20 * (1 + 0.8 * 2 / np.pi) * times[-1] / 1000
    assert quarters[0] == pytest.approx(rising, rel=0.03)
    assert quarters[1] == pytest.approx(rising, rel=0.03)
    assert quarters[3] == pytest.approx(250 * 20 * (1 - 0.8 * 2 / np.pi) * times[-1] / 1000, rel=0.05)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Poisson(0), "rate of arrivals must be above 0"),
        (lambda: Poisson(math.nan), "above 0"),
        (lambda: Mmpp((Phase(1, 1),)), "at least two phases"),
        (lambda: Mmpp((Phase(0, 1), Phase(0, 1))), "a rate above 0"),
        (lambda: Phase(-1, 1), "0 or more per second"),
        (lambda: Phase(1, 0), "mean time must be above 0"),
        (lambda: Diurnal(1, 1.5), "swing"),
        (lambda: Diurnal(1, 0.5, 0), "period"),
        (lambda: Diurnal(1, 0.5, 10, math.inf), "number of periods"),
    ],
)
def test_what_no_process_can_be(make: object, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        make()  # type: ignore[operator]
