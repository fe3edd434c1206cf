"""Bandwidths over time."""

import math
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from prfaas.lab.simulator.capacity import (
    CapacityProcess,
    Constant,
    Fluctuating,
    Outages,
    Piece,
    Recorded,
    Steps,
)


def drawn(process: CapacityProcess, count: int, seed: int = 1) -> list[Piece]:
    return list(islice(process.changes(np.random.default_rng(seed)), count))


@pytest.mark.parametrize(
    "process",
    [
        Constant(5.0),
        Steps(((0.0, 1.0), (60.0, 0.0))),
        Outages(5.0, 10.0, 1.0),
        Fluctuating(5.0, 0.3, 20.0, step_s=0.1),
        Recorded(((100.0, 1.0), (101.5, 2.0), (102.0, 3.0))),
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


def test_outages_are_as_long_and_as_far_apart_as_asked() -> None:
    pieces = drawn(Outages(5.0, 30.0, 2.0), 40_001)
    lengths = np.diff([time_s for time_s, _ in pieces])
    assert [bits_per_s for _, bits_per_s in pieces[:3]] == [5.0, 0.0, 5.0]
    assert lengths[::2].mean() == pytest.approx(30.0, rel=0.03)
    assert lengths[1::2].mean() == pytest.approx(2.0, rel=0.03)
    # Exponential: the standard deviation is the mean.
    assert lengths[::2].std() == pytest.approx(30.0, rel=0.04)


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


def test_clipping_raises_the_mean_as_it_says() -> None:
    process = Fluctuating(100.0, 0.8, 1.0, least_share=0.1)
    values = np.array([bits_per_s for _, bits_per_s in drawn(process, 200_000)])
    assert values.min() == pytest.approx(10.0)
    assert process.clipped_mean_bits_per_s > 104
    assert values.mean() == pytest.approx(process.clipped_mean_bits_per_s, rel=0.01)
    assert Fluctuating(100.0, 0.0, 1.0).clipped_mean_bits_per_s == 100.0


@pytest.mark.parametrize(("relative_sd", "raise_"), [(0.3, 6e-5), (0.5, 0.0055)])
def test_the_raise_that_the_docstring_names(relative_sd: float, raise_: float) -> None:
    process = Fluctuating(1.0, relative_sd, 1.0)
    assert process.clipped_mean_bits_per_s - 1 == pytest.approx(raise_, rel=0.1)


def test_a_recording_begins_at_0_and_repeats() -> None:
    pieces = ((100.0, 1.0), (101.5, 2.0), (102.0, 3.0))
    assert drawn(Recorded(pieces), 7) == [(0, 1), (1.5, 2), (2, 3), (2.5, 1), (4, 2), (4.5, 3), (5, 1)]
    assert drawn(Recorded(pieces, repeat=False), 7) == [(0, 1), (1.5, 2), (2, 3)]
    assert drawn(Recorded(((7.0, 1.0),)), 7) == [(0, 1)]


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wan.csv"
    path.write_text("time_s, bits_per_s\n0,1e9\n1.5,2e9\n\n3,0\n")
    assert Recorded.read(path, repeat=False) == Recorded(((0.0, 1e9), (1.5, 2e9), (3.0, 0.0)), repeat=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ":1: the first line"),
        ("0,1e9\n", ":1: the first line"),
        ("time_s,bits_per_s\n", "no bandwidth in this file"),
        ("time_s,bits_per_s\n0,1\n1,fast\n", ":3: two numbers are needed, time_s,bits_per_s, not '1,fast'"),
        ("time_s,bits_per_s\n0,1\n1\n", ":3: two numbers"),
        ("time_s,bits_per_s\n0,1\n0,2\n", ":3: time_s 0 is not after"),
        ("time_s,bits_per_s\nnan,1\n", ":2: time_s nan is not after"),
        ("time_s,bits_per_s\n0,-1\n", ":2: bits_per_s is 0 or more, not -1"),
        ("time_s,bits_per_s\n0,inf\n", ":2: bits_per_s is 0 or more, not inf"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "wan.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"wan\.csv") as told:
        Recorded.read(path)
    assert words in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.csv: there is no such recorded bandwidth"):
        Recorded.read(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="can't be read"):
        Recorded.read(tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Constant(0.0), "capacity is more than 0"),
        (lambda: Constant(math.inf), "finite"),
        (lambda: Steps(()), "at least one"),
        (lambda: Steps(((1.0, 5.0),)), "begin at 0 s, not at 1 s"),
        (lambda: Steps(((0.0, 5.0), (2.0, 1.0), (2.0, 3.0))), "2 s comes after 2 s"),
        (lambda: Steps(((0.0, -5.0),)), "0 bit/s or more, not -5"),
        (lambda: Steps(((0.0, 5.0), (math.nan, 5.0))), "finite, not nan"),
        (lambda: Outages(0.0, 1.0, 1.0), "capacity is more than 0"),
        (lambda: Outages(1.0, 0.0, 1.0), "between outages"),
        (lambda: Outages(1.0, 1.0, 0.0), "length of an outage"),
        (lambda: Fluctuating(0.0, 0.1, 1.0), "mean capacity"),
        (lambda: Fluctuating(1.0, -0.1, 1.0), "relative deviation"),
        (lambda: Fluctuating(1.0, 0.1, 0.0), "correlation time"),
        (lambda: Fluctuating(1.0, 0.1, 1.0, step_s=0.0), "time step"),
        (lambda: Fluctuating(1.0, 0.1, 1.0, least_share=1.5), "from 0 to 1"),
        (lambda: Recorded(()), "at least one"),
    ],
)
def test_capacities_that_cannot_be(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
