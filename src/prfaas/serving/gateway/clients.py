"""Who may use a gateway: clients with API keys, of which only hashes are kept."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from prfaas.core.bounded_file import WRITTEN_BYTES, file_bytes
from prfaas.core.yaml_source import FileError, yaml_source
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.prompts.request import Headers
from prfaas.serving.secret_files import ClientsFileError

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""What is answered to everybody, such as a load balancer."""
_LOOK_S = 1.0

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_KeyHash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client, which is a tenant of its own."""

    key_sha256: Annotated[list[_KeyHash], msgspec.Meta(min_length=1, max_length=16)]
    """SHA-256 of each of its API keys, in hex."""
    share: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Parts of a link while clients compete for it."""
    requests_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Requests that it may send in the long run; None: any number."""
    priority: Literal["normal", "low"] = "normal"
    """`low`: it is taken on only while less than half of each limit of the gateway is in use."""
    name: str = ""


CLIENT = web.RequestKey("prfaas_client", Client)
"""Where an HTTP request has who sent it."""


class Clients:
    """The clients of one file, which is read again when it changes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ClientsFileError."""
        self._path = path
        self._clock = clock
        # Name → requests that it may send at once, and when that was so.
        self._allowed: dict[str, tuple[float, float]] = {}
        self._stamp = (0, 0, 0)
        self._by_key: dict[bytes, Client] = {}
        self.read()

    def read(self) -> None:
        """Use what the file says now. Raises ClientsFileError, and goes on with what it said before."""
        try:
            stamp = self._stamp_now()
            raw = file_bytes(self._path, WRITTEN_BYTES)
        except OSError as error:
            raise ClientsFileError(f"clients file {self._path} cannot be read: {error.strerror}") from None
        try:
            source = yaml_source(self._path, raw.decode())
            said = msgspec.convert(source.values, dict[_Name, Client])
        except (UnicodeDecodeError, msgspec.ValidationError) as error:
            raise ClientsFileError(f"clients file {self._path}: {error}") from None
        except FileError as error:
            raise ClientsFileError(f"clients file {error}") from None
        by_key: dict[bytes, Client] = {}
        for name, client in said.items():
            for key in map(bytes.fromhex, client.key_sha256):
                if key in by_key:
                    raise ClientsFileError(
                        f"clients file {self._path}: {by_key[key].name} and {name} have one key"
                    )
                by_key[key] = msgspec.structs.replace(client, name=name)
        self._by_key, self._stamp = by_key, stamp
        self._allowed = {name: left for name, left in self._allowed.items() if name in said}

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        seen = self._stamp
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                stamp = self._stamp_now()
                if stamp == seen:
                    continue
                seen = stamp
                self.read()
                logger.info("clients file %s read again", self._path)
            except (OSError, ClientsFileError) as error:
                logger.warning("clients stay as they were: %s", error)

    @web.middleware
    async def ask(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A middleware that lets only clients in, and notes who it is."""
        if request.path not in OPEN_PATHS:
            request[CLIENT] = client = self.take(request.headers)
            # What engines answer is counted as it is taken on, so that a refusal has its record.
            if request.method == "GET":
                self.count(client)
        return await handler(request)

    def take(self, headers: Headers) -> Client:
        """Who sends a request with these headers.

        A key is looked up by its hash, which nobody can choose: how long that takes says nothing of other keys. Raises
        ApiError 401 without a key of a client.
        """
        found = self._by_key.get(hashlib.sha256(_key_in(headers)).digest())
        if found is None:
            raise ApiError(401, "The API key is missing, or none of this gateway's clients has it.")
        return found

    def count(self, client: Client) -> None:
        """One more request of a client. Raises ApiError 429 where it sends too many."""
        rate_per_s = client.requests_per_s
        if rate_per_s is None:
            return
        now_s, most = self._clock(), max(rate_per_s, 1.0)
        left, at_s = self._allowed.get(client.name, (most, now_s))
        left = min(left + (now_s - at_s) * rate_per_s, most)
        if left < 1.0:
            self._allowed[client.name] = left, now_s
            sentence = f"This client may send {rate_per_s:g} requests a second."
            raise ApiError(429, sentence, retry_after_s=(1.0 - left) / rate_per_s, reason="rate")
        self._allowed[client.name] = left - 1.0, now_s

    def _stamp_now(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size


def _key_in(headers: Headers) -> bytes:
    """The API key as OpenAI's or Anthropic's clients send it; empty if there is none. Raises ApiError 401 for two."""
    keys = [value.strip() for value in headers.getall("x-api-key", [])]
    for value in headers.getall("Authorization", []):
        scheme, _, rest = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            keys.append(rest.strip())
    if len(set(keys)) > 1:
        raise ApiError(401, "The request has more than one API key.")
    return keys[0].encode("utf-8", "surrogateescape") if keys else b""
