"""Prefill instances that decode on while KV travels: what clients have of it, and what it costs the prefills."""

from dataclasses import replace
from heapq import heappop
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import PAPER, CaseStudy, chunk_of

from prfaas.core.deployment import RelaySettings, load_planned
from prfaas.core.scheduling import POLICIES
from prfaas.core.workload.traffic import RequestChunk
from prfaas.lab.simulator import CacheOptions, Failure, Result, Scenario, scenario_of, simulate
from prfaas.lab.simulator.invariants import Invariants
from prfaas.lab.simulator.relaying_world import RelayingWorld
from prfaas.lab.simulator.world import World
from prfaas.lab.simulator.worlds import world_of

TOKENS, RTT_S = 50_000, 0.063
CHUNK_TOKENS = 2048


def scenario(
    case_study: CaseStudy,
    relay_tokens: int = 10_000,
    bits_per_s: float = 1e9,
    policy: str = "offload_all",
    far_instances: int = 4,
    **options: object,
) -> Scenario:
    """The case study with a link of that bandwidth, as configured and as it is."""
    planned = case_study.planned
    links = tuple(replace(link, bandwidth_bits_per_s=bits_per_s) for link in planned.links)
    made = scenario_of(
        replace(planned, links=links),
        policy=policy,
        roles={"home": 4},
        threshold_tokens=9000.0,
        adapts=False,
        allocation=False,
        first_token="prefill",
        relay_tokens=relay_tokens,
        **options,  # type: ignore[arg-type]
    )
    far = replace(made.clusters[0], instances=far_instances, prefill_instances=far_instances)
    return replace(made, clusters=(far, *made.clusters[1:]))


def run(shown: Scenario, requests: list[tuple[float, int, int]]) -> Result:
    """Requests as (arrival in seconds, tokens, tokens of the answer)."""
    return simulate(shown, [chunk(requests)], warmup_share=0.0, debug=True)


def chunk(requests: list[tuple[float, int, int]]) -> RequestChunk:
    arrivals_s, tokens, answers = zip(*requests, strict=True)
    return chunk_of(list(arrivals_s), list(tokens), list(answers))


def played(shown: Scenario, requests: RequestChunk) -> World:
    """The world after the last answer, its invariants checked after each event."""
    world = world_of(shown, np.random.default_rng(0), requests.block_tokens)
    world.columns.grow(len(requests))
    check = Invariants(world).check
    coming = list(zip(requests.arrival_s, requests.input_tokens, requests.output_tokens, strict=True))
    heap, number = world.events.heap, 0
    while number < len(coming) or world.open:
        if number < len(coming) and not (heap and heap[0][0] <= coming[number][0]):
            at_s, tokens, answer = coming[number]
            world.events.now_s = float(at_s)
            world.arrive(number, int(tokens), int(answer), [])
            number += 1
        else:
            world.events.now_s, _, callback, argument = heappop(heap)
            callback(argument)
        check()
    return world


def far_step_s(shown: Scenario, batch: int = 1) -> float:
    step_s = shown.clusters[0].relay_step_s
    assert step_s is not None
    return step_s(batch)


def home_step_s(shown: Scenario) -> float:
    step_s = shown.clusters[1].decode_step_s
    assert step_s is not None
    return step_s(1)


def behind_s(shown: Scenario, relayed: int) -> float:
    """What the decode instance computes before its first token: the relayed ones."""
    seconds = shown.clusters[1].curve.seconds
    return seconds(TOKENS + 1 + relayed) - seconds(TOKENS + 1)


def kv_s(shown: Scenario, bits_per_s: float = 1e9) -> float:
    """Until the KV of one prompt is at the decode instance: the link is what it waits for."""
    return 8 * shown.sent_model.bytes_to_move(TOKENS - 1) / bits_per_s + RTT_S


