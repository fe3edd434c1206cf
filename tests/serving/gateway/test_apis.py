"""`/v1/responses`, `/v1/messages` and the tokenizer's routes: prefilled elsewhere if possible, each in its form."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from prfaas.serving.transport.protocol.ticket import Ticket

from .stand_in import answer_text
from .stand_in_apis import MESSAGES, RESPONSES, parsed
from .world import World, route_of

InWorld = Callable[..., None]
WORDS = "tell me more, " * 40
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "stand-in", "instructions": "Be terse.", "input": WORDS},
    MESSAGES: {
        "model": "stand-in",
        "max_tokens": 16,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 5"},
            {"type": "text", "text": "Be terse."},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}],
    },
}
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
LIMITS = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


def prompt_of(world: World) -> list[int]:
    """What the chat template makes of both bodies."""
    text = f"<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\n{WORDS.strip()}<|im_end|>\n"
    ids: list[int] = world.decode.tokenizer.encode(text + "<|im_start|>assistant\n").ids
    return ids


def text_in(path: str, answer: Mapping[str, Any]) -> str:
    text: str = (answer["output"][0] if path == RESPONSES else answer)["content"][0]["text"]
    return text


async def stream(world: World, path: str, **fields: Any) -> tuple[Mapping[str, str], list[dict[str, Any]]]:
    """The answer's headers and its events."""
    async with world.client.post(path, json=BODIES[path] | {"stream": True} | fields) as response:
        assert response.status == 200
        return response.headers, parsed(await response.read())


def streamed_text(events: list[dict[str, Any]]) -> str:
    deltas = [event["delta"] for event in events if "delta" in event and event["type"] != "message_delta"]
    return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


