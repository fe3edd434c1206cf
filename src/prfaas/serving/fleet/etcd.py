"""etcd over its own HTTP/JSON gateway: leases, transactions and a watch.

By aiohttp, which the gateway has anyway: of the clients on the package index none is both asynchronous and kept up,
and all bring gRPC with them.
"""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import aiohttp
import msgspec

from prfaas.core.deployment import FleetConfig
from prfaas.serving.bounded_answer import read_bounded
from prfaas.serving.fleet.store import CompactedError, Entry, StoreChange, StoreError
from prfaas.serving.secret_files import TlsFileError

_ANSWER_S = 1.0
# A line of a watch holds some keys of a fleet, a few KiB each.
_LARGEST_BYTES = 16 << 20


class EtcdStore:
    """Keys with values, all of them with one growing revision. Every method but `close` raises StoreError.

    It asks the first address, and the next one after a failure.
    """

    def __init__(self, config: FleetConfig) -> None:
        """Make it inside a running event loop.

        Raises:
            TlsFileError: a file of the fleet's certificates can't be used.
        """
        self._urls = list(config.etcd)
        self._tls: ssl.SSLContext | bool = True if config.is_plain else _context(config)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, connect=_ANSWER_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 20,
            trust_env=False,
        )

    async def grant(self, lease_s: int) -> int:
        """A new lease that ends unless it is kept every `lease_s` seconds. Returns its number."""
        lease = (await self._call("/v3/lease/grant", {"TTL": lease_s})).ID
        if not lease:
            raise StoreError("etcd's answer lacks the number of the lease")
        return lease

    async def keep(self, lease: int) -> bool:
        """Let a lease go on; False if it has ended."""
        answer = await self._call("/v3/lease/keepalive", {"ID": str(lease)})
        # A lease that has ended is answered without the seconds that it has left.
        return answer.result.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End a lease and all that was put with it."""
        await self._call("/v3/lease/revoke", {"ID": str(lease)})

    async def read(self, prefix: str) -> tuple[Sequence[Entry], int]:
        """All that begins with `prefix`, and the revision at which it was so."""
        answer = await self._call("/v3/kv/range", _range(prefix))
        return [each.entry for each in answer.kvs], answer.header.revision

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        """Put a key that is not there. Returns the revision; None if it is there."""
        put = {"key": _text(key.encode()), "value": _text(value), "lease": str(lease)}
        return await self._if_created(key, 0, {"request_put": put})

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """Give a key a value that goes with a lease."""
        await self._call(
            "/v3/kv/put", {"key": _text(key.encode()), "value": _text(value), "lease": str(lease)}
        )

    async def put_while(self, key: str, value: bytes | None, holder: str, created: int) -> int | None:
        """Give a key a value that stays, or delete it (None), only while `holder` is the key that was created then.

        Returns the revision; None if it is not.
        """
        name = {"key": _text(key.encode())}
        change = (
            {"request_delete_range": name}
            if value is None
            else {"request_put": name | {"value": _text(value)}}
        )
        return await self._if_created(holder, created, change)

    async def watch(self, prefix: str, first_revision: int) -> AsyncIterator[Sequence[StoreChange]]:
        """All changes of what begins with `prefix`, from a revision on, in order; raises CompactedError."""
        body = {"create_request": _range(prefix) | {"start_revision": str(first_revision)}}
        try:
            async with self._post("/v3/watch", body) as response:
                while line := await response.content.readuntil(b"\n"):
                    result = _decoded(line).result
                    if result.compact_revision:
                        raise CompactedError(f"etcd has no changes before {result.compact_revision} any more")
                    if result.canceled:
                        raise StoreError(f"etcd has ended the watch: {result.cancel_reason or 'no reason'}")
                    if result.events:
                        yield [event.change for event in result.events]
                    else:
                        # Lines that are there already are read without waiting: others have a turn between.
                        await asyncio.sleep(0)
        except (aiohttp.ClientError, ValueError, asyncio.IncompleteReadError) as error:
            raise StoreError(f"etcd's watch failed: {error}") from error
        raise StoreError("etcd has ended the watch")

    async def close(self) -> None:
        """Give back connections."""
        await self._session.close()

    async def _if_created(self, key: str, created: int, change: Mapping[str, Any]) -> int | None:
        compare = {
            "key": _text(key.encode()),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(created),
        }
        answer = await self._call("/v3/kv/txn", {"compare": [compare], "success": [change]})
        return answer.header.revision if answer.succeeded else None

    async def _call(self, path: str, body: Mapping[str, Any]) -> "_Answer":
        try:
            async with asyncio.timeout(_ANSWER_S), self._post(path, body) as response:
                return _decoded(await read_bounded(response, _LARGEST_BYTES))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            # The next question goes to the next member.
            self._urls.append(self._urls.pop(0))
            if isinstance(error, StoreError):
                raise
            reason = str(error) or f"no answer within {_ANSWER_S:g} s"
            raise StoreError(f"etcd does not answer: {reason}") from error

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._session.post(
            self._urls[0] + path, data=json.dumps(body), ssl=self._tls, allow_redirects=False
        )


def _context(config: FleetConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:
        raise TlsFileError(
            f"fleet.ca_file {config.ca_file} can't be used: {error.strerror or error}"
        ) from None
    try:
        if config.certificate_file is not None:
            context.load_cert_chain(config.certificate_file)
    except OSError as error:
        why = f"{error.strerror or error}; it must hold a certificate and its private key"
        raise TlsFileError(f"fleet.certificate_file {config.certificate_file} can't be used: {why}") from None
    return context


def _range(prefix: str) -> dict[str, str]:
    """All keys from `prefix` to the first one that is larger and does not begin with it."""
    first = prefix.encode()
    return {"key": _text(first), "range_end": _text(first[:-1] + bytes([first[-1] + 1]))}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


# 64-bit numbers are strings in etcd's JSON, and what is 0 or empty is left out.
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Header(msgspec.Struct):
    revision: _Number = 0


class _KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    create_revision: _Number = 0
    mod_revision: _Number = 0

    @property
    def entry(self) -> Entry:
        name = self.key.decode(errors="replace")
        return Entry(key=name, value=self.value, created=self.create_revision, changed=self.mod_revision)


class _Event(msgspec.Struct):
    kv: _KeyValue
    type: str = "PUT"

    @property
    def change(self) -> StoreChange:
        entry = self.kv.entry
        return StoreChange(entry.key, None if self.type == "DELETE" else entry, entry.changed)


class _Result(msgspec.Struct):
    """What a stream's line holds, of a lease or of a watch."""

    TTL: _Number = 0
    compact_revision: _Number = 0
    canceled: bool = False
    cancel_reason: str = ""
    events: list[_Event] = []


class _Answer(msgspec.Struct):
    """All that is read of any answer."""

    header: _Header = msgspec.field(default_factory=_Header)
    ID: _Number = 0
    kvs: list[_KeyValue] = []
    succeeded: bool = False
    result: _Result = msgspec.field(default_factory=_Result)
    error: Any = None
    message: str = ""


_ANSWER = msgspec.json.Decoder(_Answer, strict=False)


def _decoded(text: bytes) -> _Answer:
    try:
        answer = _ANSWER.decode(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"etcd's answer has another form than expected: {error}") from error
    if answer.error:
        raise StoreError(f"etcd refuses: {answer.message or answer.error}")
    return answer
