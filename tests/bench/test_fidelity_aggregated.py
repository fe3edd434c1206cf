"""The engine that prefills and decodes together, against sums done by hand and a step-by-step oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fidelity_aggregated import AggregatedEngine, Served, StepCost, serve

COST = StepCost(fixed_s=0.01, token_s=0.001, request_s=0.002, context_token_s=0.0001)


def engine(**changes: object) -> AggregatedEngine:
    values: dict[str, object] = {"max_running": 8, "step_tokens": 100, "schedules_ahead": False}
    return AggregatedEngine(COST, **(values | changes))  # type: ignore[arg-type]


def test_one_request_alone() -> None:
    served = serve(engine(), [5.0], [50], [3])
    prefill_s = COST.seconds(50, 0, 0)
    assert served.first_token_s[0] == pytest.approx(5.0 + prefill_s)
    decode_s = COST.seconds(0, 1, 50) + COST.seconds(0, 1, 51)
    assert served.last_token_s[0] == pytest.approx(5.0 + prefill_s + decode_s)
    assert (served.steps, served.preemptions) == (3, 0)


def test_a_long_prompt_is_cut_and_shares_steps_with_what_decodes() -> None:
    served = serve(engine(), [0.0, 0.001], [10, 250], [4, 1])
    first_s = COST.seconds(10, 0, 0)
    assert served.first_token_s[0] == pytest.approx(first_s)
    chunks = [COST.seconds(99, 1, 10), COST.seconds(99, 1, 11), COST.seconds(52, 1, 12)]
    assert served.first_token_s[1] == pytest.approx(first_s + sum(chunks))
    assert served.last_token_s[0] == pytest.approx(first_s + sum(chunks))
    assert served.last_token_s[1] == served.first_token_s[1]


def test_who_comes_to_a_busy_engine_that_schedules_ahead_waits_a_step_longer() -> None:
    times = ([0.0, 0.001], [10, 10], [9, 1])
    one_s, two_s = COST.seconds(10, 0, 0), COST.seconds(0, 1, 10)
    at_once = serve(engine(), *times)
    assert at_once.begun_s[1] == pytest.approx(one_s)
    ahead = serve(engine(schedules_ahead=True), *times)
    assert ahead.begun_s[1] == pytest.approx(one_s + two_s)
    assert ahead.begun_s[0] == at_once.begun_s[0] == 0.0


def test_no_more_than_may_run_do() -> None:
    served = serve(engine(max_running=1), [0.0, 0.0], [10, 10], [5, 5])
    assert served.begun_s[1] == pytest.approx(served.last_token_s[0])


def test_without_memory_the_newest_starts_over() -> None:
    served = serve(engine(kv_blocks=4, block_tokens=16), [0.0, 0.0], [20, 20], [20, 20])
    assert served.preemptions == 1
    assert served.last_token_s[0] < served.last_token_s[1]
    plenty = serve(engine(kv_blocks=100, block_tokens=16), [0.0, 0.0], [20, 20], [20, 20])
    assert plenty.preemptions == 0
    assert served.last_token_s[1] > plenty.last_token_s[1]
    assert served.first_token_s[1] == plenty.first_token_s[1]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0 needs 3 blocks; the engine has 2"):
        serve(engine(kv_blocks=2), [0.0], [40], [8])


REQUESTS = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=25
)


@settings(max_examples=150, deadline=None)
@given(
    REQUESTS, st.integers(1, 6), st.integers(10, 40), st.one_of(st.none(), st.integers(0, 12)), st.booleans()
)
def test_it_does_what_a_plain_loop_over_tokens_does(
    requests: list[tuple[float, int, int]], max_running: int, step_tokens: int, spare: int | None, ahead: bool
) -> None:
    gaps, prompts, answers = (list(column) for column in zip(*requests, strict=True))
    arrivals = np.cumsum(gaps).tolist()
    blocks = None
    if spare is not None:
        blocks = max(-(-(prompt + answer) // 16) for _, prompt, answer in requests) + spare
    given_engine = engine(
        max_running=max_running, step_tokens=step_tokens, kv_blocks=blocks, schedules_ahead=ahead
    )
    served = serve(given_engine, arrivals, prompts, answers)
    expected = plain(given_engine, arrivals, prompts, answers)
    assert served.preemptions == expected.preemptions
    assert served.steps == expected.steps
    for name in ("begun_s", "first_token_s", "last_token_s"):
        np.testing.assert_allclose(getattr(served, name), getattr(expected, name), rtol=1e-9)


def plain(made: AggregatedEngine, arrivals: list[float], prompts: list[int], answers: list[int]) -> Served:
    """The same rules with every request looked at in every step, and its blocks counted from its tokens."""
    count = len(arrivals)
    begun, first, last = (np.full(count, np.nan) for _ in range(3))
    target, computed, made_tokens = list(prompts), [0] * count, [0] * count
    coming, waiting, running = list(range(count)), list[int](), list[int]()
    now_s = began_s = 0.0
    steps = preemptions = 0

    def blocks(tokens: int) -> int:
        return -(-tokens // made.block_tokens)

    def held() -> int:
        # A prompt's blocks are taken as a whole when it begins.
        return sum(blocks(max(computed[i], target[i])) for i in running)

    while coming or waiting or running:
        idle = not (waiting or running)
        if idle:
            now_s = max(now_s, arrivals[coming[0]])
        settled_s = began_s if made.schedules_ahead and not idle else now_s
        began_s = now_s
        while coming and arrivals[coming[0]] <= settled_s:
            waiting.append(coming.pop(0))
        steps += 1
        while made.kv_blocks is not None:
            decoding = [i for i in running if computed[i] >= target[i]]
            need = sum(blocks(computed[i] + 1) - blocks(computed[i]) for i in decoding)
            if held() + need <= made.kv_blocks:
                break
            victim = running.pop()
            target[victim] = prompts[victim] + made_tokens[victim]
            computed[victim] = 0
            waiting.insert(0, victim)
            preemptions += 1
        decoding = [i for i in running if computed[i] >= target[i]]
        context = sum(computed[i] for i in decoding)
        for i in decoding:
            computed[i] += 1
            target[i] = computed[i]
        left = made.step_tokens - len(decoding)
        ended_prompts = []
        cut = [i for i in running if computed[i] < target[i]]
        while left > 0:
            if cut:
                i = cut.pop()
            elif (
                waiting
                and len(running) < made.max_running
                and (made.kv_blocks is None or held() + blocks(target[waiting[0]]) <= made.kv_blocks)
            ):
                i = waiting.pop(0)
                running.append(i)
                if np.isnan(begun[i]):
                    begun[i] = now_s
            else:
                break
            chunk = min(left, target[i] - computed[i])
            computed[i] += chunk
            left -= chunk
            if computed[i] == target[i]:
                ended_prompts.append(i)
        prompt_tokens = made.step_tokens - len(decoding) - left
        now_s += made.cost.seconds(prompt_tokens, len(decoding), context)
        for i in [*decoding, *ended_prompts]:
            made_tokens[i] += 1
            if np.isnan(first[i]):
                first[i] = now_s
            if made_tokens[i] == answers[i]:
                last[i] = now_s
                running.remove(i)
    return Served(begun, first, last, steps, preemptions)
