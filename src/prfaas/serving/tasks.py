"""asyncio tasks that end together, and those that nobody waits for."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def end_all(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel what is still running and wait for it, so that no task is left."""
    open_tasks = [task for task in tasks if not task.done()]
    for task in open_tasks:
        task.cancel()
    if open_tasks:
        await asyncio.gather(*open_tasks, return_exceptions=True)
    for task in tasks:
        # Of two failures only the first is reported.
        look_at(task)


def look_at(task: "asyncio.Task[Any]") -> None:
    """Look at the failure of a task that is over: asyncio warns of an exception that nobody has read."""
    if not task.cancelled():
        task.exception()


class BackgroundTasks:
    """Work that nobody waits for where it is started. asyncio by itself keeps no hold of it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """End all, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait for all, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def run_together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once, and end the others as soon as one fails.

    Unlike `asyncio.TaskGroup` before Python 3.13, it never loses a cancellation that comes as one of them fails
    (https://github.com/python/cpython/issues/116720): who handles the failure and goes on could not be ended then.

    Returns:
        What each returned, in the order of `works`.

    Raises:
        CancelledError: this task was cancelled, whatever has failed besides.
        Exception: of the first that failed, as it is.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end_all(*tasks)
    for task in tasks:
        if task in done:
            # A failure, before those that are only ended because of it.
            task.result()
    return [task.result() for task in tasks]
