"""Whether the decode engine would take a request, found out before KV moves for it.

The gateway judges nothing itself, since its rules would not be vLLM's. Where every field of a request is a usual one,
nothing is asked. All others are rendered by an engine, which refuses there what is wrong in form (vLLM 0.32). What
`/render` does not look at are grammars, the vocabulary's bounds and settings of the engine: of those the decode engine
gets the same request with a prompt of two tokens and for one token of answer. Where it refuses that, the whole request
goes to it without a prefill elsewhere: so the client reads vLLM's own words about its own request, and if only the
short prompt was at fault, it is served all the same.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from prfaas.core.scheduling.decision import Decision
from prfaas.serving.gateway.bodies import ApiError, Json, decode_body, dump_body
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.prompts.prompt import DirectPrompt, Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt

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


# A refusal comes within milliseconds, since vLLM checks before it queues. Only a token may take longer, and then the
# request was not refused.
_PATIENCE_S = 1.0
_KEPT_WORDS = 4096
_PROMPT_TOKENS = 2


class Validation:
    """Asks decode engines about requests with unusual fields. What they say of such fields is remembered."""

    def __init__(self, context: GatewayContext) -> None:
        self._plane = context.plane
        self._client = context.client
        # All engines of a deployment have the same settings, so one's word is good for all.
        self._words: OrderedDict[bytes, bool] = OrderedDict()

    async def checked(
        self, request: ServingRequest, prompt: TokenizedPrompt | DirectPrompt, decision: Decision
    ) -> TokenizedPrompt | DirectPrompt:
        """`prompt`, or why it is to go to its decode engine as it is: that would refuse the request."""
        if (
            isinstance(prompt, DirectPrompt)
            or not decision.transfers
            or request.unusual.keys() <= FORM_FIELDS
        ):
            return prompt
        key = _fingerprint(request)
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


def question(request: ServingRequest, prompt: TokenizedPrompt) -> bytes:
    """The body that asks for next to nothing, with all else as the client has it. Raises ApiError."""
    body = {name: value for name, value in request.body.items() if name not in FORM_FIELDS}
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


def _fingerprint(request: ServingRequest) -> bytes:
    """What an engine's word depends on. Raises ApiError."""
    fields = {name: value for name, value in request.unusual.items() if name not in FORM_FIELDS}
    said = {"to": request.endpoint, "model": request.model, "fields": fields}
    return hashlib.blake2b(dump_body(said), digest_size=16).digest()
