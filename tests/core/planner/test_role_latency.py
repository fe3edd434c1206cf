"""The predicted TTFT of roles: queues by hand, and what more work and more instances do."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.planner import PlanLink
from prfaas.core.planner.role_latency import QueueingModel, latency_with_roles
from prfaas.core.planner.ttft import erlang_c
from prfaas.core.workload import Empirical

from .problems import h20_s, paper_problem

ARRIVAL, SHORT_FIRST = QueueingModel(), QueueingModel(is_shortest_first=True)
EQUAL_ANSWERS = QueueingModel(answer_variation=0.0)
LENGTHS = Empirical([500.0, 2000.0, 8000.0, 20_000.0, 60_000.0])


def test_one_length_by_hand() -> None:
    """Prefill is M/D/3, decode M/M/100."""
    problem = paper_problem(prfaas=0, lengths=Empirical([8000.0]))
    service_s, rate = float(h20_s(8000.0)), 1.2
    offered, answer_s = rate * service_s, 1024 * 0.025
    found = latency_with_roles(problem, {"home": 3}, rate, ARRIVAL)
    assert found.prefill_s == pytest.approx(service_s)
    assert found.prefill_wait_s == pytest.approx(erlang_c(3, offered) / 2 * service_s / (3 - offered))
    assert found.decode_wait_s == pytest.approx(
        erlang_c(100, rate * answer_s) * answer_s / (100 - rate * answer_s)
    )
    assert found.ttft_s == found.prefill_s + found.prefill_wait_s + found.decode_wait_s
    equal = latency_with_roles(problem, {"home": 3}, rate, EQUAL_ANSWERS)
    assert equal.decode_wait_s == pytest.approx(found.decode_wait_s / 2)
    # Nobody is shorter than anybody.
    short_first = latency_with_roles(problem, {"home": 3}, rate, SHORT_FIRST)
    assert short_first.prefill_wait_s == pytest.approx(found.prefill_wait_s)


def test_short_ones_first_by_hand() -> None:
    """One server, two lengths, as Cobham has it: W0 / (1 − ρ1) the short, W0 / ((1 − ρ1)(1 − ρ)) the long."""
    problem = paper_problem(prfaas=0, pd=8, lengths=Empirical([1000.0, 9000.0], [3, 1]))
    short_s, long_s = float(h20_s(1000.0)), float(h20_s(9000.0))
    rate = 0.7 / (0.75 * short_s + 0.25 * long_s)
    first, both = rate * 0.75 * short_s, 0.7
    left_s = rate * (0.75 * short_s**2 + 0.25 * long_s**2) / 2
    waits = left_s / (1 - first), left_s / ((1 - first) * (1 - both))
    found = latency_with_roles(problem, {"home": 1}, rate, SHORT_FIRST)
    assert found.prefill_wait_s == pytest.approx(0.75 * waits[0] + 0.25 * waits[1])
    in_order = latency_with_roles(problem, {"home": 1}, rate, ARRIVAL)
    assert in_order.prefill_wait_s == pytest.approx(left_s / (1 - both))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 7), st.floats(0.05, 1.5), st.booleans())
def test_more_work_never_waits_less(n_prefill: int, load: float, is_shortest_first: bool) -> None:
    problem = paper_problem(lengths=LENGTHS)
    queues = QueueingModel(is_shortest_first)
    rates = (2.0 * load, 2.2 * load)
    less, more = (latency_with_roles(problem, {"home": n_prefill}, rate, queues) for rate in rates)
    assert less.utilisation <= more.utilisation
    assert less.prefill_wait_s <= more.prefill_wait_s and less.decode_wait_s <= more.decode_wait_s
    assert (less.ttft_s == math.inf) is (less.utilisation >= 1)
    in_order = latency_with_roles(problem, {"home": n_prefill}, rates[0], ARRIVAL)
    assert less.ttft_s <= in_order.ttft_s


def test_a_link_can_be_the_fullest_stage() -> None:
    wide, narrow = (
        latency_with_roles(paper_problem(bits_per_s=bits), {"home": 3}, 2.0, ARRIVAL) for bits in (100e9, 8e9)
    )
    assert narrow.utilisation > wide.utilisation
    # The threshold for the narrow link keeps more at home, where it takes longer.
    assert narrow.prefill_s > wide.prefill_s


def test_no_instance_for_a_side_is_an_infinite_wait() -> None:
    assert latency_with_roles(paper_problem(), {"home": 8}, 1.0, ARRIVAL).ttft_s == math.inf
    assert latency_with_roles(paper_problem(prfaas=0), {"home": 0}, 1.0, ARRIVAL).ttft_s == math.inf


@pytest.mark.slow("a property over many random systems")
def test_several_clusters_like_two() -> None:
    """The PrfaaS cluster in two halves is as full, and waits longer: a queue each."""
    whole = paper_problem()
    (east,) = whole.prfaas
    halves = replace(
        whole,
        prfaas=tuple(replace(east, name=name, instances=2) for name in ("east", "west")),
        links=tuple(PlanLink(name, "home", 50e9) for name in ("east", "west")),
    )
    one, two = (latency_with_roles(each, {"home": 4}, 2.6, ARRIVAL) for each in (whole, halves))
    assert two.utilisation == pytest.approx(one.utilisation, rel=0.05)
    assert two.prefill_s == pytest.approx(one.prefill_s, rel=0.03)
    assert two.decode_wait_s == pytest.approx(one.decode_wait_s)
    assert one.prefill_wait_s < two.prefill_wait_s < 3 * one.prefill_wait_s
