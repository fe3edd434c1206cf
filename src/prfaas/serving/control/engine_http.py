"""HTTP requests to engines: for their health and for their metrics."""

import asyncio
import errno
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from urllib.parse import urlencode

import aiohttp

from prfaas.core.deployment import Instance
from prfaas.serving.bounded_answer import read_bounded
from prfaas.serving.certificates import https_options
from prfaas.serving.control.engine_reading import CACHE_SERIES, SERIES
from prfaas.serving.own_process import lacks_descriptors
from prfaas.serving.transport.io.tls_identity import TlsIdentity

# Read in one piece of the event loop, once a second for each engine: vLLM has 60 KB for one.
_LARGEST_BYTES = 1 << 20
# vLLM closes idle connections after 5 s: ours must be gone before, or a request meets a closing one.
_KEEPALIVE_S = 2.0


_CHOSEN = "/metrics/?" + urlencode([("name[]", name) for name in (*SERIES, CACHE_SERIES)])
_ALWAYS_THERE = SERIES[0].encode()


class EngineHttp:
    """One pooled session for all engines. Make it inside a running event loop.

    Engines are asked for the series that are read, not for all: vLLM's whole text is some 60 KB a second, which for an
    engine behind a link of few Mbit/s is a good part of it. vLLM serves `/metrics` itself and what lies below by
    prometheus_client, which knows the `name[]` of a question. One that answers without the series (with several API
    servers it does) is asked for its whole text from then on.
    """

    def __init__(self, tls: TlsIdentity | None = None) -> None:
        """`tls`: who the gateway is, for engines that speak TLS only."""
        self._tls = tls
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._tell_all: set[str] = set()

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None:
        """True if GET /health answers 200; None if nothing answers in time.

        Raises:
            OSError: this process has no file descriptor left.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._get(instance, "/health") as response,
            ):
                return response.status == 200
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            if lacks_descriptors(error):
                raise OSError(errno.EMFILE, "no file descriptor left") from error
            # Anything but a refusal or a reset, such as a lost route, is silence.
            return False if _is_answer(error) else None

    async def metrics(self, instance: Instance, timeout_s: float) -> bytes | None:
        """The series of `engine_reading` from the engine's metrics, perhaps among others; None without an answer."""
        try:
            async with asyncio.timeout(timeout_s):
                if instance.url not in self._tell_all:
                    status, text = await self._read(instance, _CHOSEN)
                    if status == HTTPStatus.OK and _ALWAYS_THERE in text:
                        return text
                    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                        return None
                status, text = await self._read(instance, "/metrics")
                if status != HTTPStatus.OK:
                    return None
                self._tell_all.add(instance.url)
                return text
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def _read(self, instance: Instance, path: str) -> tuple[int, bytes]:
        async with self._get(instance, path) as response:
            return response.status, await read_bounded(response, _LARGEST_BYTES)

    async def close(self) -> None:
        await self._session.close()

    def _get(self, instance: Instance, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        options = https_options(instance, self._tls)
        return self._session.get(instance.url + path, allow_redirects=False, **options)


def _is_answer(error: BaseException) -> bool:
    """Whether an error is the doing of the server's process, or of a kernel that has none at this port."""
    if isinstance(error, aiohttp.ClientSSLError):
        return True
    number = error.errno if isinstance(error, OSError) else None
    return number is None or number in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
