"""HTTP to the engines."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from prfaas.deployment import Instance
from prfaas.gateway.options import GatewayOptions


class EngineError(Exception):
    """An engine did not do what was asked. `status`: its HTTP status, None when it gave none; `reason`: one
    word."""

    def __init__(self, instance: str, reason: str, detail: str, status: int | None = None) -> None:
        super().__init__(f"{instance}: {detail}")
        self.instance = instance
        self.reason = reason
        self.status = status

    @property
    def is_clients_fault(self) -> bool:
        """A 4xx: every engine would answer the same."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)


class EngineClient:
    """One pooled HTTP session for all engines. Never follows redirects, keeps no cookies, reads no proxy
    settings."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=options.engine_keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def open(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """POST `body` and return the response with its headers read; the caller reads and closes it.

        Raises EngineError (reason "unreachable") when there is no response at all. Tries once more when an
        idle connection turns out to have been closed by the engine.
        """
        url = instance.url + path
        try:
            try:
                return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineError(instance.name, "unreachable", f"{type(error).__name__}: {error}") from error

    async def call(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """POST and read the whole answer. Raises EngineError: unreachable, deadline or http-STATUS."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.open(instance, path, body, headers)
                try:
                    answer = await response.read()
                except (aiohttp.ClientError, OSError) as error:
                    raise EngineError(instance.name, "died", f"{type(error).__name__}: {error}") from error
                finally:
                    # Only an answer read to its end leaves the connection reusable; otherwise this closes it,
                    # which is what makes vLLM abort the request.
                    response.close() if not response.content.is_eof() else response.release()
        except TimeoutError:
            raise EngineError(instance.name, "deadline", f"no answer within {timeout_s:g} s") from None
        if response.status != 200:
            detail = answer[:500].decode(errors="replace")
            raise EngineError(instance.name, f"http-{response.status}", detail, response.status)
        return answer

    async def call_json(
        self, instance: Instance, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """`call` with JSON on both sides; EngineError (reason "garbled") when the answer is not JSON."""
        answer = await self.call(
            instance, path, orjson.dumps(body), {"Content-Type": "application/json"}, timeout_s
        )
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise EngineError(instance.name, "garbled", f"{path} did not answer with JSON: {error}") from None

    async def get(self, instance: Instance, path: str, timeout_s: float) -> bytes:
        """GET `path` and read the whole answer. Raises EngineError as `call` does."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(instance.url + path, allow_redirects=False) as response,
            ):
                answer = await response.read()
        except TimeoutError:
            raise EngineError(instance.name, "deadline", f"no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(instance.name, "unreachable", f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise EngineError(instance.name, f"http-{response.status}", f"GET {path} failed", response.status)
        return answer

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None:
        """Whether GET /health answers 200; None when it does not answer in time (an engine may just be
        busy)."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(instance.url + "/health", allow_redirects=False) as response,
            ):
                return response.status == 200
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError):
            return False
