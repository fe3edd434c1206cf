"""asyncio tasks that end together, those that nobody waits for, and loops that go on whatever fails."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

from prfaas.core.backoff import Backoff

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BACKOFF = Backoff(0.1, 10.0)


class LoopFailures:
    """Failures that loops survive: counted by loop, and logged once for each place in the code.

    What fails in one round, or for one member, ends neither the loop nor the process.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By the loop's name."""
        self._logged: set[tuple[str, CodeType, int]] = set()

    def note(self, loop: str, error: BaseException, member: str = "") -> None:
        """Count a failure, and log it with its traceback if it is the first of its place."""
        self.counts[loop] += 1
        trace = error.__traceback__
        assert trace is not None
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = (loop, trace.tb_frame.f_code, trace.tb_lineno)
        if place not in self._logged:
            self._logged.add(place)
            logger.error("%s failed%s, and goes on", loop, f" for {member}" if member else "", exc_info=error)

    @contextmanager
    def spared(self, loop: str, member: str) -> Iterator[None]:
        """Do without one member of a round if it fails."""
        try:
            yield
        except Exception as error:
            self.note(loop, error, member)

    async def keep(self, loop: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop until cancelled; if it raises, begin it again after 0.1 s, or up to 10 s if it does so again."""
        clock, failures = asyncio.get_running_loop().time, 0
        while True:
            began_s = clock()
            try:
                return await run()
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Something that it waited for was cancelled, and not the loop.
                self.note(loop, error)
            except Exception as error:
                self.note(loop, error)
            failures = 1 if clock() - began_s > _BACKOFF.most_s else failures + 1
            await asyncio.sleep(_BACKOFF.pause_s(failures))


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
        self._failures = LoopFailures()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """End all, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait for all, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.note("a task in the background", error)


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
