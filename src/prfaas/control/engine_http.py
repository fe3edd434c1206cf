"""The two things that the control plane asks engines over HTTP."""

import asyncio
from typing import Protocol

import aiohttp

from prfaas.deployment import Instance

_LARGEST_BYTES = 4 << 20
# vLLM closes idle connections after 5 s: ours must be gone before, or a request meets a closing one.
_KEEPALIVE_S = 2.0


class EngineAccess(Protocol):
    """How engines are asked; `EngineHttp` is the real one."""

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None: ...

    async def metrics(self, instance: Instance, timeout_s: float) -> bytes | None: ...

    async def close(self) -> None: ...


class EngineHttp:
    """One pooled session for all engines. Make it inside a running event loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None:
        """Whether GET /health answers 200; None if nothing answers in time (an engine may just be busy)."""
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

    async def metrics(self, instance: Instance, timeout_s: float) -> bytes | None:
        """What GET /metrics answers; None if it doesn't."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(instance.url + "/metrics", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return None
                text = await response.content.read(_LARGEST_BYTES)
                while len(text) < _LARGEST_BYTES and (more := await response.content.read(_LARGEST_BYTES)):
                    text += more
                return text
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def close(self) -> None:
        await self._session.close()
