"""The demo's own gateway, in this process and beside what asks it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prfaas.core.deployment import AdminConfig, Deployment
from prfaas.serving.engines.preparation import port_problem
from prfaas.serving.live import serve_live

T = TypeVar("T")

_START_S = 120.0
_STOP_S = 10.0
_HOST = "127.0.0.1"


class DemoError(Exception):
    """The demo can't be run to its end; the text says why."""


@dataclass(frozen=True, slots=True)
class DemoGateway:
    """A gateway that serves at `url`."""

    url: str
    task: "asyncio.Task[None]"

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises DemoError, and gives it up, when the gateway ends."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({self.task, task}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise DemoError(f"the gateway ended: {self.task.exception()!r}")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def demo_gateway(deployment: Deployment) -> AsyncIterator[DemoGateway]:
    """The gateway of `deployment`, whose engines run; at another port where that of the file is taken.

    Raises:
        DemoError: it ends, or does not listen in time.
    """
    # Whoever has the deployment's port need not keep the demo from running.
    port = 0 if port_problem(_HOST, deployment.gateway.port) else deployment.gateway.port
    # The demo shows what clients are usually not told, bytes among it, which nobody knows yet at an early first token.
    # Its operators' page is not asked for.
    config = replace(
        deployment.gateway,
        host=_HOST,
        port=port,
        admin=AdminConfig(_HOST, 0),
        route_header="full",
        first_token="decode",
    )
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_live(replace(deployment, gateway=config), ready=bound.set_result))
    try:
        bound_port = await DemoGateway("", task).unless_ended(_within(bound, _START_S))
        yield DemoGateway(f"http://{_HOST}:{bound_port}", task)
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_STOP_S)


async def _within(future: "asyncio.Future[int]", timeout_s: float) -> int:
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise DemoError(f"the demo's gateway did not listen within {timeout_s:.0f} s") from None
