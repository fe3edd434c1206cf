"""The first token of a stream, sampled by the engine that prefills: which streams may have it, how it is asked for, and
what is told of it."""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import orjson

from prfaas.core.bounded_file import MODEL_BYTES, file_bytes
from prfaas.core.deployment import Deployment
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.prompt import (
    Endpoint,
    answer_limit,
    stop_strings,
    tokens_left,
)
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt, is_usual

logger = logging.getLogger(__name__)

_TOKEN_ID = "token_id:"
# Stands for bytes that are no character yet.
_INCOMPLETE = "\ufffd"

NO_TEXT = "no-text"
"""The first token's text is not known before the second: it is a part of a character, or has none."""
STOP_SPANS = "stop-spans"
"""A stop string may begin in the first token and end in the second, where no engine would see all of it."""


@dataclass(frozen=True, slots=True)
class FirstTokenAsk:
    """What the prefill engine needs besides the prompt to sample the first token as the decode engine would."""

    sampling: Json
    """Fields of a text completion."""
    stops: Sequence[str] = ()
    """Stop strings."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the prefill engine has sampled, as far as it can be told: one token, or some that have a text together."""

    token_ids: tuple[int, ...]
    text: str
    """What a client reads of it: nothing of a stop string or a stop token."""
    finish_reason: str | None = None
    """None: the answer goes on."""
    stop_reason: int | str | None = None
    """The stop string or token that ended the answer; None for the model's own end."""
    prompt_details: Json | None = None
    """The usage's `prompt_tokens_details`, where the engine tells them."""

    @classmethod
    def of(cls, answer: bytes) -> "SampledTokens":
        """The token in a completion of one. Raises ValueError for an answer that is something else."""
        try:
            told = orjson.loads(answer)
            (choice,) = told["choices"]
            (name,) = choice["logprobs"]["tokens"]
            (token_id,) = array("I", (int(name.removeprefix(_TOKEN_ID)),))
            text, reason = choice["text"], choice["finish_reason"]
            details = told["usage"].get("prompt_tokens_details")
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"no first token in the prefill's answer: {type(error).__name__}") from None
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise ValueError("the prefill's answer is no whole completion of one token")
        # "length": no more tokens were asked for.
        return cls(
            (token_id,), text, None if reason == "length" else reason, choice.get("stop_reason"), details
        )

    def held(self, ask: FirstTokenAsk) -> str | None:
        """Why the client must not have it before the next token, in one word; None: it may."""
        if self.finish_reason is not None:
            return None
        if not self.text or _INCOMPLETE in self.text:
            return NO_TEXT
        return STOP_SPANS if begins_stop(self.text, ask.stops) else None


def begins_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether `text` ends with a part of a stop string that is not all of it."""
    return any(
        text.endswith(stop[:length]) for stop in stops for length in range(1, min(len(stop), len(text) + 1))
    )


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

# With these, a text completion of the same prompt is sampled as the answer would be.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


class FirstTokenRules:
    """Decides for each request, by what is known to be exact: anything else takes the other way."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.follow()

    def follow(self) -> None:
        """Look at the file, and at what the model's own defaults are, once."""
        deployment = self._context.running.current
        self._wanted = deployment.gateway.first_token != "decode"
        defaults = _checkpoint_defaults(deployment) if self._wanted else {}
        setting = _shaping_setting(deployment, defaults) if self._wanted else None
        self._limits_by_default = defaults.get(_DEFAULT_LIMIT) is not None
        self._settings_allow = setting is None
        if setting is not None:
            level = logging.WARNING if deployment.gateway.first_token == "prefill" else logging.INFO
            logger.log(
                level, "first tokens come from decode engines all the same: the engines have %s", setting
            )

    def ask(self, prompt: TokenizedPrompt) -> FirstTokenAsk | None:
        """What to ask the prefill engine for; None: the decode engine samples the first token."""
        if not self._wanted:
            return None
        request, body = prompt.request, prompt.request.body
        reason = self._refusal(request)
        if (
            reason is None
            and tokens_left(request.endpoint, body, len(prompt.token_ids), 0, self._context.max_model_len) < 2
        ):
            # The answer ends with it.
            reason = "one-token"
        if reason is not None:
            self._context.metrics.first_tokens.labels(reason).inc()
            return None
        sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        if body.get("min_tokens"):
            # vLLM takes no larger minimum than what is asked for.
            sampling["min_tokens"] = 1
        # Tokens' ids come back as names: asked for otherwise, vLLM would send all of the prompt's ids with them.
        sampling |= {"logprobs": 0, "return_tokens_as_token_ids": True}
        return FirstTokenAsk(sampling, stop_strings(body))

    def shows_first(self, request: ServingRequest) -> bool:
        """Whether the client would see a first token of the prefill before the KV has moved: what routing goes by."""
        return self._wanted and self._refusal(request) is None

    def _refusal(self, request: ServingRequest) -> str | None:
        """Why the first token can't come from the prefill, in one word."""
        body = request.body
        if request.endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
            return "endpoint"
        if body.get("stream") is not True:
            # An answer in one piece shows nothing before its last token.
            return "not-streamed"
        is_unlimited = request.endpoint is Endpoint.CHAT and answer_limit(request.endpoint, body) is None
        if not self._settings_allow or (is_unlimited and self._limits_by_default):
            return "settings"
        # The decode engine continues the answer as another one would after a fault. What is unusual may make it more
        # than its text.
        is_plain = is_usual({name: value for name, value in body.items() if name != "stop_token_ids"})
        if request.has_media or not is_plain or not request.resumes or body.get("return_token_ids"):
            return "parameters"
        return None


def _shaping_setting(deployment: Deployment, defaults: Json) -> str | None:
    """The setting of the engines or of the checkpoint that rules first tokens from the prefill out."""
    of_clusters = (cluster.extra_args for cluster in deployment.clusters)
    for argument in chain(deployment.engine.extra_args, *of_clusters):
        name = argument.partition("=")[0]
        if name in _SHAPING_ARGS:
            return name
    return next((f"{_DEFAULTS_FILE}: {name}" for name in _SHAPING_DEFAULTS if defaults.get(name)), None)


def _checkpoint_defaults(deployment: Deployment) -> Json:
    """What the checkpoint has vLLM take where a request says nothing."""
    try:
        defaults = orjson.loads(file_bytes(deployment.model.path / _DEFAULTS_FILE, MODEL_BYTES))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return defaults if isinstance(defaults, dict) else {}
