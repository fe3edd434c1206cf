"""Whether the decode engine would take a request, found out before KV moves for it.

The gateway judges nothing itself, since its rules would not be vLLM's. Where every field of a request has a value that
no engine refuses, nothing is asked. Else the decode engine gets the same request with a prompt of two tokens and for
one token of answer. Where it refuses that, the whole request goes to it without a prefill elsewhere: so the client
reads vLLM's own words about its own request, and if only the short prompt was at fault, it is served all the same.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from prfaas.core.scheduling import Decision
from prfaas.serving.gateway.bodies import ApiError, Json, decode_body, dump_body
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.prompts.prompt import DEFAULT_COMPLETION_TOKENS, DirectPrompt, Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt

# A refusal comes within milliseconds, since vLLM checks before it queues. Only a token may take longer, and then the
# request was not refused.
_PATIENCE_S = 1.0
_KEPT_WORDS = 4096
_PROMPT_TOKENS = 2

# vLLM's `VLLM_MAX_STOP_STRINGS`.
_MOST_STOPS = 4


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return type(value) is str


def _anything(_value: Any) -> bool:
    return True


def _stops(value: Any) -> bool:
    if type(value) is str:
        return bool(value)
    return type(value) is list and len(value) <= _MOST_STOPS and all(type(s) is str and s for s in value)


# Values that vLLM (0.32: `SamplingParams._verify_args`, the two protocol.py) takes whatever else a request says, and
# whatever the engine's own settings are. That prompts can be understood has been found out before.
_SAFE: dict[str, Callable[[Any], bool]] = {
    "model": _text,
    "prompt": _anything,
    "messages": _anything,
    "input": _anything,
    "instructions": _anything,
    "system": _anything,
    "add_special_tokens": _flag,
    "add_generation_prompt": lambda value: value is True,
    "temperature": _number(0, 2),
    "top_p": _number(1e-3, 1),
    "top_k": lambda value: type(value) is int and -1 <= value < 1 << 31,
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(1e-3, 1e3),
    "seed": lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63,
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
# How long the answer is and how it comes: of these the question has its own.
_FORM = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stream", "stream_options")


class Validation:
    """Asks decode engines about requests with unusual fields. What they say of such fields is remembered."""

    def __init__(self, context: GatewayContext) -> None:
        self._plane = context.plane
        self._client = context.client
        self._metrics = context.metrics
        self._max_model_len = context.max_model_len
        # All engines of a deployment have the same settings, so one's word is good for all.
        self._words: OrderedDict[bytes, bool] = OrderedDict()

    async def checked(
        self, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt, decision: Decision
    ) -> TokenizedPrompt | DirectPrompt:
        """`prompt`, or why it is to go to its decode engine as it is: that would refuse the request."""
        if isinstance(prompt, DirectPrompt) or not decision.transfers:
            return prompt
        if not _has_safe_form(request, self._max_model_len):
            return DirectPrompt("refused")
        unusual = unusual_fields(request.body)
        if not unusual:
            return prompt
        key = _fingerprint(request, unusual)
        taken = self._words.get(key)
        if taken is None:
            taken = await self._ask(request, prompt, decision)
            if taken is None:
                return prompt
            self._words[key] = taken
            if len(self._words) > _KEPT_WORDS:
                self._words.popitem(last=False)
        else:
            self._words.move_to_end(key)
        return prompt if taken else DirectPrompt("refused")

    async def _ask(self, request: ServingRequest, prompt: TokenizedPrompt, decision: Decision) -> bool | None:
        """Whether the engine takes the fields of `request`; None when it does not say."""
        engine = self._plane.members.instance(decision.decode)
        try:
            body = question(request, prompt)
            with self._plane.cluster_state.planned(decision):
                await self._client.call(engine, request.endpoint.path, body, request.headers, _PATIENCE_S)
        except ApiError:
            return False
        except EngineCallError as error:
            return False if error.is_clients_fault else None
        return True


def unusual_fields(body: Mapping[str, Any]) -> Json:
    """The fields of `body`, other than those of its form, whose values an engine might refuse."""
    unusual = {}
    for name, value in body.items():
        is_safe = _SAFE.get(name)
        if value is None or name in _FORM or (is_safe is not None and is_safe(value)):
            continue
        if name == "n" and (value == 1 or _is_sampled(body)):
            continue
        unusual[name] = value
    return unusual


def question(request: ServingRequest, prompt: TokenizedPrompt) -> bytes:
    """The body that asks for next to nothing, with all else as the client has it. Raises ApiError."""
    body = {name: value for name, value in request.body.items() if name not in _FORM}
    ids = prompt.token_ids[:_PROMPT_TOKENS]
    if request.endpoint is Endpoint.RESPONSES:
        body |= {"input": ".", "instructions": None, "max_output_tokens": 1}
        return decode_body(body, {}, ids, request.salt)
    body["max_tokens"] = 1
    if request.endpoint is Endpoint.MESSAGES:
        # A budget for thoughts must be below the limit.
        body |= {"system": None, "thinking": None}
    if request.endpoint is not Endpoint.COMPLETIONS:
        # vLLM takes these ids in place of what it would render, tools and all.
        body["messages"] = [{"role": "user", "content": "."}]
        return decode_body(body, {}, ids, request.salt)
    body["prompt"] = list(ids)
    return decode_body(body, {}, None, request.salt)


def _is_sampled(body: Mapping[str, Any]) -> bool:
    """Several answers at temperature 0 are refused, and a model may have its own default."""
    return _number(0.01, 2)(body.get("temperature"))


def _has_safe_form(request: ServingRequest, max_model_len: int) -> bool:
    """Whether the fields that the question does not carry are such as no engine refuses."""
    body, limit = request.body, math.inf
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if value is not None:
            if type(value) is not int or not 1 <= value <= max_model_len:
                return False
            limit = value
    if limit == math.inf and request.endpoint is Endpoint.COMPLETIONS:
        limit = DEFAULT_COMPLETION_TOKENS
    least = body.get("min_tokens")
    if least is not None and (type(least) is not int or not 0 <= least <= limit):
        return False
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not _flag(stream):
        return False
    if options is None:
        return True
    known = ("include_usage", "continuous_usage_stats")
    return (
        stream is True
        and type(options) is dict
        and all(name in known and _flag(value) for name, value in options.items())
    )


def _fingerprint(request: ServingRequest, unusual: Json) -> bytes:
    """What an engine's word depends on; of `n` that is the temperature too. Raises ApiError."""
    temperature = request.body.get("temperature") if "n" in unusual else None
    said = {"to": request.endpoint, "model": request.model, "fields": unusual, "temperature": temperature}
    return hashlib.blake2b(dump_body(said), digest_size=16).digest()
