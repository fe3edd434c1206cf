"""etcd over its own HTTP/JSON gateway: leases, transactions and a watch.

By aiohttp, which the gateway has anyway: of the clients on the package index none is both asynchronous and kept up,
and all bring gRPC with them.
"""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from prfaas.core.deployment import FleetConfig
from prfaas.serving.fleet.store import CompactedError, Entry, StoreChange, StoreError
from prfaas.serving.secret_files import TlsFileError

_ANSWER_S = 1.0
# A line of a watch holds some keys of a fleet, a few KiB each.
_LARGEST_BYTES = 16 << 20


class EtcdStore:
    """Implements `store.Store`. Asks the first address, and the next one after a failure."""

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
        """See `Store`."""
        return _number((await self._call("/v3/lease/grant", {"TTL": lease_s})).get("ID"))

    async def keep(self, lease: int) -> bool:
        """See `Store`."""
        answer = await self._call("/v3/lease/keepalive", {"ID": str(lease)})
        # A lease that has ended is answered without the seconds that it has left.
        return _number(_mapping(answer.get("result", {})).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """See `Store`."""
        await self._call("/v3/lease/revoke", {"ID": str(lease)})

    async def read(self, prefix: str) -> tuple[Sequence[Entry], int]:
        """See `Store`."""
        answer = await self._call("/v3/kv/range", _range(prefix))
        return [_entry(each) for each in _list(answer.get("kvs", []))], _revision(answer)

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        """See `Store`."""
        put = {"key": _text(key.encode()), "value": _text(value), "lease": str(lease)}
        return await self._if_created(key, 0, {"request_put": put})

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """See `Store`."""
        await self._call(
            "/v3/kv/put", {"key": _text(key.encode()), "value": _text(value), "lease": str(lease)}
        )

    async def put_while(self, key: str, value: bytes | None, holder: str, created: int) -> int | None:
        """See `Store`."""
        name = {"key": _text(key.encode())}
        change = (
            {"request_delete_range": name}
            if value is None
            else {"request_put": name | {"value": _text(value)}}
        )
        return await self._if_created(holder, created, change)

    async def watch(self, prefix: str, first_revision: int) -> AsyncIterator[Sequence[StoreChange]]:
        """See `Store`."""
        body = {"create_request": _range(prefix) | {"start_revision": str(first_revision)}}
        try:
            async with self._post("/v3/watch", body) as response:
                while line := await response.content.readuntil(b"\n"):
                    result = _mapping(_decoded(line).get("result", {}))
                    if _number(result.get("compact_revision", 0)):
                        raise CompactedError(
                            f"etcd has no changes before {result['compact_revision']} any more"
                        )
                    if result.get("canceled"):
                        raise StoreError(
                            f"etcd has ended the watch: {result.get('cancel_reason', 'no reason')}"
                        )
                    events = _list(result.get("events", []))
                    if events:
                        yield [_change(event) for event in events]
        except (aiohttp.ClientError, ValueError, asyncio.IncompleteReadError) as error:
            raise StoreError(f"etcd's watch failed: {error}") from error
        raise StoreError("etcd has ended the watch")

    async def close(self) -> None:
        """See `Store`."""
        await self._session.close()

    async def _if_created(self, key: str, created: int, change: Mapping[str, Any]) -> int | None:
        compare = {
            "key": _text(key.encode()),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(created),
        }
        answer = await self._call("/v3/kv/txn", {"compare": [compare], "success": [change]})
        return _revision(answer) if answer.get("succeeded") else None

    async def _call(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S), self._post(path, body) as response:
                text = await response.content.read(_LARGEST_BYTES)
                while not response.content.at_eof() and len(text) < _LARGEST_BYTES:
                    text += await response.content.read(_LARGEST_BYTES)
                return _decoded(text)
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


def _decoded(text: bytes) -> Mapping[str, Any]:
    try:
        answer = _mapping(json.loads(text))
    except ValueError as error:
        raise StoreError("etcd's answer is no JSON object") from error
    problem = answer.get("error")
    if problem:
        raise StoreError(f"etcd refuses: {answer.get('message') or problem}")
    return answer


def _change(event: object) -> StoreChange:
    told = _mapping(event)
    entry = _entry(told.get("kv"))
    # What is 0 in etcd's messages, as PUT is among the kinds of events, is left out.
    return StoreChange(entry.key, None if told.get("type") == "DELETE" else entry, entry.changed)


def _entry(told: object) -> Entry:
    found = _mapping(told)
    try:
        key = base64.b64decode(str(found.get("key", "")), validate=True).decode()
        value = base64.b64decode(str(found.get("value", "")), validate=True)
    except ValueError as error:
        raise StoreError("etcd's answer has a key or value that can't be read") from error
    return Entry(key, value, _number(found.get("create_revision", 0)), _number(found.get("mod_revision", 0)))


def _revision(answer: Mapping[str, Any]) -> int:
    return _number(_mapping(answer.get("header", {})).get("revision", 0))


def _number(value: object) -> int:
    # 64-bit numbers are strings in etcd's JSON.
    try:
        return int(str(value))
    except ValueError as error:
        raise StoreError("etcd's answer lacks a number") from error


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StoreError("etcd's answer has another form than expected")
    return value


def _list(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise StoreError("etcd's answer has another form than expected")
    return value
