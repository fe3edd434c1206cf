import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies._sessions import SessionTraffic

from prfaas.core.workload.arrivals import Mmpp, Phase, Poisson
from prfaas.core.workload.empirical import Empirical, fixed
from prfaas.core.workload.lengths import LengthDistribution, TruncatedLogNormal, Uniform, WorkloadError
from prfaas.core.workload.requests import RequestTrace, TracedRequest
from prfaas.core.workload.traffic import IndependentTraffic, LengthSampler, ReplayedTraffic, Traffic, take

seeds = st.integers(0, 2**32)


def requests_of(
    traffic: Traffic, seed: int, *, limit: int | None = None, until_s: float | None = None
) -> list[TracedRequest]:
    return list(take(traffic.chunks(np.random.default_rng(seed)), limit=limit, until_s=until_s))


def shared_blocks(one: TracedRequest, other: TracedRequest) -> int:
    alike = 0
    for mine, theirs in zip(one.block_ids, other.block_ids, strict=False):
        if mine != theirs:
            break
        alike += 1
    return alike


@pytest.mark.parametrize(
    "lengths",
    [
        fixed(700),
        Empirical([10, 1000, 5000], [1, 2, 1]),
        Uniform(10, 900),
        TruncatedLogNormal(7, 1.2, 50, 60_000),
    ],
    ids=repr,
)
def test_drawn_lengths_have_the_distribution(lengths: LengthDistribution) -> None:
    drawn = LengthSampler.of(lengths).draw(np.random.default_rng(1), 200_000)
    assert drawn.min() >= lengths.low - 0.5 and drawn.max() <= lengths.high + 0.5
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.01)
    for q in (0.1, 0.4, 0.6, 0.9):
        assert (drawn <= lengths.quantile(q) + 0.5).mean() >= q - 0.01
        assert (drawn < lengths.quantile(q) - 0.5).mean() <= q + 0.01


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 3000))
@pytest.mark.slow("millions of tokens")
def test_independent_prompts_share_nothing(seed: int, block_tokens: int) -> None:
    traffic = IndependentTraffic(Poisson(3), Uniform(1, 5000), fixed(20), block_tokens)
    requests = requests_of(traffic, seed, limit=300)
    ids = [block for request in requests for block in request.block_ids]
    assert len(ids) == len(set(ids))
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // block_tokens)
        assert request.block_tokens == block_tokens and request.output_tokens == 20
    assert requests == requests_of(traffic, seed, limit=300)


def test_lengths_don_t_depend_on_when_requests_come() -> None:
    """Another process of arrivals, the same prompts: so two scenarios can be compared request by request."""
    slow, bursts = Poisson(1), Mmpp((Phase(1, 1), Phase(9, 1)))
    one, other = (
        requests_of(IndependentTraffic(each, Uniform(1, 99), fixed(5)), 7, limit=50)
        for each in (slow, bursts)
    )
    assert [each.input_tokens for each in one] == [each.input_tokens for each in other]
    assert [each.arrival_s for each in one] != [each.arrival_s for each in other]


def test_take_ends_at_a_time_or_a_number() -> None:
    traffic = IndependentTraffic(Poisson(10), fixed(5), fixed(5))
    assert traffic.mean_per_s == 10
    assert len(requests_of(traffic, 0, limit=12_345)) == 12_345 and requests_of(traffic, 0, limit=0) == []
    until = requests_of(traffic, 0, until_s=100.0)
    assert len(until) == pytest.approx(1000, abs=200) and until[-1].arrival_s < 100


TRACE = RequestTrace.of(
    "some",
    [
        TracedRequest(0.0, 1000, 10, (5, 6), 512),
        TracedRequest(0.0, 1500, 0, (5, 6, 9), 512),
        TracedRequest(6.0, 512, 30, (70,), 512),
    ],
    "made up",
)


def test_a_trace_replayed_as_it_is() -> None:
    replayed = requests_of(ReplayedTraffic(TRACE), 0)
    assert [each.arrival_s for each in replayed] == [0, 0, 6]
    assert [(each.input_tokens, each.output_tokens) for each in replayed] == [
        (1000, 10),
        (1500, 0),
        (512, 30),
    ]
    assert shared_blocks(replayed[0], replayed[1]) == 2 and shared_blocks(replayed[0], replayed[2]) == 0


