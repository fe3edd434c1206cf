"""What an engine refuses is refused in its words, and before KV moves for it where it is wrong in form."""

from collections.abc import Callable
from typing import Any

import pytest

from prfaas.serving.gateway.prompts.request import is_usual

from ..world import World, route_of

InWorld = Callable[..., None]
LONG = list(range(40, 200)) * 3
BROKEN = {"structured_outputs": {"regex": "(broken"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature must be non-negative, got -1."),
        ({"temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2."),
        ({"max_tokens": 10**9}, "max_tokens=1000000000 cannot be greater"),
        ({"model": 5}, "valid string"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_costs_no_transfer(
    in_world: InWorld, fields: dict[str, Any], words: str, stream: bool
) -> None:
    async def body(world: World) -> None:
        asked = {"prompt": LONG, "stream": stream, **fields}
        async with world.client.post("/v1/completions", json=asked) as response:
            text = await response.text()
        assert (response.status, words in text) == (200 if stream else 400, True)
        assert route_of(response)["bytes"] == "0"
        assert not world.remote.generated() and not world.decode.loaded
        assert await world.metric('prfaas_gateway_refused_total{reason="engine"}') == 1
        outcome = 'prfaas_gateway_requests_total{endpoint="completions",outcome="client_error"'
        assert await world.metric(outcome) == 1

    in_world(body)


def test_usual_fields_need_no_question(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        usual = {
            "temperature": 0.7,
            "top_p": 0.9,
            "stop": ["x"],
            "seed": 3,
            "n": 2,
            "user": "me",
            "min_p": None,
        }
        route, _ = await world.complete(LONG, max_tokens=8, stream=False, min_tokens=2, **usual)
        assert route["route"] == "offload" and len(world.decode.generated()) == 1

    in_world(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"), [({"user": "nobody"}, "no such user"), (BROKEN, "Failed to transform regex")]
)
def test_what_only_the_decode_engine_refuses_is_counted_and_its_staging_freed(
    in_world: InWorld, fields: dict[str, Any], words: str, stream: bool
) -> None:
    async def body(world: World) -> None:
        # A rule of this engine's own, and a grammar: no `/render` looks at them.
        world.decode.refuses_user = True
        asked = {"prompt": LONG, "stream": stream, **fields}
        async with world.client.post("/v1/completions", json=asked) as response:
            assert (response.status, words in await response.text()) == (200 if stream else 400, True)
        # It has been prefilled once, and nothing is tried again elsewhere.
        assert len(world.remote.generated()) == len(world.decode.generated()) == 1
        assert await world.metric('prfaas_gateway_refused_total{reason="engine-late"}') == 1

    in_world(body)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": True}, {"temperature"}),
        ({"temperature": "0.5"}, {"temperature"}),
        ({"top_p": 0}, {"top_p"}),
        ({"n": 2}, {"n"}),
        ({"n": 2, "temperature": 0.5}, {"n"}),
        ({"max_tokens": 0}, {"max_tokens"}),
        ({"max_tokens": 5, "min_tokens": 5}, set()),
        ({"max_tokens": 5, "min_tokens": 6}, {"min_tokens"}),
        ({"min_tokens": 1}, {"min_tokens"}),
        ({"stream": True, "stream_options": {"include_usage": True}}, set()),
        ({"stream_options": {"include_usage": True}}, {"stream_options"}),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, {"stream_options"}),
        ({"stop": ["a"] * 5}, {"stop"}),
        ({"stop": ""}, {"stop"}),
        ({"logit_bias": {"1": 5}, "tools": []}, {"logit_bias", "tools"}),
        ({"response_format": {"type": "text"}}, set()),
        ({"response_format": {"type": "json_object"}}, {"response_format"}),
        ({"new_in_another_version": 1, "max_tokens": -5}, {"new_in_another_version", "max_tokens"}),
    ],
)
def test_only_what_no_engine_refuses_is_usual(fields: dict[str, Any], names: set[str]) -> None:
    body = {"model": "m", "prompt": "x", **fields}
    assert is_usual(body) == (not names)
    for name in names:
        # Each of them is enough.
        others = names - {name}
        assert not is_usual({field: value for field, value in body.items() if field not in others})