def test_an_answer_by_hand(case_study: CaseStudy) -> None:
    """The KV takes 8.3 s, the prefill 2.8 s: for 5.5 s its instance decodes."""
    shown = scenario(case_study)
    result = run(shown, [(0.0, TOKENS, 1000)])
    prefill_s, step_s = shown.clusters[0].curve.seconds(TOKENS), far_step_s(shown)
    relayed = int((kv_s(shown) - prefill_s) / step_s)
    assert result.relayed_tokens is not None and result.relayed_tokens[0] == relayed > 200
    assert result.ttft_s[0] == pytest.approx(prefill_s + RTT_S)
    assert result.second_token_s is not None and result.longest_gap_s is not None
    assert result.second_token_s[0] == pytest.approx(result.ttft_s[0] + step_s)
    last_s = result.ttft_s[0] + relayed * step_s
    handed_s = kv_s(shown) + behind_s(shown, relayed) + home_step_s(shown) - last_s
    assert result.longest_gap_s[0] == pytest.approx(max(step_s, handed_s)) and result.longest_gap_s[0] < 0.1
    written_s = (999 - relayed) * home_step_s(shown)
    assert result.e2e_s[0] == pytest.approx(kv_s(shown) + behind_s(shown, relayed) + written_s)
    bare = run(replace(shown, relay=RelaySettings()), [(0.0, TOKENS, 1000)])
    assert bare.relayed_tokens is None and bare.longest_gap_s is not None
    assert bare.longest_gap_s[0] == pytest.approx(kv_s(shown) + home_step_s(shown) - bare.ttft_s[0])
    assert bare.link_bytes.tolist() == result.link_bytes.tolist()


def test_what_is_told_of_it(case_study: CaseStudy) -> None:
    shown = scenario(case_study, policy="static_threshold", params={"threshold_tokens": 9000.0})
    result = run(shown, [(0.0, TOKENS, 1000), (60.0, 1000, 5)])
    assert {"longest_gap_s", "relayed_tokens"} <= result.table().keys()
    summary = result.summary()
    assert summary["relayed_fraction"] == 0.5
    assert summary["relayed_tokens_mean"] == pytest.approx(result.relayed_tokens[0])  # type: ignore[index]
    assert summary["longest_gap_p99_s"] < 0.1
    bare = run(replace(shown, relay=RelaySettings()), [(0.0, TOKENS, 1000)])
    assert "relayed_tokens" not in bare.table() and "longest_gap_s" in bare.table()
    assert "relayed_fraction" not in bare.summary() and bare.summary()["longest_gap_p99_s"] > 5.0
    usual = run(replace(shown, relay=RelaySettings(), first_token="decode"), [(0.0, TOKENS, 1000)])
    assert not {"longest_gap_s", "relayed_tokens"} & usual.table().keys()


def test_after_the_last_one_that_is_allowed_the_stream_pauses(case_study: CaseStudy) -> None:
    shown = scenario(case_study, 8)
    result = run(shown, [(0.0, TOKENS, 1000)])
    assert result.relayed_tokens is not None and result.relayed_tokens[0] == 8
    assert result.longest_gap_s is not None
    last_s = result.ttft_s[0] + 8 * far_step_s(shown)
    arrived_s = kv_s(shown) + behind_s(shown, 8)
    assert result.longest_gap_s[0] == pytest.approx(arrived_s + home_step_s(shown) - last_s)
    assert result.e2e_s[0] == pytest.approx(arrived_s + 991 * home_step_s(shown))


def test_an_answer_that_ends_meanwhile_gives_its_transfer_up(case_study: CaseStudy) -> None:
    shown = scenario(case_study)
    result = run(shown, [(0.0, TOKENS, 20), (0.0, TOKENS, 1000)])
    bare = run(replace(shown, relay=RelaySettings()), [(0.0, TOKENS, 20), (0.0, TOKENS, 1000)])
    assert result.relayed_tokens is not None and result.relayed_tokens[0] == 19
    assert result.e2e_s[0] == pytest.approx(result.ttft_s[0] + 19 * far_step_s(shown))
    assert result.link_bytes[0] == 0 and bare.link_bytes[0] > 0
    assert result.e2e_s[1] < bare.e2e_s[1] - 2.0


