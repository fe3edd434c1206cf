"""A prompt's last steps, which are filled up with the prompts that wait behind it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.core.kv.layers import FullAttention
from prfaas.core.kv.model import KvModel
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

CHUNK_TOKENS, BLOCK_TOKENS = 1024, 256


def scenario(case_study: CaseStudy, chunk_tokens: int = CHUNK_TOKENS, **options: object) -> Scenario:
    """One instance prefills all prompts."""
    return scenario_of(
        case_study.planned,
        **{  # type: ignore[arg-type]
            "policy": "local_only",
            "roles": {"home": 1},
            "adapts": False,
            "allocation": False,
            "chunk_tokens": chunk_tokens,
            "kv_block_tokens": BLOCK_TOKENS,
            **options,
        },
    )


def run(shown: Scenario, tokens: list[int], arrivals_s: list[float] | None = None) -> Result:
    """The first prompt finds an idle instance, the others come at once behind it unless it is said when."""
    times_s = [0.0, *(1e-3 + 1e-4 * number for number in range(len(tokens) - 1))]
    return simulate(shown, [chunk_of(arrivals_s or times_s, tokens)], warmup_share=0.0, on_event=Invariants())


def ends_s(result: Result) -> list[float]:
    return [float(end_s) for end_s in result.arrival_s + result.ttft_s]


def test_the_next_prompt_fills_up_both_of_the_last_steps(case_study: CaseStudy) -> None:
    """3,819 tokens are 3 steps of 1,024, one of 512 up to the last full block, and one of 235. The next prompt has 512
    tokens in the former, and three blocks in the latter."""
    shown = scenario(case_study)
    first_s, second_s = map(shown.clusters[1].curve.seconds, (3819, 2660))
    filled_s = second_s * (512 + 768) / 2660
    assert ends_s(run(shown, [3819, 2660])) == pytest.approx([first_s + filled_s, first_s + second_s])


def test_one_after_another_unless_asked(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 0)
    first_s, second_s = map(shown.clusters[1].curve.seconds, (3819, 2660))
    assert ends_s(run(shown, [3819, 2660])) == pytest.approx([first_s, first_s + second_s])


def test_a_step_takes_what_waits_when_it_starts(case_study: CaseStudy) -> None:
    shown = scenario(case_study)
    seconds = shown.clusters[1].curve.seconds
    first_s, second_s = seconds(3819), seconds(2660)
    token_s = first_s / 3819
    last_step = run(shown, [3819, 2660], [0.0, first_s - 300 * token_s])
    assert ends_s(last_step) == pytest.approx([first_s + second_s * 768 / 2660, first_s + second_s])
    none = run(shown, [3819, 2660], [0.0, first_s - 200 * token_s])
    assert ends_s(none) == pytest.approx([first_s, first_s + second_s])


def test_what_a_short_prompt_leaves_is_for_the_one_behind_it(case_study: CaseStudy) -> None:
    """The short one has its full block in one step and its 44 tokens in the next, and ends there."""
    shown = scenario(case_study)
    first_s, short_s, third_s = map(shown.clusters[1].curve.seconds, (3819, 300, 2048))
    together_s = first_s + short_s + third_s * (256 + 512) / 2048
    found = ends_s(run(shown, [3819, 300, 2048]))
    assert found == pytest.approx([together_s, together_s, first_s + short_s + third_s])


def test_a_prompt_that_is_whole_in_an_earlier_step_ends_with_it(case_study: CaseStudy) -> None:
    """The second one is a block of the step of 512; the third has another block there, and three in the last step."""
    shown = scenario(case_study)
    first_s, short_s, third_s = map(shown.clusters[1].curve.seconds, (3819, 256, 2048))
    last_step_alone_s = first_s * 235 / 3819
    found = ends_s(run(shown, [3819, 256, 2048]))
    assert found == pytest.approx(
        [
            first_s + short_s + third_s * (256 + 768) / 2048,
            first_s + short_s + third_s * 256 / 2048 - last_step_alone_s,
            first_s + short_s + third_s,
        ]
    )


def test_without_states_only_the_last_step_is_short(case_study: CaseStudy) -> None:
    dense = KvModel("dense", (FullAttention(60, 8, 128, 128),))
    shown = replace(scenario(case_study), kv_model=dense)
    first_s, second_s = map(shown.clusters[1].curve.seconds, (3819, 2660))
    filled_s = second_s * (1024 - 747) / 2660
    assert ends_s(run(shown, [3819, 2660])) == pytest.approx([first_s + filled_s, first_s + second_s])


def offloading(case_study: CaseStudy, chunk_tokens: int, **options: object) -> Scenario:
    """One instance prefills all prompts, in the other cluster."""
    all_far = {"policy": "static_threshold", "params": {"threshold_tokens": 1.0}}
    shown = scenario(case_study, chunk_tokens, **{**all_far, **options})
    far, near = shown.clusters
    return replace(shown, clusters=(replace(far, instances=1, prefill_instances=1), near))


def test_the_last_bytes_of_an_offloaded_prompt_leave_later(case_study: CaseStudy) -> None:
    tokens = [30_000, 20_000]
    plain, shared = (run(offloading(case_study, chunk), tokens) for chunk in (0, CHUNK_TOKENS))
    assert plain.offloaded.all() and shared.offloaded.all()
    seconds = offloading(case_study, 0).clusters[0].curve.seconds
    # 30,000 tokens end with steps of 256 and 48 tokens.
    late_s = [seconds(20_000) * (768 + 768) / 20_000, 0.0]
    # Beside them the next prompt sends 2 % of what the link carries, and less in its first chunk.
    assert np.subtract(ends_s(shared), ends_s(plain)).tolist() == pytest.approx(late_s, abs=5e-4)
    assert shared.link_bytes.tolist() == plain.link_bytes.tolist()


def test_an_offloaded_prompt_whose_bytes_have_all_left_is_answered_once(case_study: CaseStudy) -> None:
    """Without states nothing is left to send when the shared step ends, and without a round trip it is there then."""
    tokens, results = [30_000, 20_000], []
    for chunk_tokens in (0, CHUNK_TOKENS):
        shown = offloading(case_study, chunk_tokens)
        links = tuple(replace(link, rtt_s=0.0) for link in shown.links)
        dense = KvModel("dense", (FullAttention(6, 8, 128, 128),))
        results.append(run(replace(shown, kv_model=dense, links=links), tokens))
    plain, shared = results
    seconds = offloading(case_study, 0).clusters[0].curve.seconds
    late_s = [seconds(20_000) * (1024 - 30_000 % 1024) / 20_000, 0.0]
    assert np.subtract(ends_s(shared), ends_s(plain)).tolist() == pytest.approx(late_s, abs=1e-6)


def test_nobody_waits_and_nothing_changes(case_study: CaseStudy) -> None:
    arrivals_s, tokens = [0.0, 100.0, 200.0], [30_000, 20_000, 3819]
    plain, shared = (run(offloading(case_study, chunk), tokens, arrivals_s) for chunk in (0, CHUNK_TOKENS))
    assert shared.ttft_s.tolist() == plain.ttft_s.tolist()


def test_an_instance_that_dies_in_a_shared_step_hands_nothing_over(case_study: CaseStudy) -> None:
    seconds = offloading(case_study, 0).clusters[0].curve.seconds
    dies_s = seconds(30_000) + seconds(20_000) * 768 / 20_000
    failure = Failure("east-0", dies_s, 1000.0)
    result = run(offloading(case_study, CHUNK_TOKENS, failures=[failure]), [30_000, 20_000])
    assert result.retries.tolist() == [1, 1]
    assert min(ends_s(result)) > dies_s + seconds(20_000)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0.0, 2.0)), min_size=2, max_size=12))
def test_results_come_later_and_all_of_them_as_soon(
    case_study: CaseStudy, prompts: list[tuple[int, float]]
) -> None:
    tokens = [each for each, _ in prompts]
    arrivals_s = np.cumsum([after_s for _, after_s in prompts]).tolist()
    plain, shared = (
        ends_s(run(scenario(case_study, chunk), tokens, arrivals_s)) for chunk in (0, CHUNK_TOKENS)
    )
    assert all(late_s >= soon_s - 1e-9 for soon_s, late_s in zip(plain, shared, strict=True))
    assert max(shared) == pytest.approx(max(plain), abs=1e-9)


def test_pools_and_blocks_that_cannot_be_are_refused(case_study: CaseStudy) -> None:
    with pytest.raises(ValueError, match="fills up a prompt's last steps"):
        scenario(case_study, pools={"home": PoolOptions(1 << 30)})
    for block_tokens in (0, CHUNK_TOKENS + 1):
        with pytest.raises(ValueError, match="kv_block_tokens"):
            scenario(case_study, kv_block_tokens=block_tokens)
