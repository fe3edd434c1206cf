"""Bandwidths over time."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest

from prfaas.lab.simulator.capacity import (
    CapacityProcess,
    Constant,
    Fluctuating,
    Piece,
    Steps,
)


def drawn(process: CapacityProcess, count: int, seed: int = 1) -> list[Piece]:
    return list(islice(process.changes(np.random.default_rng(seed)), count))


@pytest.mark.parametrize(
    "process",
    [
        Constant(5.0),
        Steps(((0.0, 1.0), (60.0, 0.0))),
        Fluctuating(5.0, 0.3, 20.0, step_s=0.1),
    ],
)
def test_pieces_begin_at_0_rise_and_repeat_with_the_seed(process: CapacityProcess) -> None:
    pieces = drawn(process, 3000)
    assert pieces[0][0] == 0.0
    assert all(before_s < after_s for (before_s, _), (after_s, _) in pairwise(pieces))
    assert all(bits_per_s >= 0 for _, bits_per_s in pieces)
    assert pieces == drawn(process, 3000)


def test_a_constant_and_steps_are_what_was_written() -> None:
    assert drawn(Constant(5.0), 9) == [(0.0, 5.0)]
    assert drawn(Steps(((0.0, 1.0), (60.0, 0.0))), 9) == [(0.0, 1.0), (60.0, 0.0)]


def test_fluctuations_have_their_mean_deviation_and_correlation() -> None:
    process = Fluctuating(100.0, 0.2, 5.0, step_s=0.5)
    values = np.array([bits_per_s for _, bits_per_s in drawn(process, 200_000)])
    assert values.mean() == pytest.approx(100.0, rel=0.01)
    assert values.std() == pytest.approx(20.0, rel=0.03)
    after = values[10:]  # 5 s later
    assert np.corrcoef(values[:-10], after)[0, 1] == pytest.approx(math.exp(-1), abs=0.03)


def test_the_first_value_is_as_spread_as_all_others() -> None:
    process = Fluctuating(100.0, 0.2, 1e6)
    first = np.array([drawn(process, 1, seed)[0][1] for seed in range(800)])
    assert first.std() == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize(
    ("relative_sd", "least_share", "raise_"), [(0.3, 0.05, 6e-5), (0.5, 0.05, 0.0055), (0.8, 0.1, 0.06)]
)
def test_clipping_raises_the_mean(relative_sd: float, least_share: float, raise_: float) -> None:
    """By E[max(least, 1 + sd Z)] − 1, Z standard normal: the docstring names two of these."""
    edge = (least_share - 1) / relative_sd
    below = 0.5 * math.erfc(-edge / math.sqrt(2))
    density = math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi)
    exact = least_share * below + (1 - below) + relative_sd * density
    assert exact - 1 == pytest.approx(raise_, rel=0.2)
    process = Fluctuating(100.0, relative_sd, 1.0, least_share=least_share)
    values = np.array([bits_per_s for _, bits_per_s in drawn(process, 200_000)])
    assert values.min() >= 100.0 * least_share
    assert values.mean() == pytest.approx(100.0 * exact, rel=0.01)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Constant(0.0), "capacity is more than 0"),
        (lambda: Constant(math.inf), "finite"),
        (lambda: Steps(()), "from 0 s on"),
        (lambda: Steps(((1.0, 5.0),)), "from 0 s on"),
        (lambda: Steps(((0.0, 5.0), (2.0, 1.0), (2.0, 3.0))), "2 s comes after 2 s"),
        (lambda: Steps(((0.0, -5.0),)), "0 bit/s or more"),
        (lambda: Steps(((0.0, 5.0), (math.nan, 5.0))), "not 5 from nan s on"),
        (lambda: Fluctuating(0.0, 0.1, 1.0), "mean capacity"),
        (lambda: Fluctuating(1.0, -0.1, 1.0), "relative deviation"),
        (lambda: Fluctuating(1.0, 0.1, 0.0), "correlation time"),
        (lambda: Fluctuating(1.0, 0.1, 1.0, step_s=0.0), "time step"),
        (lambda: Fluctuating(1.0, 0.1, 1.0, least_share=1.5), "from 0 to 1"),
    ],
)
def test_capacities_that_cannot_be(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
