"""One request as the client made it, and in tokens."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec

from prfaas.core.prefix.hashing import MediaItem, PromptChains
from prfaas.serving.gateway.bodies import ApiError, Json
from prfaas.serving.gateway.prompts.prompt import Endpoint, Prompt
from prfaas.serving.gateway.request_log import RequestRecord
from prfaas.serving.transport.protocol.ticket import TENANT_BYTES, TransferClass

_TENANT_PURPOSE = b"prfaas tenant\x00"
_CLIENT_PURPOSE = b"client\x00"
_LINK_PURPOSE = b"prfaas tenant on a link\x00"
_SHOWN_PURPOSE = b"prfaas tenant in a ledger\x00"
_SALT_BYTES = 16


_Limit = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Stop = Annotated[str, msgspec.Meta(min_length=1)]
# vLLM's `VLLM_MAX_STOP_STRINGS`.
_Stops = Annotated[list[_Stop], msgspec.Meta(max_length=4)]


class _TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class _Thinking(msgspec.Struct):
    type: Literal["adaptive", "enabled"]


class _UsualBody(msgspec.Struct, forbid_unknown_fields=True):
    """Values that vLLM (0.32: `SamplingParams._verify_args`, the two protocol.py) takes whatever else a request says,
    and whatever the engine's own settings are. That a prompt and its answer are not too long is found out with its
    tokens."""

    model: str = ""
    prompt: Any = None
    messages: Any = None
    input: Any = None
    instructions: Any = None
    system: Any = None
    add_special_tokens: bool = True
    max_tokens: _Limit = 1
    max_completion_tokens: _Limit = 1
    max_output_tokens: _Limit = 1
    n: Literal[1] = 1
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1
    top_p: Annotated[float, msgspec.Meta(ge=1e-3, le=1)] = 1
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0
    frequency_penalty: _Penalty = 0
    presence_penalty: _Penalty = 0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    stop: _Stop | _Stops = "."
    stop_sequences: _Stops = []
    metadata: dict[str, str] = {}
    store: bool = False
    thinking: _Thinking | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    response_format: _TextFormat | None = None
    user: str = ""


# Fields that may have one value besides none.
_ONE_VALUE = {"add_generation_prompt": True, "echo": False, "logprobs": False}


def is_usual(body: Json) -> bool:
    """Whether no engine might refuse a field of `body` for its value, or make another conversation of it.

    Any other request is rendered by an engine, which refuses there what is wrong in form. The gateway judges nothing
    itself, since its rules would not be vLLM's.
    """
    given = {
        name: value for name, value in body.items() if value is not None and _ONE_VALUE.get(name) is not value
    }
    options, least = given.pop("stream_options", None), given.pop("min_tokens", None)
    # Only streams have options.
    is_stream = body.get("stream") is True
    if options is not None and not (
        is_stream and options in ({"include_usage": True}, {"include_usage": False})
    ):
        return False
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if least is not None and not (type(least) is type(limit) is int and 0 <= least <= limit):
        return False
    try:
        msgspec.convert(given, _UsualBody)
    except msgspec.ValidationError:
        return False
    return True


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
    is_usual: bool
    """Whether its body is: `is_usual`."""
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
    """The prompt of a request in tokens, and what its cached prefixes are looked up by."""

    request: ServingRequest
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
        """`header` names the tenant; None: all requests are one tenant's and share prefixes. `weights`: parts of a link
        by the header's value; 1 for all others."""
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

    def _salt(self, value: bytes) -> str:
        return hmac.digest(self._key, _TENANT_PURPOSE + value, hashlib.sha256)[:_SALT_BYTES].hex()
