"""Which streams may have their first token from the engine that prefills."""

import logging
from collections.abc import Iterator
from itertools import chain

import orjson

from prfaas.core.deployment import Deployment
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.continuing import can_resume, stop_strings, tokens_left
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
        self._running = context.running
        self._metrics = context.metrics
        self._max_model_len = context.max_model_len
        self.follow()

    def follow(self) -> None:
        """Look at the file, and at what the model's own defaults are, once."""
        deployment = self._running.current
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

    def ask(self, request: ServingRequest, prompt: TokenizedPrompt) -> FirstTokenAsk | None:
        """What to ask the prefill engine for; None: the decode engine samples the first token."""
        if not self._wanted:
            return None
        reason = self._refusal(request)
        body = request.body
        if (
            reason is None
            and tokens_left(request.endpoint, body, len(prompt.token_ids), 0, self._max_model_len) < 2
        ):
            # The answer ends with it.
            reason = "one-token"
        if reason is not None:
            self._metrics.first_tokens.labels(reason).inc()
            return None
        sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        if body.get("min_tokens"):
            # vLLM takes no larger minimum than what is asked for.
            sampling["min_tokens"] = 1
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
        is_plain = request.unusual.keys() <= {"stop_token_ids"} and not body.get("return_token_ids")
        if request.has_media or not is_plain or not can_resume(request.endpoint, body):
            return "parameters"
        return None


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