@pytest.mark.parametrize(
    ("policy", "bits_per_s", "tokens"),
    [("local_only", 1e9, TOKENS), ("offload_all", 100e9, TOKENS), ("static_threshold", 1e9, 5000)],
)
def test_without_a_link_that_binds_nothing_changes(
    case_study: CaseStudy, policy: str, bits_per_s: float, tokens: int
) -> None:
    """Inside a cluster, over a link that is fast enough for a hybrid model, and below the threshold."""
    params = {"threshold_tokens": 9000.0} if policy == "static_threshold" else {}
    shown = scenario(case_study, 100, bits_per_s, policy, params=params)
    requests = [(0.4 * number, tokens, 30) for number in range(12)]
    result, bare = run(shown, requests), run(replace(shown, relay=RelaySettings()), requests)
    assert result.relayed_tokens is not None and not result.relayed_tokens.any()
    for one, other in ((result.e2e_s, bare.e2e_s), (result.ttft_s, bare.ttft_s)):
        assert one == pytest.approx(other)


def test_an_instance_with_prefills_to_do_relays_nothing(case_study: CaseStudy) -> None:
    """Each prefill takes 2.7 s and its KV 8.3 s: behind the first of twenty more than a minute of others waits."""
    shown = scenario(case_study, far_instances=1)
    result = run(shown, [(0.0, TOKENS, 500)] * 20)
    assert result.relayed_tokens is not None
    # Nothing waits when the first one begins, and nothing after the last one.
    assert result.relayed_tokens[0] > 0 and result.relayed_tokens[-1] > 0
    assert not result.relayed_tokens[1:3].any()


def test_what_relayed_answers_cost_a_prefill(case_study: CaseStudy) -> None:
    """A decode step after each chunk of the prompt, for as long as they are relayed."""
    shown = scenario(case_study, far_instances=1)
    requests = [(0.0, TOKENS, 2000), (2.9, TOKENS, 2000)]
    result, bare = run(shown, requests), run(replace(shown, relay=RelaySettings()), requests)
    prefill_s, step_s = shown.clusters[0].curve.seconds(TOKENS), far_step_s(shown)
    chunk_s = prefill_s * CHUNK_TOKENS / TOKENS
    assert bare.ttft_s[1] == pytest.approx(prefill_s + RTT_S)
    assert result.ttft_s[1] == pytest.approx(prefill_s * (1 + step_s / chunk_s) + RTT_S)
    assert result.longest_gap_s is not None
    # The first answer's tokens come after a chunk each while the second prompt is computed.
    assert result.longest_gap_s[0] == pytest.approx(chunk_s + step_s, abs=home_step_s(shown))
    assert result.longest_gap_s[0] >= chunk_s + step_s - 1e-9
    world = played(shown, chunk(requests))
    assert world.engines["east-0"].prefilled_s == pytest.approx(prefill_s * (2 + step_s / chunk_s))


def test_relayed_tokens_wait_for_the_chunks_of_a_prompt(case_study: CaseStudy) -> None:
    """Some tokens come before the next prompt, one after each of its chunks then."""
    shown = scenario(case_study, far_instances=1)
    result = run(shown, [(0.0, TOKENS, 21), (2.9, TOKENS, 2000)])
    prefill_s, step_s = shown.clusters[0].curve.seconds(TOKENS), far_step_s(shown)
    before = (2.9 - prefill_s) / step_s
    assert 5 < before < 10
    between_s = prefill_s * CHUNK_TOKENS / TOKENS + step_s
    assert result.e2e_s[0] == pytest.approx(2.9 + (20 - before) * between_s + RTT_S)


def test_an_own_prefill_is_no_other_work(case_study: CaseStudy) -> None:
    """The pause is shorter than the prefill that comes before it."""
    shown = scenario(case_study, bits_per_s=2e9)
    assert kv_s(shown, 2e9) < 2 * shown.clusters[0].curve.seconds(TOKENS)
    result = run(shown, [(0.0, TOKENS, 1000)])
    assert result.relayed_tokens is not None and result.relayed_tokens[0] > 50


