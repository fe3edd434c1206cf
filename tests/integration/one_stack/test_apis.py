"""`/v1/responses` and `/v1/messages` on real vLLM: the text of a plain engine, with the KV of another one."""

import json
import urllib.request
from typing import Any

import pytest

from ..stack import MODEL, TENANT_HEADER, DemoAnswer, Stack, call

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("long prompts over a link on which they take a while"),
    pytest.mark.timeout(1800),
]

TOKENS = 20
LOADED = "vllm:prfaas_bytes_loaded_total"
SYSTEM = "Answer with what is asked for, and nothing else."
TOOL = {
    "name": "pick",
    "description": "Pick a colour.",
    "input_schema": {"properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
}


def words(seed: int) -> str:
    return "".join(chr(32 + (seed + i * 7) % 90) for i in range(3000))


def ask(stack: Stack, path: str, body: dict[str, Any], tenant: str) -> tuple[DemoAnswer, float]:
    """The gateway's answer to one tenant, who has no cached prefix, and the bytes of KV that the decode engine loaded
    for it."""
    before = stack.metric("home-decode-0", LOADED)
    answer = call(stack.url("gateway", path), {"model": MODEL, **body}, headers={TENANT_HEADER: tenant})
    return answer, stack.metric("home-decode-0", LOADED) - before


def events(stack: Stack, path: str, body: dict[str, Any], tenant: str) -> tuple[str, list[Any]]:
    """The route and the data of a stream's events."""
    request = urllib.request.Request(
        stack.url("gateway", path),
        headers={"Content-Type": "application/json", TENANT_HEADER: tenant},
        data=json.dumps({"model": MODEL, "stream": True, **body}).encode(),
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        raw = answer.read().decode()
        route = answer.headers["x-prfaas-route"]
    found = []
    for event in raw.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return route, found


def plain_text(stack: Stack, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, int]:
    """What a plain engine writes after these messages with the same split, and how long the prompt is."""
    tokens = call(stack.url("gateway", "/tokenize"), {"model": MODEL, "messages": messages, **fields}).body[
        "tokens"
    ]
    reference = stack.reference(tokens, TOKENS, salt=f"apis {len(tokens)}")
    assert reference.status == 200, reference.body
    said = call(stack.url("gateway", "/detokenize"), {"model": MODEL, "tokens": reference.token_ids[1:]})
    assert said.status == 200, said.body
    return said.body["prompt"], len(tokens)


def test_a_long_response_is_offloaded_and_says_what_a_plain_engine_says(stack: Stack) -> None:
    said = words(1)
    expected, prompt_tokens = plain_text(
        stack, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
    )
    body = {
        "instructions": SYSTEM,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": said}]}],
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    answer, loaded_bytes = ask(stack, "/v1/responses", body, "response")
    assert answer.status == 200, answer.body
    assert answer.route["route"] == "offload" and loaded_bytes > 0
    assert answer.body["usage"]["input_tokens"] == prompt_tokens
    (item,) = answer.body["output"]
    assert item["content"][0]["text"] == expected
    route, told = events(stack, "/v1/responses", body, "response streamed")
    assert route.startswith("offload")
    deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert told[0]["type"] == "response.created" and told[-1]["type"] == "response.completed"
    assert told[-1]["response"]["usage"] == answer.body["usage"]
    assert told[-1]["response"]["kv_transfer_params"] is None


def test_a_long_message_is_offloaded_and_says_what_a_plain_engine_says(stack: Stack) -> None:
    said = words(2)
    expected, prompt_tokens = plain_text(
        stack, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
    )
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    body = {
        "system": [billing, {"type": "text", "text": SYSTEM}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": said}]}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    answer, loaded_bytes = ask(stack, "/v1/messages", body, "message")
    assert answer.status == 200, answer.body
    assert answer.route["route"] == "offload" and loaded_bytes > 0
    assert answer.body["content"] == [{"type": "text", "text": expected}]
    # Anthropic counts what came from a cache besides.
    usage = answer.body["usage"]
    cached = (usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    assert usage["input_tokens"] + sum(cached) == prompt_tokens
    counted, _ = ask(
        stack, "/v1/messages/count_tokens", {k: body[k] for k in ("system", "messages")}, "message"
    )
    assert counted.body["input_tokens"] == prompt_tokens
    route, told = events(stack, "/v1/messages", body, "message streamed")
    assert route.startswith("offload")
    deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(deltas) == expected
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"


def test_a_long_message_with_tools_is_offloaded_too(stack: Stack) -> None:
    call_id = "toolu_1"
    body = {
        "system": SYSTEM,
        "messages": [
            {"role": "user", "content": words(3)},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I pick."},
                    {"type": "tool_use", "id": call_id, "name": "pick", "input": {"colour": "red"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call_id,
                        "content": [{"type": "text", "text": "ok"}],
                    },
                    {"type": "text", "text": "Again."},
                ],
            },
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    answer, loaded_bytes = ask(stack, "/v1/messages", body, "tools")
    assert answer.status == 200, answer.body
    # The decode engine made the same ids of it by itself, or it would not have taken the KV.
    assert answer.route["route"] == "offload" and loaded_bytes > 0


def test_a_long_response_with_tools_is_offloaded_too(stack: Stack) -> None:
    tool = {
        "type": "function",
        "name": "pick",
        "description": "d",
        "parameters": TOOL["input_schema"],
        "strict": None,
    }
    asked = {"role": "user", "content": words(4)}
    body = {"tools": [tool], "max_output_tokens": TOKENS, "temperature": 0}
    calls = [
        {"type": "function_call", "call_id": "c1", "name": "pick", "arguments": '{"colour": "red"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ]
    # The tiny model's template writes a call as JSON, and the order of its fields is another one here than in chats.
    for said in ([asked], [asked, *calls]):
        answer, loaded_bytes = ask(stack, "/v1/responses", body | {"input": said}, f"response {len(said)}")
        assert answer.status == 200, answer.body
        assert answer.route["route"] == "offload" and loaded_bytes > 0


def test_refusals_have_the_form_of_their_api(stack: Stack) -> None:
    ours, _ = ask(stack, "/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "refused")
    assert ours.status == 400 and ours.body["error"]["param"] == "previous_response_id"
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    theirs, _ = ask(stack, "/v1/messages", message | {"temperature": -1}, "refused")
    assert theirs.status == 400 and theirs.body["type"] == "error"
    assert "temperature" in theirs.body["error"]["message"]
    other = call(stack.url("gateway", "/v1/messages"), message | {"model": "none"})
    assert other.status == 404 and other.body["error"]["type"] == "not_found_error"
    stack.wait_clean()
