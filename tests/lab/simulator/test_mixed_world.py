"""Decode instances that compute prompts too: what both cost each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants
from tests.lab.simulator.test_invariants import conversations, failures

from prfaas.core.deployment.engine import mixed_chunk_tokens
from prfaas.core.kv.published import published_model
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

MIXED_TOKENS = 2048
LONG_TOKENS = 16 * MIXED_TOKENS


def scenario(case_study: CaseStudy, mixed_tokens: int = MIXED_TOKENS, **options: object) -> Scenario:
    """Of the PD cluster one instance prefills and one decodes; none is offloaded.

    The one that prefills starts anew at 60 s: prefixes from before are at the one that decodes alone, which so is the
    sooner one by more than the answers there lose.
    """
    down = [Failure(f"home-{number}", 0.0, 1e6) for number in range(2, 8)]
    down.append(Failure("home-0", 60.0, 1.0))
    shown = scenario_of(
        case_study.planned,
        **{  # type: ignore[arg-type]
            "policy": "local_only",
            "roles": {"home": 1},
            "adapts": False,
            "allocation": False,
            "failures": down,
            "mixed_tokens": mixed_tokens,
            "caches": CacheOptions(10**6),
            **options,
        },
    )
    return replace(shown, kv_model=published_model("qwen3-235b").kv_model)


def run(
    shown: Scenario, arrivals_s: list[float], tokens: list[int], answers: list[int], blocks: list[list[int]]
) -> Result:
    return simulate(
        shown, [chunk_of(arrivals_s, tokens, answers, blocks)], warmup_share=0.0, on_event=Invariants()
    )


def conversation(shown: Scenario, *, others_s: float | None = None) -> tuple[Result, float]:
    """A prompt, another with a long answer, and at 100 s the first one's next turn, which the decode instance holds.

    `others_s`: so long after that a short prompt has its KV there.

    Returns:
        What came out, and what the next turn's prefill takes alone.
    """
    first, other, short = list(range(256)), list(range(1000, 1004)), [2000]
    turn = [*first, *range(5000, 5064)]
    curve = shown.clusters[1].curve
    arrivals_s, tokens = [0.0, 90.0, 100.0], [256 * 512, 2048, 320 * 512]
    answers, blocks = [10, 3000, 10], [first, other, turn]
    if others_s is not None:
        arrivals_s.append(100.0 + others_s - curve.seconds(500))
        tokens, answers, blocks = [*tokens, 500], [*answers, 1], [*blocks, short]
    return run(shown, arrivals_s, tokens, answers, blocks), curve.after_prefix_s(LONG_TOKENS, 256 * 512)


def test_a_prompt_and_an_answer_cost_each_other_what_they_take(case_study: CaseStudy) -> None:
    mixed, alone_s = conversation(scenario(case_study))
    apart, _ = conversation(scenario(case_study, 0))
    step_s = scenario(case_study).clusters[1].decode_step_s
    assert step_s is not None
    assert mixed.reasons[mixed.reason[2]] == "held-by-decode"
    # 16 chunks with a step of the answer in each.
    assert apart.ttft_s[2] == pytest.approx(alone_s)
    assert mixed.ttft_s[2] == pytest.approx(alone_s + 16 * step_s(1))
    # The answer misses what the prompt takes: it has a token of each of those steps.
    lost_s = mixed.e2e_s[1] - apart.e2e_s[1]
    assert lost_s == pytest.approx(alone_s, rel=0.01)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_who_comes_waits_for_the_end_of_a_step_and_for_a_chunk(case_study: CaseStudy, share: float) -> None:
    shown = scenario(case_study)
    step_s = shown.clusters[1].decode_step_s
    assert step_s is not None
    _, alone_s = conversation(shown)
    chunk_s = alone_s / 16
    others_s = (3 + share) * (chunk_s + step_s(1))
    mixed, _ = conversation(shown, others_s=others_s)
    apart, _ = conversation(scenario(case_study, 0), others_s=others_s)
    # With two in the batch steps are a little longer, so the one under way is not known to a step's end.
    late_s = mixed.ttft_s[3] - apart.ttft_s[3]
    assert late_s == pytest.approx((1 - share) * (chunk_s + step_s(1)) + chunk_s, abs=0.1 * chunk_s)
    assert mixed.e2e_s[3] >= mixed.ttft_s[3]


def test_with_the_prompt_the_last_of_the_wait_ends(case_study: CaseStudy) -> None:
    shown = scenario(case_study)
    _, alone_s = conversation(shown)
    mixed, _ = conversation(shown, others_s=1.5 * alone_s)
    apart, _ = conversation(scenario(case_study, 0), others_s=1.5 * alone_s)
    assert mixed.ttft_s[3] == pytest.approx(apart.ttft_s[3])


def test_where_no_decode_instance_prefills_nothing_changes(case_study: CaseStudy) -> None:
    results = []
    for mixed_tokens in (0, MIXED_TOKENS):
        shown = scenario(case_study, mixed_tokens, caches=None)
        results.append(run(shown, [0.0, 0.1, 0.2], [9000, 300, 20_000], [50, 5, 500], [[], [], []]))
    for name in ("ttft_s", "e2e_s"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))


@pytest.mark.slow("simulates hours of traffic")
@settings(max_examples=30)
@given(
    st.sampled_from(["paper", "tilted", "local_only", "round_robin"]),
    failures(),
    st.integers(0, 5),
    st.floats(0.0, 4e-8),
)
def test_under_failures(
    case_study: CaseStudy, policy: str, failed: list[Failure], seed: int, context_s: float
) -> None:
    """Conversations, whose turns decode instances take over: the invariants of every moment, and of every answer."""
    shown = scenario(case_study, policy=policy, failures=failed, roles={"home": 3})
    east, home = shown.clusters
    shown = replace(shown, clusters=(east, replace(home, context_s=context_s)))
    result = simulate(shown, [conversations(seed, 120)], seed=seed, warmup_share=0.0, on_event=Invariants())
    ended = ~np.isnan(result.e2e_s)
    assert ended.all()
    # An answer that another instance goes on with has its first token from before.
    whole = result.retries == 0
    assert (result.e2e_s[whole] >= result.ttft_s[whole] - 1e-6).all()


@given(st.integers(1, 1 << 16), st.integers(1, 4096))
def test_two_prompts_and_all_answers_fit_into_a_step(step_tokens: int, seats: int) -> None:
    chunk = mixed_chunk_tokens(step_tokens, seats)
    assert 1 <= chunk <= step_tokens
    assert 2 * chunk + seats <= max(step_tokens, seats + 2)
    assert math.isclose(2 * chunk + seats, step_tokens, abs_tol=1) or chunk == 1
