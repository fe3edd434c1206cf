"""One request as the client made it, and in tokens."""

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prfaas.core.prefix.hashing import MediaItem, PromptChains
from prfaas.serving.gateway.bodies import ApiError, Json
from prfaas.serving.gateway.prompts.prompt import Endpoint, Prompt
from prfaas.serving.gateway.request_log import RequestRecord
from prfaas.serving.transport.protocol.ticket import TENANT_BYTES, TransferAttributes, TransferClass

_TENANT_PURPOSE = b"prfaas tenant\x00"
_CLIENT_PURPOSE = b"client\x00"
_LINK_PURPOSE = b"prfaas tenant on a link\x00"
_SHOWN_PURPOSE = b"prfaas tenant in a ledger\x00"
_SALT_BYTES = 16


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


def unusual_fields(body: Mapping[str, Any]) -> Json:
    """The fields of `body` whose values an engine might refuse, or which change what it makes of a conversation.

    A request with any of them is rendered by an engine, which refuses there what is wrong in form. The gateway judges
    nothing itself, since its rules would not be vLLM's.
    """
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


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """What the client wants: parsed and checked."""

    endpoint: Endpoint
    body: Json
    """The client's JSON, less the fields that could steer an engine."""
    size_bytes: int
    """Length of the body as it came."""
    prompt: Prompt
    samples: int
    """How many answers are wanted of each prompt (`n`)."""
    answers: int
    """How many are wanted of all prompts."""
    has_media: bool
    """Whether its prompt is more than text."""
    resumes: bool
    """Whether another engine could continue a stream of its answer: `can_resume`."""
    unusual: Json
    """`unusual_fields` of the body."""
    whole: str | None
    """Why its decode engine has to prefill it, in one word; None: another one may."""
    model: str
    """The name that engines know: an adapter's or the base model's."""
    adapter: str
    """The adapter's name; "" for the base model."""
    salt: str
    """What keeps the tenant's prefixes apart; "" without tenants."""
    headers: Mapping[str, str]
    """All that engines see of the client's headers."""
    record: RequestRecord
    """Where every stage writes what became of the request."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt in tokens, and what its cached prefixes are looked up by."""

    token_ids: Sequence[int]
    chains: PromptChains
    """Hashes of the prompt's blocks."""
    takes_ids: bool
    """Whether the decode engine may be given the ids in place of what the client sent."""
    media: tuple[MediaItem, ...] = ()
    """In the order of their offsets. Engines render a prompt with media themselves, each from the client's body."""


class Headers(Protocol):
    """The headers of a request; names are compared without case."""

    def getall(self, key: str, default: list[str]) -> list[str]: ...


class Tenants:
    """Derives salts with the deployment's key, so that no client can guess or choose another's."""

    def __init__(self, key: bytes, header: str | None, weights: Mapping[str, int] | None = None) -> None:
        """
        Args:
            key: of the deployment.
            header: names the tenant. None: all requests are one tenant's and share prefixes.
            weights: parts of a link by the header's value; 1 for all others.
        """
        self._key = key
        self.adopt(header, weights or {})

    def adopt(self, header: str | None, weights: Mapping[str, int]) -> None:
        """Tell tenants apart so from now on."""
        self._header = header
        self._weights = {self._salt(self._spelt_alike(name)): weight for name, weight in weights.items()}

    @property
    def are_told_apart(self) -> bool:
        """Whether requests can say whose they are."""
        return self._header is not None

    def names(self, headers: Headers) -> bool:
        """Whether a request says whose it is. Those that don't are one tenant's together."""
        return self._header is not None and any(headers.getall(self._header, []))

    def salt(self, headers: Headers) -> str:
        """The tenant's salt: 32 hex digits, or "" when tenants are not told apart.

        A request without the header belongs to the tenant "".

        Raises:
            ApiError: 400 for a header given twice, since readers differ in which of the two counts.
        """
        if self._header is None:
            return ""
        values = headers.getall(self._header, [])
        if len(values) > 1:
            raise ApiError(400, f"The header {self._header} must not be given more than once.")
        return self._salt(self._spelt_alike(values[0]) if values else b"")

    def shown(self, salt: str) -> str:
        """What operators may read of a tenant that a header names: neither the header nor the salt."""
        return hmac.digest(self._key, _SHOWN_PURPOSE + salt.encode(), hashlib.sha256).hex()[:12]

    def of_client(self, name: str, weight: int) -> str:
        """The salt of a client with an API key, which has so many parts of a link."""
        salt = self._salt(_CLIENT_PURPOSE + name.encode())
        self._weights[salt] = weight
        return salt

    def _spelt_alike(self, value: str) -> bytes:
        """A header's value as all readers take it: blanks and the case of a scheme make no other tenant."""
        words = value.encode("utf-8", "surrogateescape").split()
        if len(words) > 1 and self._header is not None and self._header.lower() == "authorization":
            words[0] = words[0].lower()
        return b" ".join(words)

    def transfer_class(self, salt: str, *, background: bool) -> TransferClass:
        """How a transfer of the tenant with this salt shares a link."""
        if not salt:
            return TransferClass(background=background)
        # Not the salt itself: a ticket may be read by anybody.
        mark = hmac.digest(self._key, _LINK_PURPOSE + salt.encode(), hashlib.sha256)[:TENANT_BYTES]
        return TransferClass(mark, self._weights.get(salt, 1), background)

    def of_tenant(self, attributes: TransferAttributes, salt: str) -> TransferAttributes:
        """The same for a transfer of the tenant with this salt."""
        return replace(
            attributes, service=self.transfer_class(salt, background=attributes.service.background)
        )

    def _salt(self, value: bytes) -> str:
        return hmac.digest(self._key, _TENANT_PURPOSE + value, hashlib.sha256)[:_SALT_BYTES].hex()
