"""Fields of a request's body that every engine takes: with no others it needs no engine's word, nor an engine's ids."""

from collections.abc import Callable, Mapping
from typing import Any

from prfaas.serving.gateway.bodies import Json

# vLLM's `VLLM_MAX_STOP_STRINGS`.
_MOST_STOPS = 4


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < high


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _anything(_value: Any) -> bool:
    return True


def _stops(value: Any) -> bool:
    if type(value) is str:
        return bool(value)
    return type(value) is list and len(value) <= _MOST_STOPS and all(type(s) is str and s for s in value)


_flag, _text, _limit = _of(bool), _of(str), _whole(1, 1 << 31)

# Values that vLLM (0.32: `SamplingParams._verify_args`, the two protocol.py) takes whatever else a request says, and
# whatever the engine's own settings are. That a prompt and its answer are not too long is found out with its tokens.
_USUAL: dict[str, Callable[[Any], bool]] = {
    "model": _text,
    "prompt": _anything,
    "messages": _anything,
    "input": _anything,
    "instructions": _anything,
    "system": _anything,
    "add_special_tokens": _flag,
    "add_generation_prompt": lambda value: value is True,
    "max_tokens": _limit,
    "max_completion_tokens": _limit,
    "max_output_tokens": _limit,
    "n": lambda value: value == 1,
    "stream": _flag,
    "temperature": _number(0, 2),
    "top_p": _number(1e-3, 1),
    "top_k": _whole(-1, 1 << 31),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(1e-3, 1e3),
    "seed": _whole(-(1 << 63), 1 << 63),
    "stop": _stops,
    "stop_sequences": lambda value: type(value) is list and _stops(value),
    "metadata": lambda value: type(value) is dict and all(map(_text, value.values())),
    "store": _flag,
    "thinking": lambda value: type(value) is dict and value.get("type") in ("adaptive", "enabled"),
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "include_stop_str_in_output": _flag,
    "return_token_ids": _flag,
    "echo": lambda value: value is False,
    "logprobs": lambda value: value is False,
    "response_format": lambda value: value == {"type": "text"},
    "user": _text,
}

FORM_FIELDS = frozenset(
    (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "n",
        "stream",
        "stream_options",
    )
)
"""How long an answer is, how many there are, and how they come: `/render` says all that an engine has against these."""


def unusual_fields(body: Mapping[str, Any]) -> Json:
    """The fields of `body` whose values an engine might refuse, or which change what it makes of a conversation."""
    unusual = {
        name: value
        for name, value in body.items()
        if value is not None and not (name in _USUAL and _USUAL[name](value))
    }
    options, least = unusual.get("stream_options"), unusual.get("min_tokens")
    # Only streams have options.
    if body.get("stream") is True and options in ({"include_usage": True}, {"include_usage": False}):
        del unusual["stream_options"]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if type(least) is type(limit) is int and 0 <= least <= limit:
        del unusual["min_tokens"]
    return unusual
