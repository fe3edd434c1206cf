"""Requests that would wait too long are refused, as a gateway does."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.core.planner.survival import losses
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.capacity import Constant
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

TOKENS = 16_000


def scenario(
    case_study: CaseStudy, limit_s: float, policy: str = "local_only", **options: object
) -> Scenario:
    return scenario_of(
        case_study.planned,
        **{  # type: ignore[arg-type]
            "policy": policy,
            "roles": {"home": 1},
            "adapts": False,
            "allocation": False,
            "queue_limit_s": limit_s,
            **options,
        },
    )


def run(shown: Scenario, tokens: list[int], answers: list[int] | None = None) -> Result:
    times_s = [1e-4 * number for number in range(len(tokens))]
    return simulate(shown, [chunk_of(times_s, tokens, answers)], warmup_share=0.0, on_event=Invariants())


def refused(result: Result) -> list[bool]:
    return [result.reasons[code] == "refused" for code in result.reason]


@settings(deadline=None, max_examples=25)
@given(st.floats(0.0, 8.0), st.integers(1, 12))
def test_the_queue_stays_below_the_limit(case_study: CaseStudy, queue: float, count: int) -> None:
    """Of prompts that come at once, one computes; another is let in while the wait is at most the limit."""
    prefill_s = scenario(case_study, math.inf).clusters[1].curve.seconds(TOKENS)
    # Not where the last wait is the limit but for rounding.
    limit_s = (round(queue) + 0.5) * prefill_s
    result = run(scenario(case_study, limit_s), [TOKENS] * count)
    accepted = min(math.floor(limit_s / prefill_s) + 1, count)
    assert refused(result) == [False] * accepted + [True] * (count - accepted)
    assert np.isnan(result.ttft_s).tolist() == np.isnan(result.e2e_s).tolist() == refused(result)
    assert result.summary()["lost"] == result.summary()["decisions"].get("refused", 0) == count - accepted


def test_none_is_refused_unless_asked(case_study: CaseStudy) -> None:
    result = run(scenario(case_study, math.inf), [TOKENS] * 200)
    assert not any(refused(result))


def test_a_full_link_refuses_what_it_would_carry(case_study: CaseStudy) -> None:
    """The prefill instances are free, so it is the bytes ahead of a request that count."""
    shown = scenario(case_study, math.inf, "offload_all")
    alone = run(shown, [TOKENS])
    (link,) = (each for each in shown.links if each.source == "east")
    prefill_s = shown.clusters[0].curve.seconds(TOKENS)
    # A transfer takes as long as ten prefills.
    slow = replace(link, bandwidth_bits_per_s=BITS_PER_BYTE * float(alone.link_bytes[0]) / (10 * prefill_s))
    slow = replace(slow, capacity=Constant(slow.bandwidth_bits_per_s))
    narrow = replace(shown, links=(slow,), queue_limit_s=15 * prefill_s)
    assert refused(run(narrow, [TOKENS] * 5)) == [False, False, True, True, True]


def test_a_decode_slot_that_comes_too_late_counts(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 1e-3)
    slots = (shown.clusters[1].instances - 1) * shown.clusters[1].decode_slots
    count = slots + 5
    chunk = chunk_of([float(number) for number in range(count)], [1] * count, [1_000_000] * count)
    assert refused(simulate(shown, [chunk], warmup_share=0.0)) == [False] * slots + [True] * 5


def test_what_was_let_in_is_not_refused_when_it_is_prefilled_again(case_study: CaseStudy) -> None:
    """All prefill instances of the other cluster fail while they work, and the queue at home is full."""
    shown = scenario(case_study, math.inf, "offload_all")
    failures = [Failure(f"east-{number}", 0.01, 60.0) for number in range(shown.clusters[0].instances)]
    failing = replace(shown, failures=failures, queue_limit_s=0.9 * shown.clusters[0].curve.seconds(TOKENS))
    result = run(failing, [TOKENS] * shown.clusters[0].instances)
    assert int(result.retries.sum()) > 1
    assert not any(refused(result)) and not np.isnan(result.e2e_s).any()


def test_without_its_line_a_deployment_serves_what_is_planned_to_be_left_and_refuses_the_rest(
    case_study: CaseStudy,
) -> None:
    """At 0.95 of the planned load, with the roles as they stand: no queue without bound."""
    (link, *_) = losses(case_study.problem, case_study.optimum)
    gone = [Failure(link.name, 0.0, 1e9)]
    shown = scenario_of(
        case_study.planned, policy="tilted", allocation=False, queue_limit_s=60.0, failures=gone
    )
    traffic = case_study.poisson(0.95 * case_study.optimum.lambda_max, seed=1)
    result = simulate(shown, traffic, requests=2500)
    served = result.counted & ~np.isnan(result.e2e_s)
    assert served.sum() / (result.end_s - result.start_s) == pytest.approx(link.rate_at_once, rel=0.05)
    assert np.nanmax(result.ttft_s) < 150
    assert np.isnan(result.e2e_s).tolist() == refused(result)
