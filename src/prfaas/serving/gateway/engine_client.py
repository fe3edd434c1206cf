"""HTTP to the engines."""

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from prfaas.core.deployment import Instance
from prfaas.serving.gateway.http_pool import EngineResponse, HttpPool


class EngineCallError(Exception):
    """An engine did not do what was asked."""

    def __init__(self, instance: str, reason: str, detail: str, status: int | None = None) -> None:
        """`reason`: one word. `status`: the engine's HTTP status; None when it gave none."""
        super().__init__(f"{instance}: {detail}")
        self.instance = instance
        self.reason = reason
        self.status = status

    @property
    def is_clients_fault(self) -> bool:
        """A 4xx: every engine would answer the same."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)


class EngineClient:
    """HTTP to all engines over one pool of connections. Never follows redirects."""

    def __init__(self, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self._pool = HttpPool(connect_timeout_s=connect_timeout_s, keepalive_s=keepalive_s)

    async def close(self) -> None:
        """End all connections."""
        self._pool.close()

    async def open(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> EngineResponse:
        """POST `body`.

        Returns:
            The answer, its head read. The caller reads and closes it.

        Raises:
            EngineCallError: with reason "unreachable", when there is no answer.
        """
        try:
            return await self._pool.request("POST", instance.host, instance.http_port, path, headers, body)
        except (OSError, TimeoutError) as error:
            raise EngineCallError(instance.name, "unreachable", f"{type(error).__name__}: {error}") from error

    async def call(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """POST and read the whole answer.

        Raises:
            EngineCallError: with reason "unreachable", "died", "deadline" or "http-STATUS".
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.open(instance, path, body, headers)
                whole = await _whole(instance, answer)
        except TimeoutError:
            raise EngineCallError(instance.name, "deadline", f"no answer within {timeout_s:g} s") from None
        if answer.status != 200:
            # Not its words: they may quote the prompt, and this text is logged.
            detail = f"answered {path} with {answer.status}"
            raise EngineCallError(instance.name, f"http-{answer.status}", detail, answer.status)
        return whole

    async def call_json(
        self, instance: Instance, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """`call` with JSON on both sides. Raises EngineCallError, also with reason "garbled": not JSON."""
        answer = await self.call(
            instance, path, orjson.dumps(body), {"Content-Type": "application/json"}, timeout_s
        )
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise EngineCallError(
                instance.name, "garbled", f"{path} did not answer with JSON: {error}"
            ) from None


async def _whole(instance: Instance, answer: EngineResponse) -> bytes:
    """All of `answer`, which is closed. Raises EngineCallError with reason "died"."""
    try:
        return await answer.read()
    except OSError as error:
        raise EngineCallError(instance.name, "died", f"{type(error).__name__}: {error}") from error
    finally:
        answer.close()
