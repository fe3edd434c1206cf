"""What relayed tokens fill of pauses, and what they cost, as the planner estimates it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.deployment import RelaySettings, load_planned
from prfaas.core.deployment.examples import example_path
from prfaas.core.planner import PlanProblem, RelayEstimate, make_plan, problem_of
from prfaas.core.planner.relay import WORTH_STEPS
from prfaas.core.planner.ttft_target import best_within_target
from prfaas.core.workload import Workload, fixed

from .problems import kv_bytes_1t, paper_problem

STEP_S, CHUNK_TOKENS = 0.02, 2048
TOKENS = 60_000


def problem(
    most_tokens: int, bits_per_s: float = 3e9, *, tokens: float | None = None, rtt_s: float = 0.0
) -> PlanProblem:
    """The case study behind a slow link, whose KV leaves while it is made.

    With `tokens` every prompt has so many, and so few instances are at home that all are offloaded.
    """
    made = paper_problem(bits_per_s=bits_per_s, pd=8 if tokens is None else 2)
    workload = made.workload if tokens is None else Workload(fixed(tokens), 1000.0)
    return replace(
        made,
        prfaas=tuple(replace(cluster, relay_step_s=STEP_S) for cluster in made.prfaas),
        links=tuple(replace(link, rtt_s=rtt_s) for link in made.links),
        workload=workload,
        first_token="prefill",
        relay=RelaySettings(most_tokens, CHUNK_TOKENS, 16),
    )


def found(made: PlanProblem, load: float = 0.7) -> RelayEstimate:
    estimate = best_within_target(made).relay_estimate(load)
    assert estimate is not None
    return estimate


def test_one_length_by_hand() -> None:
    """Next to no load: the KV has the link for itself, and no prefill waits."""
    made = problem(64, 2e9, tokens=TOKENS)
    (far,) = made.prfaas
    pause_s = float(8 * kv_bytes_1t(TOKENS) / 2e9 - far.prefill_s(TOKENS))
    estimate = found(made, 1e-6)
    offloaded = best_within_target(made).point.offloaded_fraction
    assert offloaded > 0
    assert estimate.pausing_fraction == pytest.approx(offloaded)
    assert estimate.relayed_fraction == pytest.approx(offloaded)
    assert estimate.pause_p90_s == pytest.approx(pause_s, rel=1e-4)
    assert estimate.needed_tokens == int(pause_s / STEP_S) + 1
    assert (estimate.relayed_tokens_mean, estimate.filled_fraction) == (64, 0)
    assert estimate.prefill_loss == pytest.approx(0, abs=1e-6)
    enough = found(problem(1024, 2e9, tokens=TOKENS), 1e-6)
    assert enough.relayed_tokens_mean == pytest.approx(pause_s / STEP_S, rel=1e-4)
    assert enough.filled_fraction == 1


def test_what_it_costs() -> None:
    """With something relayed all the time, a prefill has a decode step after each chunk."""
    made = problem(1024, 2e9, tokens=TOKENS)
    slow = replace(made, prfaas=tuple(replace(each, instances=1) for each in made.prfaas))
    operation = best_within_target(slow)
    estimate = operation.relay_estimate(0.95)
    assert estimate is not None and estimate.relayed_fraction > 0
    (far,) = slow.prfaas
    chunk_s = float(far.prefill_s(TOKENS)) * CHUNK_TOKENS / TOKENS
    busy = (
        0.95 * operation.point.lambda_max * operation.point.offloaded_fraction * float(far.prefill_s(TOKENS))
    )
    assert 0 < estimate.prefill_loss <= busy * STEP_S / chunk_s * (1 + 1e-6)
    assert estimate.prefill_loss == pytest.approx(busy * STEP_S / chunk_s, rel=0.2)
    # Now and then other prefills wait longer than the pause takes.
    assert estimate.relayed_fraction < estimate.pausing_fraction
    few = best_within_target(replace(slow, relay=RelaySettings(8, CHUNK_TOKENS, 16))).relay_estimate(0.95)
    assert few is not None and few.prefill_loss < 0.5 * estimate.prefill_loss


def test_where_nothing_pauses_nothing_is_relayed() -> None:
    """A link that keeps up with the prefill, and whose round trip is shorter than three steps."""
    made = problem(64, 1000e9)
    estimate = found(made)
    assert estimate == RelayEstimate(64, 0.0, None, None, 0.0, 0.0, 0.0, 0.0)
    (home,) = made.pd
    soon = found(problem(64, 1000e9, rtt_s=0.9 * WORTH_STEPS * home.decode_step_s), 0.01)
    assert soon.pausing_fraction == 0
    late = found(problem(64, 1000e9, rtt_s=WORTH_STEPS * home.decode_step_s), 0.01)
    assert late.pausing_fraction == pytest.approx(best_within_target(made).point.offloaded_fraction, rel=0.05)


def test_no_first_token_no_relay() -> None:
    made = problem(64)
    assert best_within_target(replace(made, first_token="decode")).relay_estimate(0.7) is None
    assert make_plan(replace(made, first_token="decode")).relay_estimate is None
    plan = make_plan(made)
    assert plan.to_json()["relay_estimate"]["most_tokens"] == 64
    assert plan.relay_estimate == best_within_target(made).relay_estimate(made.load)
    assert "relay_estimate" not in make_plan(replace(made, first_token="decode")).to_json()


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from([1e9, 3e9, 10e9, 100e9]),
    st.integers(0, 1024),
    st.integers(0, 1024),
    st.floats(0.05, 0.99),
    st.floats(0, 0.3),
)
def test_more_tokens_fill_more_and_cost_more(
    bits_per_s: float, some: int, others: int, load: float, rtt_s: float
) -> None:
    few, many = (found(problem(tokens, bits_per_s, rtt_s=rtt_s), load) for tokens in sorted((some, others)))
    offloaded = best_within_target(problem(0, bits_per_s, rtt_s=rtt_s)).point.offloaded_fraction
    for each in (few, many):
        assert 0 <= each.relayed_fraction <= each.pausing_fraction <= offloaded * (1 + 1e-3)
        assert 0 <= each.relayed_tokens_mean <= each.most_tokens
        assert 0 <= each.filled_fraction <= 1 and 0 <= each.prefill_loss < 1
    assert (few.pausing_fraction, few.needed_tokens) == (many.pausing_fraction, many.needed_tokens)
    assert few.relayed_fraction <= many.relayed_fraction
    assert few.prefill_loss <= many.prefill_loss + 1e-12
    assert few.filled_fraction <= many.filled_fraction
    if not few.most_tokens:
        assert (few.relayed_fraction, few.prefill_loss) == (0, 0)


def test_files_have_the_steps_of_their_hardware() -> None:
    planned = load_planned(example_path("paper.yaml"))
    (far,) = problem_of(planned).prfaas
    assert far.relay_step_s == planned.clusters[0].profile.decode_step_s(20)
    silent = replace(planned.clusters[0], profile=replace(planned.clusters[0].profile, decode=None))
    (far,) = problem_of(replace(planned, clusters=(silent, *planned.clusters[1:]))).prfaas
    assert far.relay_step_s is None