def test_relayed_answers_share_steps(case_study: CaseStudy) -> None:
    """Two seats: the third answer is not relayed."""
    planned = scenario(case_study, far_instances=1)
    far = replace(planned.clusters[0], relay_step_s=lambda batch: 0.02 * batch, prefill_concurrency=3)
    shown = replace(planned, clusters=(far, *planned.clusters[1:]), relay=RelaySettings(10_000, 2048, 2))
    world = played(shown, chunk([(0.0, TOKENS, 100)] * 3))
    assert isinstance(world, RelayingWorld)
    ttft_s, e2e_s = np.array(world.columns.ttft_s), np.array(world.columns.e2e_s)
    assert world.columns.relayed_tokens.tolist() == [99, 99, 0]
    assert ttft_s == pytest.approx([3 * far.curve.seconds(TOKENS) + RTT_S] * 3)
    assert (e2e_s - ttft_s)[:2] == pytest.approx([99 * 0.04] * 2)


REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(200, 60_000), st.integers(1, 300)), min_size=1, max_size=25
)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["static_threshold", "offload_all", "local_only", "tilted"]),
    REQUESTS,
    st.sampled_from([2e8, 2e9, 1e11]),
    st.sampled_from([1, 3, 40, 1024]),
    st.sampled_from([1, 2]),
)
def test_no_token_is_lost_or_doubled_and_no_more_are_relayed_than_allowed(
    case_study: CaseStudy,
    policy: str,
    drawn: list[tuple[float, int, int]],
    bits_per_s: float,
    most_tokens: int,
    concurrency: int,
) -> None:
    params = {"threshold_tokens": 9000.0} if policy == "static_threshold" else {}
    shown = scenario(
        case_study,
        most_tokens,
        bits_per_s,
        policy,
        far_instances=2,
        params=params,
        prefill_concurrency=concurrency,
    )
    arrivals_s = np.cumsum([gap_s for gap_s, _, _ in drawn])
    requests = [(float(at_s), *rest) for at_s, (_, *rest) in zip(arrivals_s, drawn, strict=True)]
    asked = chunk(requests)  # type: ignore[arg-type]
    world = played(shown, asked)
    columns = world.columns
    relayed, first = np.array(columns.relayed_tokens), np.array(columns.prefilled_first)
    offloaded = np.array(columns.offloaded, dtype=bool)
    assert (relayed <= most_tokens).all()
    assert not relayed[~offloaded].any()
    # What decode instances wrote, what prefills sampled and what they relayed is every answer, whole.
    assert world.answers.tokens + first.sum() + relayed.sum() == asked.output_tokens.sum()
    ttft_s, e2e_s = np.array(columns.ttft_s), np.array(columns.e2e_s)
    second_s, gap_s = np.array(columns.second_token_s), np.array(columns.longest_gap_s)
    longer = asked.output_tokens > 1
    assert (np.isnan(second_s) == ~longer).all() and (np.isnan(gap_s) == ~longer).all()
    assert (ttft_s[longer] < second_s[longer] + 1e-9).all() and (
        second_s[longer] <= e2e_s[longer] + 1e-6
    ).all()
    assert (gap_s[longer] <= e2e_s[longer] - ttft_s[longer] + 1e-6).all()
    assert all(not engine.at_work for engine in world.engines.values())


@pytest.mark.slow("simulates hours of traffic")
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.builds(
            Failure,
            st.sampled_from(["east-0", "east-1", "home-0", "home-5", "east->home"]),
            st.floats(0, 40),
            st.floats(0.1, 40),
        ),
        max_size=4,
    ),
    st.integers(0, 1000),
    st.booleans(),
)
def test_under_failures(
    case_study: CaseStudy, policy: str, failed: list[Failure], seed: int, has_caches: bool
) -> None:
    rng = np.random.default_rng(seed)
    caches = CacheOptions(200_000, 4096, 1000) if has_caches else None
    shown = replace(scenario(case_study, 64, 1e9, policy), failures=failed, caches=caches)
    answers = rng.integers(1, 200, 40).tolist()
    arrivals_s = np.cumsum(rng.exponential(0.7, 40)).tolist()
    asked = chunk_of(arrivals_s, rng.integers(50, 40_000, 40).tolist(), answers)
    result = simulate(shown, [asked], seed=seed, debug=True)
    assert not np.isnan(result.e2e_s).any()
    assert (result.ttft_s <= result.e2e_s + 1e-9).all()
    assert result.relayed_tokens is not None
    assert (result.relayed_tokens <= np.minimum(result.output_tokens - 1, 64)).all()


