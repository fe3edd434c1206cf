"""Prefills that take longer at one time than at another."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.lab.simulator.capacity import Slowdown
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.simulation import simulate

factors = st.floats(0.2, 5.0)


@st.composite
def slowdowns(draw: st.DrawFn) -> Slowdown:
    times_s = sorted(draw(st.sets(st.integers(1, 50), max_size=6)))
    return Slowdown(tuple((float(time_s), draw(factors)) for time_s in (0, *times_s)))


@given(slowdowns(), st.floats(0, 60), st.floats(0, 40), st.floats(0, 40))
def test_work_in_two_parts_takes_as_long_as_in_one(
    slowdown: Slowdown, start_s: float, first_s: float, second_s: float
) -> None:
    took_s = slowdown.stretched_s(start_s, first_s)
    least, most = (bound(factor for _, factor in slowdown.pieces) for bound in (min, max))
    assert least * first_s - 1e-9 <= took_s <= most * first_s + 1e-9
    both_s = took_s + slowdown.stretched_s(start_s + took_s, second_s)
    assert slowdown.stretched_s(start_s, first_s + second_s) == pytest.approx(both_s, abs=1e-9)


def test_a_prefill_across_a_change_has_both_speeds() -> None:
    slowdown = Slowdown(((0.0, 1.0), (10.0, 2.0), (14.0, 0.5)))
    assert slowdown.stretched_s(8.0, 2.0) == pytest.approx(2.0)
    # 2 s of work until 10 s, 2 s until 14 s, and 1 s at half the time.
    assert slowdown.stretched_s(8.0, 5.0) == pytest.approx(6.5)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((), "from 0 s on"),
        (((1.0, 1.0),), "from 0 s on"),
        (((0.0, 0.0),), "a factor above 0"),
        (((0.0, math.inf),), "a number at a time, not inf from 0 s on"),
        (((0.0, 1.0), (5.0, 1.0), (5.0, 2.0)), "5 s comes after 5 s"),
    ],
)
def test_what_is_no_slowdown_is_told(pieces: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slowdown(pieces)


def scenario(case_study: CaseStudy, slowdown: Slowdown | None) -> Scenario:
    return case_study.still(policy="local_only", roles={"home": 1}, slowdown=slowdown)


def test_prefills_take_longer_and_those_behind_wait_longer(case_study: CaseStudy) -> None:
    requests = chunk_of([0.0, 0.1], [20_000, 5_000])
    seconds = scenario(case_study, None).clusters[1].curve.seconds
    first_s, second_s = seconds(20_000), seconds(5_000)
    middle_s = first_s / 2
    shown = scenario(case_study, Slowdown(((0.0, 1.0), (middle_s, 3.0))))
    result = simulate(shown, [requests], warmup_share=0.0, on_event=Invariants())
    ends_s = result.arrival_s + result.ttft_s
    assert ends_s[0] == pytest.approx(middle_s + 3 * middle_s)
    assert ends_s[1] == pytest.approx(ends_s[0] + 3 * second_s)