@BOTH
def test_a_long_conversation_is_prefilled_elsewhere(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        ids = prompt_of(world)
        response, answer = await world.post(path, BODIES[path])
        assert response.status == 200
        assert text_in(path, answer) == answer_text(ids)
        assert route_of(response)["route"] == "offload"
        assert world.decode.loaded == [len(ids) - 1]
        (seen,) = world.decode.generated()
        assert seen.path == path
        # Only an engine's own word about its ids lets the gateway's stand in for them.
        assert ("prompt_token_ids" in seen.body["kv_transfer_params"]) is (path == RESPONSES)
        (prefill,) = world.remote.generated()
        assert prefill.path == "/v1/completions" and prefill.body["prompt"] == ids[:-1]
        assert await world.metric(f'prfaas_gateway_requests_total{{endpoint="{path[4:]}",outcome="ok"') == 1

    in_world(body)


@BOTH
def test_a_stream_keeps_its_own_form_and_end(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        ids = prompt_of(world)
        headers, events = await stream(world, path, **{LIMITS[path]: 9}, leak=True)
        assert headers["x-prfaas-route"].startswith("offload")
        assert streamed_text(events) == answer_text(ids, 9)
        assert events[-1]["type"] == {RESPONSES: "response.completed", MESSAGES: "message_stop"}[path]
        if path == RESPONSES:
            assert events[-1]["response"]["kv_transfer_params"] is None
        assert world.plane.suspected == []
        record = await world.admin.get(f"/prfaas/requests/{headers['X-Request-Id']}")
        assert (await record.json())["answer_tokens"] == 9

    in_world(body)


@BOTH
@pytest.mark.parametrize("fault", ["before-headers", "after-headers", "http-500"])
def test_what_has_not_begun_comes_from_another_engine(in_world: InWorld, path: str, fault: str) -> None:
    async def body(world: World) -> None:
        ids = prompt_of(world)
        world.decode.dies = fault
        if fault == "after-headers":
            world.decode.dies_after = 0
        _, events = await stream(world, path, **{LIMITS[path]: 9})
        assert streamed_text(events) == answer_text(ids, 9)
        response, answer = await world.post(path, BODIES[path])
        assert response.status == 200 and text_in(path, answer) == answer_text(ids)

    in_world(body, spare=True)


@BOTH
@pytest.mark.parametrize("dies_after", [1, 4])
@pytest.mark.parametrize("fault", ["mid-stream", "mid-event", "error-event", "early-end"])
def test_a_stream_that_breaks_ends_with_an_error_of_its_api(
    in_world: InWorld, path: str, fault: str, dies_after: int
) -> None:
    async def body(world: World) -> None:
        ids = prompt_of(world)
        world.decode.dies, world.decode.dies_after = fault, dies_after
        _, events = await stream(world, path, **{LIMITS[path]: 9})
        assert streamed_text(events) == answer_text(ids, dies_after)
        last = events[-1]
        assert last["type"] == "error"
        if fault != "error-event" and path == MESSAGES:
            assert last["error"]["type"] == "api_error" and "decode" in last["error"]["message"]
        if fault != "error-event" and path == RESPONSES:
            assert last["code"] == "server_error" and "decode" in last["message"]
            assert last["sequence_number"] == events[-2]["sequence_number"] + 1
        assert await world.metric('prfaas_gateway_continuations_total{outcome="parameters"}') == 1
        # Only a connection that breaks says that the engine, and its cache with it, is gone.
        assert world.plane.suspected == ([] if fault == "error-event" else [("decode", fault != "early-end")])

    in_world(body, spare=True)


@pytest.mark.slow("waits for time limits of connections")
@BOTH
def test_a_deadline_ends_a_stream_with_an_error_of_its_api(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        world.decode.chunk_s = 0.5
        sent = BODIES[path] | {"stream": True, LIMITS[path]: 200}
        async with world.client.post(path, json=sent, headers={"x-request-timeout": "3"}) as response:
            assert response.status == 200
            last = parsed(await response.read())[-1]
        assert last["type"] == "error"
        if path == MESSAGES:
            assert last["error"]["type"] == "timeout_error"
        else:
            assert "x-request-timeout" in last["message"] and last["sequence_number"] > 2

    in_world(body)


@BOTH
def test_what_comes_before_the_first_token_binds_no_stream_to_its_engine(
    in_world: InWorld, path: str
) -> None:
    async def body(world: World) -> None:
        ids = prompt_of(world)
        world.decode.dies, world.decode.dies_after = "mid-stream", 0
        _, events = await stream(world, path, **{LIMITS[path]: 9})
        assert streamed_text(events) == answer_text(ids, 9)
        begins = [event["type"] for event in events].count(events[0]["type"])
        assert begins == 1 and world.plane.suspected == [("decode", True)]
        if path == RESPONSES:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))

    in_world(body, spare=True)


@BOTH
def test_errors_before_the_answer_are_such_as_its_clients_read(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        for wrong, status in (({"model": "none"}, 404), ({"vllm_xargs": nested(80)}, 400)):
            response, answer = await world.post(path, BODIES[path] | wrong)
            assert response.status == status
            if path == MESSAGES:
                kind = {404: "not_found_error", 400: "invalid_request_error"}[status]
                assert answer["type"] == "error" and answer["error"].keys() == {"type", "message"}
                assert answer["error"]["type"] == kind
            else:
                assert answer["error"]["code"] == status
        async with world.client.post(f"{MESSAGES}/none", json={}) as response:
            assert response.status == 404 and (await response.json())["error"]["type"] == "not_found_error"

    in_world(body)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(("field", "value"), [("previous_response_id", "resp_1"), ("background", True)])
def test_what_one_engine_alone_would_know_is_refused(in_world: InWorld, field: str, value: Any) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post(RESPONSES, BODIES[RESPONSES] | {field: value, "store": True})
        assert response.status == 400 and answer["error"]["param"] == field
        assert field in answer["error"]["message"]
        assert world.decode.generated() == []

    in_world(body)


def test_responses_are_not_stored_and_not_served_again(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.post(RESPONSES, BODIES[RESPONSES] | {"store": True})
        assert world.decode.generated()[0].body["store"] is False
        for method, path in (("GET", "/resp_x"), ("DELETE", "/resp_x"), ("POST", "/resp_x/cancel")):
            async with world.client.request(method, RESPONSES + path) as response:
                assert response.status == 404

    in_world(body)


@BOTH
def test_steering_fields_do_not_pass(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        steering = {"kv_transfer_params": {"do_remote_prefill": True}, "cache_salt": "x", "priority": -5}
        headers = {"X-Request-Id": "mine", "x-data-parallel-rank": "3", "x-api-key": "secret"}
        response, _ = await world.post(
            path, BODIES[path] | steering | {"request_id": "resp_mine"}, headers=headers
        )
        assert response.status == 200
        (seen,) = world.decode.generated()
        assert seen.body["kv_transfer_params"].keys() <= {"prfaas", "prompt_token_ids"}
        assert not seen.body.keys() & {"cache_salt", "priority", "request_id"}
        assert "mine" not in seen.headers.values()
        assert not {name.lower() for name in seen.headers} & {"x-data-parallel-rank", "x-api-key"}

    in_world(body)


@BOTH
def test_whole_answers_keep_no_transfer_parameters(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        _, answer = await world.post(path, BODIES[path] | {"leak": True})
        assert answer["kv_transfer_params"] is None

    in_world(body)


@BOTH
def test_tools_thoughts_and_calls_are_offloaded_by_the_ids_that_an_engine_renders(
    in_world: InWorld, path: str
) -> None:
    async def body(world: World) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
        unusual: dict[str, Any] = {
            RESPONSES: {
                "tools": [{"type": "web_search", "name": "f"}],
                "input": [{"role": "user", "content": WORDS}, call, result],
            },
            MESSAGES: {"thinking": {"type": "disabled"}},
        }[path]
        response, _ = await world.post(path, BODIES[path] | unusual)
        assert response.status == 200 and route_of(response)["reason"] == "long"
        (asked,) = (seen for seen in world.decode.rendered() if seen.path == f"{path}/render")
        assert {name: asked.body[name] for name in unusual} == unusual
        assert len(world.decode.loaded) == 1

    in_world(body)


@BOTH
def test_what_an_engine_does_not_render_it_refuses_itself(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post(path, BODIES[path] | {"temperature": -1})
        assert response.status == 400 and route_of(response)["reason"] == "refused"
        assert "temperature" in answer["error"]["message"]
        assert await world.metric('prfaas_gateway_direct_total{reason="refused"}') == 1

    in_world(body)


@pytest.mark.slow("waits for time limits of connections")
@BOTH
def test_an_answer_that_does_not_fit_is_the_engines_to_refuse(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post(path, BODIES[path] | {LIMITS[path]: 3900})
        assert route_of(response)["reason"] == "length"
        (seen,) = world.decode.generated()
        assert "kv_transfer_params" not in seen.body

    in_world(body)


@BOTH
def test_n_is_no_field_of_these(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post(path, BODIES[path] | {"n": 3})
        assert response.status == 200 and route_of(response)["route"] == "offload"
        sealed = world.decode.generated()[-1].body["kv_transfer_params"]["prfaas"]
        # Staging that waits for two more loads would be held until its time to live.
        assert Ticket.unseal(sealed, world.decode.key, time.time()).attributes.uses == 1

    in_world(body)


def test_tokenizer_routes_are_forwarded(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        _, tokens = await world.post("/tokenize", {"prompt": "abc", "cache_salt": "x", "model": "stand-in"})
        assert tokens["tokens"] == world.decode.tokenizer.encode("abc").ids
        _, text = await world.post("/detokenize", {"tokens": tokens["tokens"]})
        assert text == {"prompt": "abc"}
        _, count = await world.post(f"{MESSAGES}/count_tokens", BODIES[MESSAGES])
        assert count == {"input_tokens": len(prompt_of(world))}
        seen = [s for s in world.decode.seen if any(name.lower() == "x-request-id" for name in s.headers)]
        assert len(seen) == 3 and not any("cache_salt" in s.body for s in seen)
        # A tokenizer's answer says nothing about the time to a first token.
        assert await world.metric("prfaas_gateway_ttft_seconds_count") == 0
        response, answer = await world.post("/tokenize", {"prompt": "abc", "model": "none"})
        assert response.status == 404 and answer["error"]["param"] == "model"

    in_world(body, tenant_header="x-tenant")


@BOTH
def test_what_the_engine_would_refuse_is_refused_before_anything_moves(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        wrong = BODIES[path] | {"temperature": -1, LIMITS[path]: 9}
        for body in (wrong, wrong | {"stream": True}):
            response, answer = await world.post(path, body)
            assert response.status == 400 and "temperature" in answer["error"]["message"]
        assert world.remote.generated() == [] and world.decode.loaded == []
        # What is unusual, but taken, goes its way.
        response, _ = await world.post(path, BODIES[path] | {"top_k": -1, "watermarking": True})
        assert response.status == 200 and route_of(response)["route"] == "offload"

    in_world(body)


def test_a_tenants_salt_goes_to_both_hops(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for path in (RESPONSES, MESSAGES):
            response, _ = await world.post(path, BODIES[path], headers={"x-tenant": path})
            assert response.status == 200 and route_of(response)["route"] == "offload"
        salts = [s.body["cache_salt"] for engine in (world.remote, world.decode) for s in engine.generated()]
        assert len(set(salts)) == 2 and salts[:2] == salts[2:]

    in_world(body, tenant_header="x-tenant")
