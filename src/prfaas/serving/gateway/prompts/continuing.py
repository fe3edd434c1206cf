"""Which answers another engine can continue, and the bodies that ask it to."""

from collections.abc import Callable, Sequence
from typing import Any

from prfaas.serving.gateway.bodies import Json, WrittenIds
from prfaas.serving.gateway.prompts.prompt import DEFAULT_COMPLETION_TOKENS, Endpoint, has_media


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _whole_number(value: Any) -> bool:
    return type(value) is int


def _flag(value: Any) -> bool:
    return type(value) is bool


def _anything(_value: Any) -> bool:
    return True


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole_number, value))


def _stops(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(s, str) for s in value))


# With these, sampling depends on the text so far alone. They go into the second request as they are.
_KEPT: dict[str, Callable[[Any], bool]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole_number,
    "min_p": _number,
    "stop": _stops,
    "stop_token_ids": _ids,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "user": lambda value: isinstance(value, str),
}
# These are worked into the second request, or state the default.
_SETTLED: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "prompt": _anything,
    "messages": _anything,
    "add_special_tokens": _flag,
    "add_generation_prompt": lambda value: value is True,
    "stream": lambda value: value is True,
    "stream_options": lambda value: (
        isinstance(value, dict) and value.keys() <= {"include_usage"} and all(map(_flag, value.values()))
    ),
    "max_tokens": _whole_number,
    "max_completion_tokens": _whole_number,
    "min_tokens": _whole_number,
    "n": lambda value: value == 1,
    "seed": _whole_number,
    "echo": lambda value: value is False,
    "logprobs": lambda value: value is False,
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "response_format": lambda value: value == {"type": "text"},
}


def can_resume(endpoint: Endpoint, body: Json) -> bool:
    """Whether the rest of the answer to `body` depends on nothing but its prompt and its text so far.

    A list of what is known to be harmless: any other field that has a value, and the stream can't be resumed. Nor can
    the streams of other APIs, whose events count what came before.
    """
    if body.get("stream") is not True or endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return False
    # What it shows is in no ids.
    if has_media(endpoint, body):
        return False
    for name, value in body.items():
        if value is None:
            continue
        harmless = _KEPT.get(name) or _SETTLED.get(name)
        if harmless is None or not harmless(value):
            return False
    # A seeded generator would have to be wound forward.
    return body.get("seed") is None or body.get("temperature") == 0


def wants_usage(body: Json) -> bool:
    """Whether the client asked for the usage at the stream's end."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def tokens_left(
    endpoint: Endpoint, body: Json, prompt_tokens: int, sent_tokens: int, max_model_len: int
) -> int:
    """How many tokens may follow the first `sent_tokens` of an answer; 0 or less: none."""
    room = max_model_len - prompt_tokens - sent_tokens
    limit = body.get("max_tokens")
    if endpoint is Endpoint.CHAT:
        limit = body.get("max_completion_tokens") or limit
    elif limit is None:
        limit = DEFAULT_COMPLETION_TOKENS
    return room if limit is None else min(room, limit - sent_tokens)


def sampling_fields(body: Json) -> Json:
    """The fields of `body` that have an engine sample as it would for `body` itself."""
    return {name: body[name] for name in _KEPT if body.get(name) is not None}


def resume_body(
    body: Json, model: str, token_ids: Sequence[int] | WrittenIds, sent_tokens: int, max_tokens: int
) -> Json:
    """A text completion that continues `token_ids`: the prompt and `sent_tokens` tokens of the answer."""
    kept = sampling_fields(body)
    if body.get("min_tokens") is not None:
        kept["min_tokens"] = max(body["min_tokens"] - sent_tokens, 0)
    if wants_usage(body):
        kept["stream_options"] = {"include_usage": True}
    return {"model": model, "prompt": token_ids, "max_tokens": max_tokens, "stream": True, **kept}