def test_speed_and_rounds() -> None:
    traffic = ReplayedTraffic(TRACE, speed=2, rounds=3)
    replayed = requests_of(traffic, 0)
    # A round is the span and one mean gap: (6 + 3) / 2 s.
    assert [each.arrival_s for each in replayed] == [0, 0, 3, 4.5, 4.5, 7.5, 9, 9, 12]
    assert traffic.mean_per_s == pytest.approx(3 / 4.5)
    rounds = [replayed[start : start + 3] for start in (0, 3, 6)]
    for before, after in pairwise(rounds):
        assert shared_blocks(after[0], after[1]) == 2
        known = {block for each in before for block in each.block_ids}
        assert known.isdisjoint(block for each in after for block in each.block_ids)
    endless = ReplayedTraffic(TRACE, rounds=None)
    assert len(requests_of(endless, 0, limit=1000)) == 1000


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0.01, 50), st.floats(0.1, 10))
def test_jitter_moves_arrivals_by_less_than_its_range(seed: int, jitter_s: float, speed: float) -> None:
    replayed = requests_of(ReplayedTraffic(TRACE, speed=speed, jitter_s=jitter_s, rounds=4), seed)
    times = [each.arrival_s for each in replayed]
    assert times == sorted(times)
    by_prompt = defaultdict(list)
    for each in replayed:
        by_prompt[each.input_tokens].append(each.arrival_s * speed)
    round_s = 6 + max(3, jitter_s)
    for request in TRACE.requests:
        for number, arrived_s in enumerate(by_prompt[request.input_tokens]):
            moved_s = arrived_s - request.arrival_s - number * round_s
            assert -1e-6 <= moved_s <= jitter_s + 1e-6


def test_jitter_is_even() -> None:
    one = RequestTrace.of(
        "one", [TracedRequest(0.0, 5, 5, (1,), 512), TracedRequest(9.0, 5, 5, (1,), 512)], ""
    )
    traffic = ReplayedTraffic(one, jitter_s=3, rounds=None)
    times = np.array([each.arrival_s for each in requests_of(traffic, 1, limit=20_000)])
    moved = (times % 18) % 9
    assert moved.mean() == pytest.approx(1.5, abs=0.05) and np.quantile(moved, 0.25) == pytest.approx(
        0.75, abs=0.05
    )


