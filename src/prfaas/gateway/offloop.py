"""Threads for what would hold the event loop up: large JSON and tokenizing."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OffLoop:
    """Runs small work in place and large work in a bounded pool of threads."""

    def __init__(self, threads: int, inline_size: int) -> None:
        """`inline_size`: up to this size (bytes or characters) a hop to a thread costs more than the work."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prfaas-gateway")
        self._inline_size = inline_size

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(*args)`, in a thread when `size` is above the inline size."""
        if size <= self._inline_size:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Ends the threads after what they are at."""
        self._executor.shutdown(wait=True, cancel_futures=True)
