"""Answers computed again on a plain path: what counts as equal, and what becomes of the comparison."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.gateway.answers.shadow import compared, is_comparable
from prfaas.serving.gateway.prompts.prompt import Endpoint

from ..world import GATEWAY, World
from .test_decode_deaths import LONG, SHORT, stream

InWorld = Callable[..., None]


def plain(tokens: list[int], others: dict[int, dict[int, float]] | None = None) -> dict[str, Any]:
    """The plain path's choice: each token has a logprob of -0.1, and `others` those beside it."""
    return {
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "top_logprobs": [
                {
                    f"token_id:{each}": value
                    for each, value in ({token: -0.1} | (others or {}).get(place, {})).items()
                }
                for place, token in enumerate(tokens)
            ],
        },
    }


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(TOKENS)
def test_equal_tokens_match(tokens: list[int]) -> None:
    assert compared(tokens, plain(tokens), 0.25) == "match"


@given(TOKENS, st.data())
def test_where_they_part_the_likelihood_of_the_clients_token_decides(
    tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    told = [*tokens[:place], 10, *data.draw(st.lists(st.integers(0, 9), max_size=3))]
    for less, outcome in ((0.2, "tie"), (0.3, "mismatch")):
        assert compared(told, plain(tokens, {place: {10: -0.1 - less}}), 0.25) == outcome
    assert compared(told, plain(tokens), 0.25) == "mismatch"


def test_an_answer_without_its_tokens_is_no_match() -> None:
    with pytest.raises(IndexError):
        compared([1, 2], plain([1]), 0.25)


@pytest.mark.parametrize(
    ("body", "comparable"),
    [
        ({"prompt": [1], "temperature": 0}, True),
        ({"prompt": [1], "temperature": 0, "stream": True, "max_tokens": 5}, True),
        ({"prompt": [1], "temperature": 0, "stop": ["a"], "tools": [{}], "user": "me"}, True),
        ({"prompt": [1]}, False),
        ({"prompt": [1], "temperature": 0, "n": 2}, False),
        ({"prompt": [1], "temperature": 0, "logit_bias": {"1": 2}}, False),
    ],
)
def test_only_greedy_answers_of_one_text_are_compared(body: dict[str, Any], comparable: bool) -> None:
    assert is_comparable(Endpoint.COMPLETIONS, body) is comparable


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
            _, answer = await world.complete(LONG, temperature=0, max_tokens=5)
            # It asked for none.
            assert answer["choices"][0]["token_ids"] is None and answer["prompt_token_ids"] is None
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
