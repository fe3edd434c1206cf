"""Measuring, against a stand-in server whose speed is known."""

import asyncio
from typing import Any

import pytest

from prfaas.tools.profiling.endpoint import _LETTERS, MeasureError, ProfiledEndpoint, TokenTimes
from prfaas.tools.profiling.measure import Measurement, MeasurePlan, measure, step_s

from .stand_in_engine import StandInEngine, running


def run(engine: StandInEngine, plan: MeasurePlan, steps: list[str] | None = None) -> Measurement:
    async def go() -> Measurement:
        async with ProfiledEndpoint(engine.url) as endpoint:
            return await measure(endpoint, plan, (steps if steps is not None else []).append)

    return asyncio.run(go())


@pytest.mark.slow("starts processes")
def test_finds_the_times_of_the_server() -> None:
    steps: list[str] = []
    with running(StandInEngine(prefill_s=lambda tokens: 0.02 + tokens * 1e-4, step_s=0.004)) as engine:
        plan = MeasurePlan((64, 512, 1024), (1, 4), repeats=2, warmups=1, context_tokens=32)
        measured = run(engine, plan, steps)
    assert measured.model == "org/stand-in"
    assert [sample.at for sample in measured.prefill] == [64, 512, 1024]
    for sample in measured.prefill:
        # Never less than the server sleeps; how much more is up to the machine.
        assert 0.02 + sample.at * 1e-4 <= sample.median_s < 0.02 + sample.at * 1e-4 + 10
        assert len(sample.seconds) == 2
    assert [sample.at for sample in measured.decode] == [1, 4]
    assert all(0.004 <= sample.median_s < 5 for sample in measured.decode)
    assert measured.notes == ()
    assert len(steps) == plan.runs == 15
    assert steps[0] == "prefill of 64 tokens, warm-up"


def test_no_two_prompts_begin_alike() -> None:
    with running(StandInEngine()) as engine:
        run(engine, MeasurePlan((64, 128), (1, 2), repeats=2, warmups=1, context_tokens=64))
    beginnings = [prompt[:16] for prompt in engine.prompts]
    assert len(beginnings) >= 6 + 3 + 6
    assert len(set(beginnings)) == len(beginnings)
    # Ids that the tokenizer itself gave.
    used = {token for prompt in engine.prompts for token in prompt}
    assert used <= set(map(ord, _LETTERS))
    # Few different ones would keep few experts of a mixture busy.
    assert len(used) > 100


def test_a_batch_that_waits_in_a_queue_is_no_batch() -> None:
    with running(StandInEngine(max_num_seqs=2, step_s=0.001)) as engine:
        plan = MeasurePlan((64, 128), (1, 2, 3, 4), repeats=1, warmups=0, context_tokens=16)
        measured = run(engine, plan)
    assert [sample.at for sample in measured.decode] == [1, 2]
    assert "3 requests were never decoded together" in measured.notes[0]


def test_the_profile_has_the_medians() -> None:
    with running(StandInEngine()) as engine:
        measured = run(engine, MeasurePlan((64, 128), (1,), repeats=3, warmups=0, context_tokens=16))
    profile = measured.profile(name="mine", hardware="cpu", gpus_per_instance=2, source="a test")
    assert profile.range_tokens == (64, 128)
    assert profile.prefill_s(64) == pytest.approx(sorted(measured.prefill[0].seconds)[1], rel=1e-5)
    assert profile.decode is not None
    assert profile.decode.context_tokens == 16
    assert profile.decode_step_s(1) == pytest.approx(measured.decode[0].median_s, rel=1e-5)


@pytest.mark.parametrize(
    ("engine", "plan", "message"),
    [
        ({"max_model_len": 100}, ((64, 100), ()), "the longest that can be measured is 99"),
        (
            {"max_model_len": 100},
            ((16, 32), (1,)),
            "leaves no room to decode in the endpoint's max_model_len of 100",
        ),
        ({}, ((64,), ()), "at least two lengths"),
        ({"tells_ids": False}, ((64, 128), ()), "doesn't tell the token ids of a prompt"),
        ({"cached_tokens": 48}, ((64, 128), ()), "had 48 tokens of a new prompt in its prefix cache"),
        ({"counted_tokens": 65}, ((64, 128), ()), "counts 65 tokens in a prompt of 64 token ids"),
        ({"fails_above": 100, "max_model_len": 128}, ((64, 120), ()), "answered 500: out of memory"),
        ({"fails_above": 64, "max_model_len": 128}, ((16, 32), (2,)), "answered 500: out of memory"),
    ],
)
def test_errors_are_one_sentence(engine: dict[str, Any], plan: tuple[Any, Any], message: str) -> None:
    lengths, batches = plan
    context = 64 if "fails_above" not in engine else 60
    with running(StandInEngine(**engine)) as server, pytest.raises(MeasureError) as raised:
        if engine.get("fails_above") == 64:
            server.fails_above = 64
            context, server.max_model_len = 65, 4096
        run(server, MeasurePlan(lengths, batches, repeats=1, warmups=0, context_tokens=context))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_server_and_no_url() -> None:
    async def enter(url: str, model: str | None = None) -> None:
        async with ProfiledEndpoint(url, model):
            pass

    with pytest.raises(MeasureError, match=r"127\.0\.0\.1:1 can't be reached"):
        asyncio.run(enter("http://127.0.0.1:1/v1/"))
    with pytest.raises(MeasureError, match='"localhost:8000" is no URL'):
        asyncio.run(enter("localhost:8000"))
    with (
        running(StandInEngine()) as engine,
        pytest.raises(MeasureError, match='doesn\'t serve "other"; it serves org/stand-in'),
    ):
        asyncio.run(enter(engine.url, "other"))


def arrivals(start: float, step: float, count: int, each: int = 1) -> TokenTimes:
    return TokenTimes(tuple((start + index * step, each) for index in range(count)))


def test_a_step_counts_only_while_all_decode() -> None:
    # The first is alone and fast for 10 s, then both take 2 s per token.
    first = TokenTimes((*((float(t), 1) for t in range(10)), *((10.0 + 2 * t, 1) for t in range(20))))
    second = arrivals(10.0, 2.0, 30)
    assert step_s([first, second]) == pytest.approx(2.0)
    assert step_s([arrivals(0, 1, 64), arrivals(63, 1, 64)]) is None
    assert step_s([arrivals(0, 1, 17)]) == pytest.approx(1.0)
    assert step_s([arrivals(0, 1, 16)]) is None


def test_tokens_that_come_together_are_all_counted() -> None:
    assert step_s([arrivals(0, 4, 9, each=4)]) == pytest.approx(1.0)
