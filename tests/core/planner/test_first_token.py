"""Plans where the first token comes from the prefill."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.planner import PlanProblem, make_plan
from prfaas.core.planner.problem import TtftTarget, all_paths
from prfaas.core.planner.ttft import (
    DecodeQueue,
    PrefillPoolLoad,
    TtftDistribution,
    Wait,
    link_time,
)
from prfaas.core.planner.ttft_target import best_within_target
from prfaas.core.planner.two_clusters import best_point

from .problems import kv_bytes_1t, paper_problem

GBIT = 1e9


def problem(bits_per_s: float = 100e9, rtt_s: float = 0.063, **options: object) -> PlanProblem:
    made = paper_problem(bits_per_s=bits_per_s, **options)  # type: ignore[arg-type]
    links = tuple(replace(link, rtt_s=rtt_s) for link in made.links)
    return replace(made, links=links, streamed_token_bytes=17_280.0)


def early(made: PlanProblem) -> PlanProblem:
    return replace(made, first_token="prefill")


def test_a_crossing_adds_its_round_trip_alone() -> None:
    made = problem(1e9)
    (away,) = (path for path in all_paths(made) if not path.is_local)
    lengths = np.array([1_000.0, 100_000.0])
    found = link_time(made, away, lengths, np.array([0.5, 0.5]))
    assert found is not None
    for rate in (0.0, 0.5 / found.busy_s[0]):
        np.testing.assert_allclose(found.added_s(np.array([0.4, 6.0]), rate, "prefill"), 0.063)


def test_a_prefix_that_must_be_there_before_still_counts() -> None:
    """The PD cluster holds half of every prompt: it goes to the PrfaaS cluster first, and what is new comes back."""
    made = problem(10e9, pd_ratio=0.5, back=True)
    (away,) = (path for path in all_paths(made) if len(path.transfers) == 2 and not path.is_local)
    lengths = np.array([40_000.0])
    found = link_time(made, away, lengths, np.array([1.0]))
    assert found is not None
    fetched_s = float(kv_bytes_1t(np.array([20_000.0]))[0]) * 8 / 10e9
    assert found.added_s(np.array([1.0]), 0.0, "prefill")[0] == pytest.approx(2 * 0.063 + fetched_s)
    assert found.added_s(np.array([1.0]), 0.0)[0] > 2 * 0.063 + fetched_s


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([2 * GBIT, 10 * GBIT, 100 * GBIT]),
    st.floats(0, 0.3),
    st.sampled_from([None, 0.4]),
    st.sampled_from([None, 0.4]),
    st.booleans(),
    st.floats(0.05, 0.99),
)
@pytest.mark.slow("plans anew for each example")
def test_no_token_comes_later_and_nothing_else_changes(
    bits_per_s: float,
    rtt_s: float,
    prfaas_ratio: float | None,
    pd_ratio: float | None,
    back: bool,
    load: float,
) -> None:
    made = problem(bits_per_s, rtt_s, prfaas_ratio=prfaas_ratio, pd_ratio=pd_ratio, back=back)
    usual, soon = best_within_target(made), best_within_target(early(made))
    assert soon.point.ttft_mean_s <= usual.point.ttft_mean_s
    assert soon.point.ttft_p90_s <= usual.point.ttft_p90_s
    times = {"ttft_mean_s": 0.0, "ttft_p90_s": 0.0}
    assert replace(soon.point, **times) == replace(usual.point, **times)
    first, complete = soon.estimate(load), usual.estimate(load)
    assert first.mean_s is not None and complete.mean_s is not None
    assert first.mean_s <= complete.mean_s
    assert first.p90_s <= complete.p90_s * (1 + 1e-9)  # type: ignore[operator]
    assert first.busiest_utilisation == complete.busiest_utilisation
    assert soon.rest_estimate(load) == complete and usual.rest_estimate(load) is None


@pytest.mark.parametrize(("seconds", "statistic"), [(3.0, "mean"), (4.0, "p90")])
def test_a_target_over_a_narrow_link_is_kept_at_a_higher_rate(seconds: float, statistic: str) -> None:
    target = TtftTarget(seconds, statistic)  # type: ignore[arg-type]
    made = replace(problem(5e9), ttft_target=target)
    usual, soon = best_within_target(made), best_within_target(early(made))
    assert soon.keeps_target
    assert soon.point.lambda_max > usual.comparable_rate
    assert soon.point.lambda_max <= best_point(made).lambda_max * (1 + 1e-9)


def test_a_token_of_the_prefill_waits_for_no_slot_but_full_slots_are_full() -> None:
    pool = PrefillPoolLoad("home", 4, np.array([1.0]), np.array([1.0]), smooth=False)
    decode = (DecodeQueue(1.0, 0.9, Wait(0.8, 20.0)),)
    alone, soon = TtftDistribution((pool,), 1.0), TtftDistribution((pool,), 1.0, decode, "prefill")
    assert (soon.mean_s(), soon.at_most(2.0)) == (alone.mean_s(), alone.at_most(2.0))
    assert TtftDistribution((pool,), 1.0, decode).mean_s() == pytest.approx(alone.mean_s() + 16.0)
    full = (DecodeQueue(1.0, 1.2, Wait(1.0, 1.0)),)
    assert not TtftDistribution((pool,), 1.0, full, "prefill").is_finite


def test_the_plan_tells_both_times_and_by_default_what_it_told() -> None:
    made = problem(10e9)
    usual, soon = make_plan(made), make_plan(early(made))
    assert "rest_estimate" not in usual.to_json()
    assert soon.to_json()["rest_estimate"] == dataclasses.asdict(usual.ttft_estimate)
    assert soon.ttft_estimate.mean_s < usual.ttft_estimate.mean_s  # type: ignore[operator]
    assert soon.optimum.lambda_max == usual.optimum.lambda_max


def test_what_ends_map_is_the_pace_of_one_transfer_and_no_load_of_the_link() -> None:
    made = problem(100e9)
    slow = replace(made, links=tuple(replace(link, transfer_limit_bits_per_s=1e9) for link in made.links))
    (away,) = (path for path in all_paths(made) if not path.is_local)
    lengths, weights = np.array([50_000.0]), np.array([1.0])
    free, mapped = (link_time(each, away, lengths, weights) for each in (made, slow))
    assert free is not None and mapped is not None
    assert mapped.busy_s[0] == free.busy_s[0]
    alone_s = float(kv_bytes_1t(lengths)[0]) * 8 / 1e9
    assert mapped.added_s(np.array([0.0]), 0.0)[0] == pytest.approx(0.063 + alone_s)
    assert make_plan(slow).optimum.lambda_max == make_plan(made).optimum.lambda_max
