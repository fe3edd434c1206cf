"""Which requests may have their first token from the engine that prefills."""

import logging
from collections.abc import Iterator
from itertools import chain

import orjson

from prfaas.core.deployment import Deployment
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.continuing import can_resume, sampling_fields, tokens_left
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
        return None if can_resume(request.endpoint, {**request.body, "stream": True}) else "parameters"


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
