"""Answers computed again on a plain path: what counts as equal, and what becomes of the comparison."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.gateway.answers.shadow import compared, is_comparable
from prfaas.serving.gateway.answers.transcript import NotPlainError, whole_text
from prfaas.serving.gateway.prompts.prompt import Endpoint

from ..world import GATEWAY, World
from .test_decode_deaths import LONG, SHORT, stream

InWorld = Callable[..., None]


def plain(
    tokens: list[str], others: dict[int, dict[str, float]] | None = None, base: int = 0
) -> dict[str, Any]:
    """The plain path's choice: each token has a logprob of -0.1, and `others` those beside it."""
    offsets = [base + len("".join(tokens[:place])) for place in range(len(tokens))]
    return {
        "text": "".join(tokens),
        "logprobs": {
            "text_offset": offsets,
            "token_logprobs": [-0.1] * len(tokens),
            "top_logprobs": [
                {token: -0.1} | (others or {}).get(place, {}) for place, token in enumerate(tokens)
            ],
        },
    }


TOKENS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8)


@given(TOKENS, st.integers(0, 100))
def test_equal_texts_match(tokens: list[str], base: int) -> None:
    assert compared("".join(tokens), plain(tokens, base=base), 0.25, same_length=True) == "match"


@given(TOKENS, st.data(), st.integers(0, 100))
def test_where_they_part_the_likelihood_of_the_clients_token_decides(
    tokens: list[str], data: st.DataObject, base: int
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    for less, outcome in ((0.2, "tie"), (0.3, "mismatch")):
        choice = plain(tokens, {place: {"xy": -0.1 - less}}, base)
        text = "".join(tokens[:place]) + "xy and another end"
        assert compared(text, choice, 0.25, same_length=True) == outcome
    assert compared(text, plain(tokens, base=base), 0.25, same_length=True) == "mismatch"


def test_of_unknown_lengths_one_text_may_go_on() -> None:
    assert compared("ab", plain(["a", "b", "c"]), 0.25, same_length=False) == "match"
    assert compared("abcd", plain(["a", "b", "c"]), 0.25, same_length=False) == "match"
    assert compared("abcd", plain(["a", "b", "c"]), 0.25, same_length=True) == "mismatch"


def test_a_client_whose_answer_ended_where_the_end_was_almost_as_likely_is_a_tie() -> None:
    choice = plain(["a", "b"], {1: {"<|endoftext|>": -0.2}})
    assert compared("a", choice, 0.25, same_length=True) == "tie"
    assert compared("a", plain(["a", "b"]), 0.25, same_length=True) == "mismatch"


@pytest.mark.parametrize(
    ("body", "comparable"),
    [
        ({"prompt": [1], "temperature": 0}, True),
        ({"prompt": [1], "temperature": 0, "stream": True, "max_tokens": 5}, True),
        ({"prompt": [1]}, False),
        ({"prompt": [1], "temperature": 0, "n": 2}, False),
        ({"prompt": [1], "temperature": 0, "logit_bias": {"1": 2}}, False),
    ],
)
def test_only_greedy_answers_of_one_text_are_compared(body: dict[str, Any], comparable: bool) -> None:
    assert is_comparable(Endpoint.COMPLETIONS, body) is comparable


def test_the_text_of_whole_answers() -> None:
    assert whole_text({"choices": [{"index": 0, "text": "abc", "finish_reason": "stop"}]}) == "abc"
    chat = {"index": 0, "message": {"role": "assistant", "content": "abc", "tool_calls": []}}
    assert whole_text({"choices": [chat]}) == "abc"
    for choices in ([], [chat, chat], [{"index": 0, "message": {"content": "a", "reasoning_content": "b"}}]):
        with pytest.raises(NotPlainError):
            whole_text({"choices": choices})


async def outcome_of(world: World, outcome: str) -> None:
    """Wait until one comparison had this outcome."""
    async with asyncio.timeout(20):
        while await world.metric(f'prfaas_gateway_shadows_total{{outcome="{outcome}"}}') != 1:
            await asyncio.sleep(0.02)


ALL = replace(GATEWAY, shadow=1.0)
GREEDY = {"prompt": LONG, "temperature": 0, "max_tokens": 5}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_transferred_prompt_is_computed_again_by_an_idle_engine(in_world: InWorld, streamed: bool) -> None:
    async def body(world: World) -> None:
        world.plane.idle = "spare"
        if streamed:
            await stream(world, "/v1/completions", GREEDY)
        else:
            await world.complete(LONG, temperature=0, max_tokens=5)
        await outcome_of(world, "match")
        assert world.spare is not None
        (asked,) = world.spare.generated()
        assert asked.body["prompt"] == LONG and asked.body["cache_salt"]
        assert "kv_transfer_params" not in asked.body

    in_world(body, spare=True, gateway_config=ALL)


def test_another_text_is_a_mismatch_that_names_the_request(
    in_world: InWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(world: World) -> None:
        world.plane.idle = "spare"
        assert world.spare is not None
        world.spare.garbles = True
        response, _ = await world.post("/v1/completions", GREEDY)
        await outcome_of(world, "mismatch")
        (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("shadow")]
        assert response.headers["X-Request-Id"] in line and "remote" in line and "decode" in line

    in_world(body, spare=True, gateway_config=ALL)


def test_a_client_comes_first(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        world.plane.idle = "spare"
        world.spare.whole_s = 60.0
        await world.post("/v1/completions", GREEDY)
        while not world.spare.generated():
            await asyncio.sleep(0.01)
        world.plane.idle_is_used = True
        await outcome_of(world, "yielded")
        while not world.spare.cancelled:
            await asyncio.sleep(0.01)

    in_world(body, spare=True, gateway_config=ALL)


def test_what_is_not_transferred_or_not_greedy_is_left_alone(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.plane.idle = "spare"
        await world.complete(LONG)
        world.plane.prefers = "spare"
        assert world.spare is not None
        await world.complete(SHORT[:2], temperature=0)
        assert await world.metric("prfaas_gateway_shadows_total") == 0

    in_world(body, spare=True, gateway_config=ALL)
