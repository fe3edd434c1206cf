"""Bodies of `/v1/responses` and `/v1/messages` as a stand-in reads and writes them, in the shapes of vLLM.

Read are texts, limits and what the gateway adds. Instructions within a conversation stay where they are.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import orjson

from prfaas.serving.engines.synthetic.api_bodies import (
    BodyError,
    GenerationRequest,
    ServedModels,
    chat_ids,
    parse_generation,
)
from prfaas.serving.engines.synthetic.engine import GeneratedAnswer
from prfaas.serving.engines.synthetic.text import Text

# Claude Code begins its system prompt with a block of this; vLLM leaves it out.
_BILLING_HEADER = "x-anthropic-billing-header"


def parse_response(body: dict[str, Any], models: ServedModels, text: Text) -> GenerationRequest:
    """Read a body of `/v1/responses`. Raises BodyError."""
    said = body.get("input")
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    messages += [{"role": "user", "content": said}] if isinstance(said, str) else _messages(said, "input")
    limit = body.get("max_output_tokens")
    chat = body | {"messages": messages, "max_tokens": limit, "max_completion_tokens": None, "n": None}
    # `enable_response_messages` is how vLLM tells the ids of the prompt here.
    chat["return_token_ids"] = body.get("enable_response_messages")
    return parse_generation(chat, models, text, chat=True)


def parse_message(body: dict[str, Any], models: ServedModels, text: Text) -> GenerationRequest:
    """Read a body of `/v1/messages`. Raises BodyError."""
    if body.get("max_tokens") is None:
        raise BodyError("`max_tokens` is missing.")
    chat = body | {"messages": _all_messages(body), "max_completion_tokens": None, "n": None}
    chat["return_token_ids"] = None
    return parse_generation(chat, models, text, chat=True)


def parse_count(body: dict[str, Any], text: Text) -> int:
    """How many tokens the prompt of a body of `/v1/messages/count_tokens` has. Raises BodyError."""
    return len(chat_ids({"messages": _all_messages(body)}, {}, text))


def _all_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = body.get("system") or ""
    if isinstance(system, list):
        texts = [block.get("text") for block in system if isinstance(block, dict)]
        system = "".join(t for t in texts if isinstance(t, str) and not t.startswith(_BILLING_HEADER))
    head = [{"role": "system", "content": system}] if system else []
    return head + _messages(body.get("messages"), "messages")


def _messages(said: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(said, list) or not said or not all(isinstance(item, dict) for item in said):
        raise BodyError(f"`{field}` must be a list of messages.")
    return [{"role": item.get("role"), "content": item.get("content")} for item in said]


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


class MessageWriter:
    """Writes an answer of `/v1/messages`, whole or in pieces."""

    def __init__(self, request: GenerationRequest, text: Text) -> None:
        self._request = request
        self._text = text
        self._id = f"chatcmpl-{uuid4().hex}"

    def whole(self, generations: Sequence[GeneratedAnswer]) -> bytes:
        """The answer that is not streamed."""
        text = self._text.decode(generations[0].token_ids)
        said = [{"type": "text", "text": text}]
        usage = self._usage(generations[0])
        return orjson.dumps(self._message(said) | {"stop_reason": "max_tokens", "usage": usage})

    def piece(self, _prompt: int, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """The events of what has come since the last ones; `first` also opens the answer."""
        events = b""
        if first:
            events += _event("message_start", message=self._message([]) | {"usage": self._usage(None)})
            events += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": self._text.decode(token_ids)}
        events += _event("content_block_delta", index=0, delta=delta)
        return events + (_event("content_block_stop", index=0) if last else b"")

    def end(self, generations: Sequence[GeneratedAnswer]) -> bytes:
        """The events with the count of tokens and the mark at the end."""
        stop = {"stop_reason": "max_tokens", "stop_sequence": None}
        usage = self._usage(generations[0])
        return _event("message_delta", delta=stop, usage=usage) + _event("message_stop")

    def _message(self, content: list[Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}
        return head | {"content": content, "stop_reason": None, "stop_sequence": None}

    def _usage(self, generation: GeneratedAnswer | None) -> dict[str, int]:
        """As vLLM's: what came from a cache is no part of the input."""
        prompt_tokens = len(self._request.works[0].token_ids)
        if generation is None:
            return {"input_tokens": prompt_tokens, "output_tokens": 0}
        return {
            "input_tokens": prompt_tokens - generation.cached_tokens,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": self._request.works[0].max_tokens,
        }


class ResponseItemWriter:
    """Writes an answer of `/v1/responses`, whole or in pieces."""

    def __init__(self, request: GenerationRequest, text: Text) -> None:
        self._request = request
        self._text = text
        self._ids = {"response": f"resp_{uuid4().hex}", "item": f"msg_{uuid4().hex}"}
        self._created = int(time.time())
        self._next_number = 0
        self._said = ""

    def whole(self, generations: Sequence[GeneratedAnswer]) -> bytes:
        """The answer that is not streamed."""
        return orjson.dumps(self._finished(generations[0]))

    def piece(self, _prompt: int, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """The events of what has come since the last ones; `first` also opens the answer."""
        events = b""
        place = {"item_id": self._ids["item"], "output_index": 0, "content_index": 0}
        if first:
            begun = self._response("in_progress", [])
            item = self._item("") | {"status": "in_progress", "content": []}
            events += self._event("response.created", response=begun)
            events += self._event("response.in_progress", response=begun)
            events += self._event("response.output_item.added", output_index=0, item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            events += self._event("response.content_part.added", part=part, **place)
        delta = self._text.decode(token_ids)
        self._said += delta
        events += self._event("response.output_text.delta", delta=delta, logprobs=[], **place)
        if last:
            item = self._item(self._said)
            events += self._event("response.output_text.done", text=self._said, logprobs=[], **place)
            events += self._event("response.content_part.done", part=item["content"][0], **place)
            events += self._event("response.output_item.done", output_index=0, item=item)
        return events

    def end(self, generations: Sequence[GeneratedAnswer]) -> bytes:
        """The event with the whole answer."""
        return self._event("response.completed", response=self._finished(generations[0]))

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._next_number
        self._next_number += 1
        return _event(name, sequence_number=number, **fields)

    def _finished(self, generation: GeneratedAnswer) -> dict[str, Any]:
        work = self._request.works[0]
        # Every answer ends at its limit.
        answer = self._response("incomplete", [self._item(self._text.decode(generation.token_ids))])
        answer["usage"] = {
            "input_tokens": len(work.token_ids),
            "input_tokens_details": {"cached_tokens": generation.cached_tokens},
            "output_tokens": work.max_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(work.token_ids) + work.max_tokens,
        }
        if self._request.return_token_ids:
            answer["input_messages"] = [
                {"message": "", "tokens": list(work.token_ids), "type": "raw_message_tokens"}
            ]
        return answer

    def _item(self, text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        head = {"id": self._ids["item"], "type": "message", "role": "assistant"}
        return head | {"status": "completed", "content": [part]}

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        return {
            "id": self._ids["response"],
            "object": "response",
            "created_at": self._created,
            "model": self._request.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None,
            "kv_transfer_params": None,
        }