def test_a_prefill_instance_that_fails_leaves_what_it_relayed(case_study: CaseStudy) -> None:
    """After a second of relaying: the PD cluster prefills the prompt and those tokens, and writes the others."""
    shown = scenario(case_study, far_instances=1)
    prefill_s, step_s = shown.clusters[0].curve.seconds(TOKENS), far_step_s(shown)
    failed = replace(shown, failures=[Failure("east-0", prefill_s + 1.0, 100.0)])
    result = run(failed, [(0.0, TOKENS, 1000)])
    relayed = int(1.0 / step_s)
    assert result.relayed_tokens is not None and result.relayed_tokens[0] == relayed
    assert result.retries[0] == 1
    again_s = shown.clusters[1].curve.seconds(TOKENS + 1 + relayed)
    assert result.e2e_s[0] == pytest.approx(prefill_s + 1.0 + again_s + (999 - relayed) * home_step_s(shown))
    assert result.longest_gap_s is not None
    told_s = prefill_s + RTT_S + relayed * step_s
    assert result.longest_gap_s[0] == pytest.approx(prefill_s + 1.0 + again_s + home_step_s(shown) - told_s)


def test_a_decode_instance_that_fails_makes_one_gap(case_study: CaseStudy) -> None:
    """Until then its tokens come one by one; after it, prompt and answer so far are prefilled again."""
    shown = scenario(case_study, policy="local_only")
    home = replace(shown.clusters[1], instances=3, prefill_instances=1)
    shown = replace(shown, clusters=(home,), links=())
    prefill_s, step_s = home.curve.seconds(TOKENS), home_step_s(replace(shown, clusters=(home, home)))
    result = run(
        replace(shown, failures=[Failure("home-1", prefill_s + 400 * step_s, 100.0)]), [(0.0, TOKENS, 1000)]
    )
    assert result.retries[0] == 1 and result.longest_gap_s is not None
    again_s = home.curve.seconds(TOKENS + 401)
    assert result.longest_gap_s[0] == pytest.approx(again_s + step_s, abs=2 * step_s)


def test_the_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    gateway = "gateway: {first_token: prefill, relay_tokens: 96}\n"
    engine = "engine: {max_num_batched_tokens: 4096, max_num_seqs: 24}\n"
    path.write_text(PAPER.read_text() + gateway + engine)
    planned = load_planned(path)
    assert planned.relay == scenario_of(planned).relay == RelaySettings(96, 4096, 24)
    assert scenario_of(planned, relay_tokens=0).relay.tokens == 0
    assert scenario_of(planned, first_token="decode").relay.tokens == 0
    assert load_planned(PAPER).relay == RelaySettings()


def test_what_cannot_be_relayed_is_refused(case_study: CaseStudy) -> None:
    planned = case_study.planned
    with pytest.raises(ValueError, match="follow a first token of the prefill"):
        scenario_of(planned, relay_tokens=8)
    with pytest.raises(ValueError, match="don't share steps"):
        scenario_of(planned, first_token="prefill", relay_tokens=8, prefill_step_tokens=4096)
    shown = scenario(case_study)
    silent = replace(shown, clusters=(replace(shown.clusters[0], relay_step_s=None), *shown.clusters[1:]))
    with pytest.raises(ValueError, match='cluster "east" may relay tokens, and needs decode times'):
        run(silent, [(0.0, TOKENS, 10)])


def test_hardware_without_decode_times_takes_those_of_the_decode_instances(case_study: CaseStudy) -> None:
    planned = case_study.planned
    far = replace(planned.clusters[0], profile=replace(planned.clusters[0].profile, decode=None))
    made = scenario_of(replace(planned, clusters=(far, *planned.clusters[1:])))
    assert far_step_s(made) == case_study.problem.pd[0].decode_step_s