@settings(max_examples=60, deadline=None)
@given(st.floats(0.002, 4), st.floats(0.002, 4))
def test_scaled_prompts_begin_alike_where_they_did(input_factor: float, output_factor: float) -> None:
    # One that has hardly begun its last block.
    begun = TracedRequest(7.0, 1025, 5, (5, 6, 80), 512)
    trace = RequestTrace.of("more", [*TRACE.requests, begun], "made up")
    traffic = ReplayedTraffic(trace, input_factor=input_factor, output_factor=output_factor)
    scaled = requests_of(traffic, 0)
    factor = traffic.block_tokens / 512
    assert traffic.block_tokens == max(1, round(512 * input_factor))
    for before, after in zip(trace.requests, scaled, strict=True):
        assert len(after.block_ids) == len(before.block_ids) == -(-after.input_tokens // traffic.block_tokens)
        assert abs(after.input_tokens - before.input_tokens * factor) <= 1
        assert abs(after.output_tokens - before.output_tokens * output_factor) <= 1
        assert (after.output_tokens > 0) == (before.output_tokens > 0)
    assert shared_blocks(scaled[0], scaled[1]) == 2


SESSIONS = SessionTraffic(
    Poisson(2),
    mean_turns=4,
    think_s=15,
    questions=Uniform(5, 900),
    outputs=Uniform(1, 300),
    shared_tokens=1024,
)


def by_session(requests: list[TracedRequest]) -> list[list[TracedRequest]]:
    """Turns by their first own block: after the shared ones."""
    sessions = defaultdict(list)
    for request in requests:
        sessions[request.block_ids[2]].append(request)
    return list(sessions.values())


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_each_turn_s_prompt_is_the_conversation_and_something_new(seed: int) -> None:
    requests = requests_of(SESSIONS, seed, limit=2000)
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    sessions = by_session(requests)
    for turns in sessions:
        assert all(each.block_ids[:2] == (0, 1) for each in turns)
        assert all(len(each.block_ids) == -(-each.input_tokens // 512) for each in turns)
        assert 1024 + 5 <= turns[0].input_tokens <= 1024 + 900
        for before, after in pairwise(turns):
            assert 5 <= after.input_tokens - before.input_tokens - before.output_tokens <= 900
            assert after.block_ids[: len(before.block_ids)] == before.block_ids
    for one, other in pairwise(sessions):
        assert shared_blocks(one[0], other[0]) == 2


def test_sessions_have_as_many_turns_and_as_much_time_as_they_should() -> None:
    requests = requests_of(SESSIONS, 3, until_s=20_000)
    # After some sessions' worth of time there are as many in progress as ever.
    steady = [each for each in requests if each.arrival_s >= 1000]
    assert len(steady) / 19_000 == pytest.approx(SESSIONS.mean_per_s, rel=0.03) and SESSIONS.mean_per_s == 8
    sessions = [turns for turns in by_session(requests) if turns[0].arrival_s < 19_000]
    assert np.mean([len(turns) for turns in sessions]) == pytest.approx(4, rel=0.03)
    gaps = [after.arrival_s - before.arrival_s for turns in sessions for before, after in pairwise(turns)]
    assert np.mean(gaps) == pytest.approx(15, rel=0.03)


@pytest.mark.slow("a property over many random systems")
def test_tools_pause_sessions_after_their_answers() -> None:
    """The mean is the same as without a spread, and the median that of a log-normal distribution."""
    tools = replace(SESSIONS, think_sigma=2.0, answer_token_s=0.5)
    sessions = by_session(requests_of(tools, 3, until_s=60_000))
    pauses = [
        after.arrival_s - before.arrival_s - 0.5 * before.output_tokens
        for turns in sessions
        for before, after in pairwise(turns)
    ]
    assert min(pauses) > 0
    assert np.median(pauses) == pytest.approx(15 * math.exp(-2), rel=0.03)
    assert np.mean(pauses) == pytest.approx(15, rel=0.1)


def test_a_session_ends_where_its_prompt_would_be_too_long() -> None:
    whole = by_session(requests_of(SESSIONS, 5, limit=4000))
    cut = by_session(requests_of(replace(SESSIONS, longest_tokens=3000), 5, limit=4000))
    assert max(turn.input_tokens for turns in whole for turn in turns) > 3000
    assert max(turn.input_tokens for turns in cut for turn in turns) <= 3000
    kept = {turns[0].arrival_s: [turn.input_tokens for turn in turns] for turns in cut}
    for turns in whole[:200]:
        tokens = [turn.input_tokens for turn in turns if turn.input_tokens <= 3000]
        assert kept[turns[0].arrival_s][: len(tokens)] == tokens


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ReplayedTraffic(TRACE, speed=0), "speed of a replay must be above 0"),
        (lambda: ReplayedTraffic(TRACE, jitter_s=-1), "jitter must be 0 s or more"),
        (lambda: ReplayedTraffic(TRACE, rounds=0), "1 time or more, not 0"),
        (lambda: ReplayedTraffic(TRACE, input_factor=-1), "factor of lengths"),
        (
            lambda: ReplayedTraffic(RequestTrace.of("at once", [TRACE.requests[0]], ""), rounds=2),
            "all requests come at once",
        ),
        (lambda: SessionTraffic(Poisson(1), 0.5, 1, fixed(5), fixed(5)), "1 turn or more"),
        (lambda: SessionTraffic(Poisson(1), 2, 0, fixed(5), fixed(5)), "think time"),
        (lambda: SessionTraffic(Poisson(1), 2, 1, fixed(5), fixed(5), 1000), "whole blocks of 512"),
        (lambda: replace(SESSIONS, think_sigma=-1.0), "spread of think times must be 0 or more"),
        (lambda: replace(SESSIONS, answer_token_s=-1.0), "pace of answers must be 0 or more"),
    ],
)
def test_what_no_traffic_can_be(make: object, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "traffic",
    [
        IndependentTraffic(Poisson(50), Uniform(1, 2000), fixed(9)),
        SESSIONS,
        ReplayedTraffic(TRACE, rounds=None),
    ],
    ids=["independent", "sessions", "replayed"],
)
def test_chunks_go_on_where_the_last_one_ended(traffic: Traffic) -> None:
    chunks = [chunk for chunk, _ in zip(traffic.chunks(np.random.default_rng(4)), range(4), strict=False)]
    times = np.concatenate([chunk.arrival_s for chunk in chunks])
    assert (np.diff(times) >= 0).all()
    lasts = []
    for chunk in chunks:
        assert (
            len(chunk) == len(chunk.input_tokens) == len(chunk.output_tokens) == len(chunk.block_starts) - 1
        )
        assert chunk.block_starts[-1] == len(chunk.block_ids)
        assert np.array_equal(np.diff(chunk.block_starts), -(-chunk.input_tokens // chunk.block_tokens))
        lasts.append(chunk.block_ids[chunk.block_starts[1:] - 1])
    if isinstance(traffic, IndependentTraffic):
        ids = np.concatenate([chunk.block_ids for chunk in chunks])
        assert len(np.unique(ids)) == len(ids)
    if isinstance(traffic, ReplayedTraffic):
        assert len(np.unique(np.concatenate(lasts))) == 3 * len(chunks)
