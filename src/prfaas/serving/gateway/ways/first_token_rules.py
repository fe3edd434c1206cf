"""Which requests may have their first token from the engine that prefills."""

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import orjson

from prfaas.core.deployment import Deployment
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.continuing import tokens_left
from prfaas.serving.gateway.prompts.prompt import Endpoint, answer_limit
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.ways.first_token import FirstTokenAsk

logger = logging.getLogger(__name__)

# With these vLLM writes chats in another form, or counts and samples by rules that the gateway does not know.
_SHAPING_ARGS = (
    "--reasoning-parser",
    "--reasoning-parser-plugin",
    "--response-role",
    "--generation-config",
    "--override-generation-config",
    "--enable-force-include-usage",
)
# vLLM takes these as defaults from the checkpoint. The penalties count the tokens of the answer alone, and to the
# decode engine the first token is one of the prompt's.
_SHAPING_DEFAULTS = ("frequency_penalty", "presence_penalty")
_DEFAULT_LIMIT = "max_new_tokens"
_DEFAULTS_FILE = "generation_config.json"


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


# With these, a text completion of the same prompt is sampled as the answer would be.
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
# These are worked into such a request, or state the default.
_SETTLED: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "prompt": _anything,
    "messages": _anything,
    "add_special_tokens": _flag,
    "add_generation_prompt": lambda value: value is True,
    "stream": _flag,
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


def is_plain(endpoint: Endpoint, body: Json) -> bool:
    """Whether an answer to `body` is its text alone, and a text completion of the same prompt has the same.

    A list of what is known to be harmless: any other field that has a value, and it is not.
    """
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return False
    for name, value in body.items():
        if value is None:
            continue
        harmless = _KEPT.get(name) or _SETTLED.get(name)
        if harmless is None or not harmless(value):
            return False
    return body.get("seed") is None or body.get("temperature") == 0


def sampling_fields(body: Json) -> Json:
    """The fields of `body` that have an engine sample as it would for `body` itself."""
    return {name: body[name] for name in _KEPT if body.get(name) is not None}


class FirstTokenRules:
    """Decides for each request, by what is known to be exact: anything else takes the other way."""

    def __init__(self, context: GatewayContext) -> None:
        self._running = context.running
        self._metrics = context.metrics
        self._max_model_len = context.max_model_len
        self.follow()

    def follow(self) -> None:
        """Look at the file, and at what the model's own defaults are, once."""
        deployment = self._running.current
        self._wanted = deployment.gateway.first_token == "prefill"
        defaults = _checkpoint_defaults(deployment) if self._wanted else {}
        setting = _shaping_setting(deployment, defaults) if self._wanted else None
        self._limits_by_default = defaults.get(_DEFAULT_LIMIT) is not None
        self._settings_allow = setting is None
        if setting is not None:
            logger.warning("first tokens come from decode engines all the same: the engines have %s", setting)

    def ask(self, request: ServingRequest, prompt: TokenizedPrompt) -> FirstTokenAsk | None:
        """What to ask the prefill engine for; None: the decode engine samples the first token."""
        if not self._wanted:
            return None
        reason = self._refusal(request)
        if reason is not None:
            self._metrics.first_tokens.labels(reason).inc()
            return None
        body, stop = request.body, request.body.get("stop")
        left = tokens_left(request.endpoint, body, len(prompt.token_ids), 0, self._max_model_len)
        sampling = sampling_fields(body)
        if body.get("min_tokens") is not None:
            sampling["min_tokens"] = body["min_tokens"]
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return FirstTokenAsk(sampling, stops, left)

    def shows_first(self, request: ServingRequest) -> bool:
        """Whether the client would see a first token of the prefill before the KV has moved: what routing goes by.

        An answer in one piece shows nothing before its last token.
        """
        streams = request.body.get("stream") is True
        return self._wanted and streams and self._refusal(request) is None

    def _refusal(self, request: ServingRequest) -> str | None:
        """Why the first token can't come from the prefill, in one word."""
        if request.endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
            return "endpoint"
        if not self._settings_allow:
            return "settings"
        is_unlimited = (
            request.endpoint is Endpoint.CHAT and answer_limit(request.endpoint, request.body) is None
        )
        if is_unlimited and self._limits_by_default:
            return "settings"
        # The decode engine continues the answer as another one would after a fault.
        return None if is_plain(request.endpoint, request.body) else "parameters"


def _arguments(deployment: Deployment) -> Iterator[str]:
    """The names of the arguments that the file gives engines."""
    of_clusters = (cluster.extra_args for cluster in deployment.clusters)
    for argument in chain(deployment.engine.extra_args, *of_clusters):
        yield argument.partition("=")[0]


def _shaping_setting(deployment: Deployment, defaults: Json) -> str | None:
    """The setting of the engines or of the checkpoint that rules first tokens from the prefill out."""
    for name in _arguments(deployment):
        if name in _SHAPING_ARGS:
            return name
    return next((f"{_DEFAULTS_FILE}: {name}" for name in _SHAPING_DEFAULTS if defaults.get(name)), None)


def _checkpoint_defaults(deployment: Deployment) -> Json:
    """What the checkpoint has vLLM take where a request says nothing."""
    try:
        defaults = orjson.loads((deployment.model.path / _DEFAULTS_FILE).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return defaults if isinstance(defaults, dict) else {}
