"""One request as the client made it, and in tokens."""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.core.prefix import MediaItem, PromptChains
from prfaas.core.route_header import REQUEST_ID_HEADER
from prfaas.serving.gateway.bodies import ApiError, Json, parse_body, strip_owned
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.fields import unusual_fields
from prfaas.serving.gateway.prompts.prompt import (
    Endpoint,
    Prompt,
    answers_of,
    check_media_urls,
    media_parts,
    prompt_of,
    samples_of,
    why_whole,
)
from prfaas.serving.gateway.request_log import RequestRecord, WaitsFor
from prfaas.serving.transport.ticket import TENANT_BYTES, TransferAttributes, TransferClass

# The only client headers that an engine sees, and only in this form.
_TRACE_HEADERS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
_TENANT_PURPOSE = b"prfaas tenant\x00"
_CLIENT_PURPOSE = b"client\x00"
_LINK_PURPOSE = b"prfaas tenant on a link\x00"
_SALT_BYTES = 16


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
    unusual: Json
    """The fields that not every engine takes, or that change what it makes of a conversation."""
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


class RequestParser:
    """Turns a body into a `ServingRequest`."""

    def __init__(self, context: GatewayContext) -> None:
        self._running = context.running
        self._model = context.running.current.model
        self._json_threads = context.json_threads

    async def parse(
        self,
        headers: Mapping[str, str],
        raw: bytes,
        endpoint: Endpoint,
        record: RequestRecord,
        salt: str,
    ) -> ServingRequest:
        """Check a body, and take out what could steer an engine.

        Args:
            headers: the client's.
            raw: the body.
            endpoint: that it came to.
            record: of the request.
            salt: the tenant's.

        Raises:
            ApiError: 4xx with one sentence for what the client got wrong.
        """
        body, prompt, has_media = await self._json_threads.run(len(raw), self._parse_body, raw, endpoint)
        model = body.get("model")
        adapter = model if isinstance(model, str) and model != self._model.served_name else ""
        record.model = adapter or self._model.served_name
        record.streamed = body.get("stream") is True
        record.since("read", record.began_s)
        record.waits_for = WaitsFor.TOKENS
        return ServingRequest(
            endpoint=endpoint,
            body=body,
            size_bytes=len(raw),
            prompt=prompt,
            samples=samples_of(endpoint, body),
            answers=answers_of(endpoint, body),
            has_media=has_media,
            unusual=unusual_fields(body),
            whole=why_whole(endpoint, body),
            model=record.model,
            adapter=adapter,
            salt=salt if endpoint.generates else "",
            headers=_engine_headers(headers, record),
            record=record,
        )

    def _parse_body(self, raw: bytes, endpoint: Endpoint) -> tuple[Json, Prompt, bool]:
        """What is left of a body, its prompt, and whether that is more than text. Raises ApiError."""
        body = parse_body(raw, self._running.current.gateway.limits.body_values)
        model = body.get("model")
        names = (self._model.served_name, *self._model.adapters)
        # As in vLLM, no name at all means the base model. What is no name is the decode engine's to refuse.
        if isinstance(model, str) and model and model not in names:
            known = ", ".join(f"`{name}`" for name in names)
            raise ApiError(404, f"The model `{model[:200]}` does not exist; there is {known}.", param="model")
        # vLLM's CPU backend (0.32) ends when a prompt with a seed is prefilled in more than one chunk.
        on_cpus = any(cluster.hardware == "cpu" for cluster in self._running.current.pd_clusters)
        sampling = body.get("sampling_params")
        if on_cpus and (_is_seeded(body) or (isinstance(sampling, dict) and _is_seeded(sampling))):
            raise ApiError(
                400,
                "`seed` is not taken here: vLLM's CPU backend ends when it prefills a seeded prompt in more than one "
                "step. Leave `seed` out, or set `temperature` to 0, where a seed changes nothing.",
                param="seed",
            )
        media = tuple(media_parts(endpoint, body))
        check_media_urls(media, self._running.current.gateway.media_domains)
        prompt = prompt_of(endpoint, body, has_media=bool(media))
        stripped = strip_owned(body)
        if endpoint is Endpoint.RESPONSES:
            # No later request would find what one engine stores, and vLLM never drops it.
            stripped["store"] = False
        return stripped, prompt, bool(media)


def _is_seeded(body: Json) -> bool:
    """Whether vLLM would make a random generator for the request: greedy ones need none, and −1 means no seed."""
    return body.get("seed") not in (None, -1) and body.get("temperature") != 0


def _engine_headers(received: Mapping[str, str], record: RequestRecord) -> dict[str, str]:
    headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: record.request_id}
    if record.trace_headers is not None:
        return headers | dict(record.trace_headers)
    for name, form in _TRACE_HEADERS.items():
        value = received.get(name)
        if value is not None and form.fullmatch(value):
            headers[name] = value
    return headers
