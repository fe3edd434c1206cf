"""What the decode engine would refuse is refused before KV moves for it, in that engine's words."""

from collections.abc import Callable
from typing import Any

import pytest

from prfaas.serving.gateway.engine_client import EngineClient
from prfaas.serving.gateway.prompts.validation import unusual_fields

from ..world import World, route_of

InWorld = Callable[..., None]
LONG = list(range(40, 200)) * 3
BROKEN = {"structured_outputs": {"regex": "(broken"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature must be non-negative, got -1."),
        ({"temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2."),
        (BROKEN, "Failed to transform regex"),
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


def test_what_was_said_of_fields_is_remembered(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for stop in range(3):
            good = {
                "structured_outputs": {"regex": "[a-z]+"},
                "max_tokens": 8 + stop,
                "temperature": stop / 2,
            }
            route, _ = await world.complete([*LONG, stop], **good)
            assert route["route"] == "offload"
        (question,) = world.decode.asked()
        assert question.body["prompt"] == LONG[:2]
        assert not question.body.get("stream") and "kv_transfer_params" not in question.body
        for _ in range(3):
            response, _ = await world.post("/v1/completions", {"prompt": LONG, "max_tokens": 9, **BROKEN})
            assert response.status == 400
        assert len(world.decode.asked()) == 2
        await world.complete(LONG, structured_outputs={"regex": "[0-9]+"}, max_tokens=9)
        assert len(world.decode.asked()) == 3

    in_world(body)


def test_of_a_chat_the_tools_are_asked_about_and_not_its_messages(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        messages = [{"role": "user", "content": "tell me " * 60}]
        asked = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
        response, _ = await world.post("/v1/chat/completions", asked | {"stream_options": None})
        assert route_of(response)["route"] == "offload"
        (question,) = world.decode.asked()
        assert question.body["tools"] == asked["tools"]
        assert len(question.body["kv_transfer_params"]["prompt_token_ids"]) == 2
        assert len(str(question.body["messages"])) < 60

    in_world(body)


def test_who_leaves_is_kept_while_the_question_is_asked(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        call, planned = EngineClient.call, world.plane.planned_for

        async def noted(client: EngineClient, *parts: Any) -> Any:
            seen.append(tuple(planned))
            return await call(client, *parts)

        seen: list[tuple[tuple[str, str], ...]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineClient, "call", noted)
            await world.complete(LONG, structured_outputs={"regex": "[a-z]+"})
        assert (("remote", "decode"),) in seen and not planned

    in_world(body)


def test_an_engine_that_says_nothing_stops_no_request(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.dies, world.decode.dies_after = "http-500", 0
        assert world.spare is not None
        route, _ = await world.complete(LONG, structured_outputs={"regex": "[a-z]+"})
        assert (route["route"], route["decode"]) == ("offload", "spare")

    in_world(body, spare=True)


def test_what_is_refused_late_is_counted_and_its_staging_freed(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        # Usual by its form, so nothing is asked; this engine has a rule of its own.
        world.decode.refuses_user = True
        asked = {"prompt": LONG, "stream": True, "user": "nobody"}
        async with world.client.post("/v1/completions", json=asked) as response:
            assert response.status == 200 and "no such user" in await response.text()
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
    assert unusual_fields({"model": "m", "prompt": "x", **fields}).keys() == names
