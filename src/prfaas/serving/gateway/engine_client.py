"""HTTP to the engines."""

import asyncio
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus

from prfaas.core.deployment import Instance
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.gateway.http_pool import (
    AnswerCutError,
    AnswerLateError,
    AnswerTooLongError,
    EngineResponse,
    HttpPool,
    ServerSilentError,
)
from prfaas.serving.own_process import lacks_descriptors

FROZEN = "frozen"
"""The reason of a call that the control plane ended, since the engine had fallen silent."""
OWN_RESOURCES = "gateway-resources"
"""The reason of a call for which this process had no file descriptor."""
TOO_LONG = "too-long"
"""The reason of a call whose answer is more than the gateway keeps."""
# What a thread pool of vLLM says that is shut down.
_ENDING = b"after shutdown"


class Blame(Enum):
    """What a failed call says about its engine."""

    NONE = "nothing"
    """The gateway is at fault, or the control plane knows already."""
    FAILED = "failed"
    """It lives, and keeps its cache."""
    ENDING = "ending"
    """It lets what it has end, and takes nothing more: its process has been told to end."""
    DEAD = "dead"
    """It refused or reset a connection: the process is gone, and its cache with it."""


class EngineCallError(Exception):
    """An engine did not do what was asked."""

    def __init__(
        self,
        instance: str,
        reason: str,
        detail: str,
        status: int | None = None,
        *,
        blame: Blame = Blame.FAILED,
    ) -> None:
        """`reason`: one word. `status`: the engine's HTTP status; None when it gave none."""
        super().__init__(f"{instance}: {detail}")
        self.instance = instance
        self.reason = reason
        self.status = status
        self.blame = blame

    @property
    def is_clients_fault(self) -> bool:
        """A 4xx: every engine would answer the same."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)


class EngineClient:
    """HTTP to all engines over one pool of connections. Never follows redirects."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool

    def bar(self, instance: Instance, reason: str | None) -> None:
        """The instance is frozen: end every call to it, and those to come. None: it answers again."""
        self._pool.bar(instance.host, instance.http_port, reason)

    async def close(self) -> None:
        """End all connections."""
        self._pool.close()

    async def open(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> EngineResponse:
        """POST `body`. The answer's head is read; the caller reads and closes it. Raises EngineCallError."""
        try:
            return await self._pool.request(
                "POST",
                instance.host,
                instance.http_port,
                path,
                headers,
                body,
                server_name=instance.name if instance.tls else None,
            )
        except (OSError, TimeoutError) as error:
            raise failed_call(instance.name, error, begun=False) from error

    async def call(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """POST and read all. Raises EngineCallError: its reason "deadline", "http-STATUS" or one of `failed_call`."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.open(instance, path, body, headers)
                whole = await read_whole(answer, instance.name)
        except TimeoutError:
            raise EngineCallError(instance.name, "deadline", f"no answer within {timeout_s:g} s") from None
        if answer.status != 200:
            # Not its words: they may quote the prompt, and this text is logged.
            detail = f"answered {path} with {answer.status}"
            blame = Blame.ENDING if is_ending(answer.status, whole) else Blame.FAILED
            raise EngineCallError(instance.name, f"http-{answer.status}", detail, answer.status, blame=blame)
        return whole


def is_ending(status: int, content: bytes) -> bool:
    """Whether an error is that of vLLM between SIGTERM and its end. Its /health is good all the time."""
    return status == HTTPStatus.INTERNAL_SERVER_ERROR and _ENDING in content


def accuse(plane: LivePlane, name: str, failure: EngineCallError) -> None:
    """Tell the control plane what a failure says about an engine."""
    if failure.blame is Blame.ENDING:
        plane.drains.is_ending(name)
    elif failure.blame is not Blame.NONE:
        plane.health.suspect(name, str(failure), lost_cache=failure.blame is Blame.DEAD)


async def read_whole(answer: EngineResponse, instance: str) -> bytes:
    """All of `answer`, which is closed. Raises EngineCallError."""
    try:
        return await answer.read()
    except OSError as error:
        raise failed_call(instance, error, begun=True) from error
    finally:
        answer.close()


def failed_call(instance: str, error: OSError, *, begun: bool) -> EngineCallError:
    """What a broken connection, or none, says about an engine. `begun`: its answer had begun.

    Returns:
        With reason "frozen", "first-byte", "idle", "gateway-resources", "too-long", "connect-timeout", else "died" or
        "unreachable".
    """
    if isinstance(error, ServerSilentError):
        return EngineCallError(instance, FROZEN, str(error), blame=Blame.NONE)
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, AnswerLateError):
        return EngineCallError(instance, error.reason, detail)
    if lacks_descriptors(error):
        return EngineCallError(instance, OWN_RESOURCES, detail, blame=Blame.NONE)
    if isinstance(error, AnswerTooLongError):
        # A client may have asked for it.
        return EngineCallError(instance, TOO_LONG, str(error), blame=Blame.NONE)
    if isinstance(error, TimeoutError):
        # Whether it is silent altogether is for the control plane to find out, which asks it every second.
        return EngineCallError(instance, "connect-timeout", "no connection in time", blame=Blame.NONE)
    reset = error.by_server if isinstance(error, AnswerCutError) else isinstance(error, ConnectionError)
    blame = Blame.DEAD if reset else Blame.FAILED
    return EngineCallError(instance, "died" if begun else "unreachable", detail, blame=blame)
