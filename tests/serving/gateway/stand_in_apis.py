"""What the stand-in says on `/v1/responses` and `/v1/messages`: the bodies and events of vLLM 0.32, in small."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATING = ("/v1/completions", "/v1/chat/completions", RESPONSES, MESSAGES)


def speaks(path: str) -> bool:
    """Whether a path is answered as these APIs do."""
    return path in (RESPONSES, MESSAGES)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


FORWARDED = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
)


def refusing(handler: Handler) -> Handler:
    """What a handler can't read is refused."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return web.json_response({"error": {"message": type(error).__name__, "code": 400}}, status=400)

    return handle


def as_chat(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The chat that an engine makes of a body; other bodies as they are."""
    if path == RESPONSES:
        said = body["input"]
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = [_message(item) for item in items]
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        told = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {name: tool.get(name) for name in told}}
            for tool in body.get("tools") or ()
        ]
        return {**body, "messages": messages, "tools": tools}
    if path.startswith(MESSAGES):
        messages = [{"role": m["role"], "content": _text(m["content"])} for m in body["messages"]]
        if body.get("system"):
            messages.insert(0, {"role": "system", "content": _text(body["system"], "")})
        return {**body, "messages": messages}
    return body


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        call = {"id": item["call_id"], "function": {"name": item["name"]}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item["output"]}
    return {"role": item["role"], "content": _text(item["content"])}


def _text(content: Any, joint: str = "\n") -> str:
    if isinstance(content, str):
        return content
    # A call has none, and a tool's result stands elsewhere.
    texts = (part.get("text") or str(part.get("content", "")) for part in content)
    return joint.join(t for t in texts if t and not t.startswith("x-anthropic-billing-header"))


def answer_limit(path: str, body: dict[str, Any]) -> int | None:
    limit: int | None = body.get("max_output_tokens" if path == RESPONSES else "max_tokens")
    return limit


def whole(path: str, body: dict[str, Any], ids: list[int], text: str) -> dict[str, Any]:
    usage = {"input_tokens": len(ids), "output_tokens": len(text)}
    params = {"leaked": "secret"} if body.get("leak") else None
    if path == MESSAGES:
        return {
            "id": "chatcmpl-x",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "stop_reason": "max_tokens",
            "usage": usage,
        } | ({"kv_transfer_params": params} if params else {})
    return _response("incomplete", text, usage) | {
        "kv_transfer_params": params,
        "input_messages": [{"message": "", "tokens": ids}] if body.get("enable_response_messages") else None,
    }


def _response(status: str, text: str, usage: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": "msg_x", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_x",
        "object": "response",
        "status": status,
        "output": [item] if text else [],
        "usage": usage,
    }


def events(path: str, body: dict[str, Any], ids: list[int], text: str) -> Iterator[tuple[bytes, bool]]:
    """Every event of a streamed answer, and whether it is one with a token."""
    for name, data, is_token in (_messages_events if path == MESSAGES else _responses_events)(
        body, ids, text
    ):
        yield f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode(), is_token


def _messages_events(_body: Any, ids: list[int], text: str) -> Iterator[tuple[str, Any, bool]]:
    def event(name: str, is_token: bool = False, **fields: Any) -> tuple[str, Any, bool]:
        return name, {"type": name, **fields}, is_token

    message = {"id": "x", "type": "message", "role": "assistant", "content": []}
    yield event("message_start", message=message | {"usage": {"input_tokens": len(ids), "output_tokens": 0}})
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for character in text:
        yield event("content_block_delta", True, index=0, delta={"type": "text_delta", "text": character})
    yield event("content_block_stop", index=0)
    usage = {"input_tokens": len(ids), "output_tokens": len(text)}
    yield event("message_delta", delta={"stop_reason": "max_tokens", "stop_sequence": None}, usage=usage)
    yield event("message_stop")


def _responses_events(body: dict[str, Any], ids: list[int], text: str) -> Iterator[tuple[str, Any, bool]]:
    number = -1

    def event(name: str, is_token: bool = False, **fields: Any) -> tuple[str, Any, bool]:
        nonlocal number
        number += 1
        return name, {**fields, "sequence_number": number, "type": name}, is_token

    yield event("response.created", response=_response("in_progress", "", None))
    yield event("response.in_progress", response=_response("in_progress", "", None))
    # vLLM says that there is a message when it has the first token of it.
    yield event("response.output_item.added", True, output_index=0, item={"type": "message", "id": "msg_x"})
    for index, character in enumerate(text):
        yield event("response.output_text.delta", index > 0, item_id="msg_x", delta=character)
    yield event("response.output_text.done", item_id="msg_x", text=text)
    usage = {"input_tokens": len(ids), "output_tokens": len(text)}
    params = {"leaked": "secret"} if body.get("leak") else None
    yield event(
        "response.completed", response=_response("incomplete", text, usage) | {"kv_transfer_params": params}
    )


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events, whose names must be their types."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def write(
    response: web.StreamResponse,
    told: Iterator[tuple[bytes, bool]],
    before_token: Callable[[int], Any],
) -> None:
    """Write a stream; `before_token` is awaited with each token's index and says whether the stream ends there."""
    index = 0
    for event, is_token in told:
        if is_token:
            if await before_token(index):
                return
            index += 1
        await response.write(event)
