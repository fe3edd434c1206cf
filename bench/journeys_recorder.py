"""Runs a deployment as `prfaas up` does and records which functions of the package are entered, for `journeys.py`.

    python bench/journeys_recorder.py DEPLOYMENT LOG

The record is written to LOG when `prfaas up` has ended. It knows no name inside of the package.

A way is what work belongs to: the first functions of the tasks that led to it, outermost first. asyncio gives each task
a copy of its maker's context, and so the way is inherited; a thread of an executor takes the context of who handed the
work over. Only the gateway's own process is recorded: engines are processes of their own.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# What Python 3.11 calls a function and its reader sees as part of another one.
_PART_OF_ANOTHER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_NO_FUNCTION = "<module>"
_FIRST_ENTRY = 0
_HTTP_SERVER = ("aiohttp", "web")
# Where a running event loop ends the stack of what runs in it; below is only what started the loop.
_LOOPS = ("asyncio/runners.py", "asyncio/base_events.py", "uvloop/__init__.py")
# Begins loops, and begins them again: what a loop does is its own.
_KEEPER = "LoopFailures.keep"


@dataclass(slots=True)
class Log:
    """`functions`: (file, qualified name). `stacks`: numbers of functions, outermost first.

    `entries`: (seconds of `time.monotonic`, whether the function begins or goes on, number of the stack, number of
    the way). `ways`: numbers of functions; `from_http`: those that aiohttp's server has called.
    """

    functions: list[tuple[str, str]] = field(default_factory=list)
    stacks: list[tuple[int, ...]] = field(default_factory=list)
    ways: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[tuple[float, bool, int, int]] = field(default_factory=list)
    from_http: set[int] = field(default_factory=set)


class Recorder:
    """A profile function, and what it has seen so far."""

    def __init__(self, package: Path) -> None:
        self.log = Log()
        self._root = f"{package}/"
        self._numbers: dict[CodeType, int | None] = {}
        self._loops: dict[CodeType, bool] = {}
        self._stack_numbers: dict[tuple[int, ...], int] = {}
        self._way_numbers: dict[tuple[int, ...], int] = {}
        self._way: contextvars.ContextVar[tuple[tuple[int, ...], int | None]] = contextvars.ContextVar(
            "way", default=((), None)
        )

    def install(self) -> None:
        """For this thread and all that begin later."""
        submit = concurrent.futures.ThreadPoolExecutor.submit

        def submit_with_context(
            pool: concurrent.futures.ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> "concurrent.futures.Future[Any]":
            return submit(pool, contextvars.copy_context().run, work, *args, **kwargs)

        concurrent.futures.ThreadPoolExecutor.submit = submit_with_context  # type: ignore[assignment,method-assign]
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        number = self._numbers[code] if code in self._numbers else self._numbered(code)
        if number is None:
            return
        stack = self._stack(frame)
        begins = code.co_code[frame.f_lasti + 1] & 3 == _FIRST_ENTRY
        way = self._way_of(frame, number) if begins and len(stack) == 1 else self._way.get()[0]
        self.log.entries.append(
            (
                time.monotonic(),
                begins,
                _number_of(stack, self._stack_numbers, self.log.stacks),
                _number_of(way, self._way_numbers, self.log.ways),
            )
        )

    def _numbered(self, code: CodeType) -> int | None:
        """None for what is no function of the package."""
        inside = code.co_filename.startswith(self._root)
        number = None
        if inside and code.co_name not in (_NO_FUNCTION, *_PART_OF_ANOTHER) and code.co_qualname != _KEEPER:
            number = len(self.log.functions)
            self.log.functions.append((code.co_filename.removeprefix(self._root), code.co_qualname))
        self._numbers[code] = number
        return number

    def _stack(self, frame: FrameType) -> tuple[int, ...]:
        numbers = []
        here: FrameType | None = frame
        while here is not None and not self._is_loop(here.f_code):
            number = self._numbers.get(here.f_code)
            if number is not None:
                numbers.append(number)
            here = here.f_back
        return tuple(reversed(numbers))

    def _is_loop(self, code: CodeType) -> bool:
        if code not in self._loops:
            self._loops[code] = code.co_filename.endswith(_LOOPS) or code.co_qualname == _KEEPER
        return self._loops[code]

    def _way_of(self, frame: FrameType, number: int) -> tuple[int, ...]:
        """The way of a function that nothing of the package has called; a new task's gets longer by it."""
        way, task_before = self._way.get()
        task = _task()
        is_callback = task is None and way
        if is_callback or (task is not None and task == task_before):
            return way
        if frame.f_back is not None and _is_http_server(frame.f_back.f_code):
            self.log.from_http.add(number)
        way = (*way, number)
        self._way.set((way, task))
        return way


def _number_of(
    value: tuple[int, ...], numbers: dict[tuple[int, ...], int], values: list[tuple[int, ...]]
) -> int:
    number = numbers.setdefault(value, len(values))
    if number == len(values):
        values.append(value)
    return number


def _task() -> int | None:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else id(task)


def _is_http_server(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.parent.name == _HTTP_SERVER[0] and path.name.startswith(_HTTP_SERVER[1])


def main() -> None:
    deployment, log_path = sys.argv[1], Path(sys.argv[2])
    import prfaas
    from prfaas.cli.main import main as prfaas_main

    recorder = Recorder(Path(inspect.getfile(prfaas)).parent)
    recorder.install()
    sys.argv = ["prfaas", "up", deployment]
    try:
        prfaas_main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        log = recorder.log
        parts = (log.functions, log.stacks, log.ways, log.entries, log.from_http)
        log_path.write_bytes(pickle.dumps(parts))


if __name__ == "__main__":
    main()
