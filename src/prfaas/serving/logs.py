"""What prfaas writes to logs, and how: one line per record, text or JSON, with the request and the peer it is about.

The connector runs inside of vLLM's processes, so only the logger `prfaas` is touched there. It needs only the
standard library.

Values from outside are data. No character of theirs ends a line, and texts of exceptions that could quote a request
are left out.
"""

import contextlib
import functools
import json
import logging
import os
import re
import select
import stat
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

LogFormat = Literal["text", "json"]

FORMAT_VARIABLE = "PRFAAS_LOG_FORMAT"
LEVEL_VARIABLE = "PRFAAS_LOG_LEVEL"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

REQUEST_ID: ContextVar[str | None] = ContextVar("prfaas_request_id", default=None)
"""Id of the request that is being served."""
PEER: ContextVar[str | None] = ContextVar("prfaas_peer", default=None)
"""Address of who sent it."""

_PLAIN = re.compile(r'[^\s"=]+')
_BARE = frozenset(("time", "level", "logger", "message"))
# A pipe that has room takes 4096 bytes without waiting.
_MAX_CHARACTERS = 800
_BURST = 5
_WINDOW_S = 10.0
_MAX_KINDS = 1000


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How a process writes its log."""

    format: LogFormat = "text"
    level: str = "info"

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> "LogSettings":
        """What `environment` (default: this process's) says; unknown words count as not said."""
        told = os.environ if environment is None else environment
        form, level = told.get(FORMAT_VARIABLE, ""), told.get(LEVEL_VARIABLE, "").lower()
        return cls("json" if form == "json" else "text", level if level in LEVELS else "info")

    def environment(self) -> dict[str, str]:
        """The same for a child process."""
        return {FORMAT_VARIABLE: self.format, LEVEL_VARIABLE: self.level}


def set_up_logging(
    settings: LogSettings, *, whole_process: bool = False, stream: IO[str] | None = None
) -> logging.Handler:
    """Have what prfaas says written to `stream`; a second call replaces the first.

    Args:
        whole_process: this process is ours, so warnings of libraries are written the same way. Without it, loggers
            and handlers of others stay as they are.
        stream: default: stderr.
    """
    handler = _PrfaasHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if settings.format == "json" else _TextFormatter())
    handler.addFilter(RepeatFilter())
    ours, root = logging.getLogger("prfaas"), logging.getLogger()
    for logger in (ours, root):
        for earlier in [each for each in logger.handlers if isinstance(each, _PrfaasHandler)]:
            logger.removeHandler(earlier)
    ours.setLevel(settings.level.upper())
    ours.propagate = whole_process
    if whole_process:
        # No line says where in the code or in which thread it was written; to find that out takes as long as the line.
        logging._srcfile = None
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        root.setLevel(max(logging.WARNING, ours.level))
        root.addHandler(handler)
    else:
        ours.addHandler(handler)
    return handler


class _PrfaasHandler(logging.StreamHandler[IO[str]]):
    """Known by its class, so that a second set-up finds it.

    It never waits for who reads: a pipe that nobody empties, or a terminal that is stopped, must not stop the event
    loop. Lines that find no room are counted.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._room: select.poll | None = None
        self._lost_lines = 0
        # Streams in memory have no file, and files on disks always have room.
        with contextlib.suppress(OSError, ValueError):
            file = stream.fileno()
            if not stat.S_ISREG(os.fstat(file).st_mode):
                self._room = select.poll()
                self._room.register(file, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, if there is room."""
        if self._room is not None and not self._room.poll(0):
            self._lost_lines += 1
            return
        if self._lost_lines:
            lost, self._lost_lines = self._lost_lines, 0
            text = "%d lines before this one were lost: nobody read them"
            super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lost,), None))
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Python's own would print the record's arguments as they are."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"a log record of {record.name} could not be written\n")


class RepeatFilter(logging.Filter):
    """Lets a few warnings of one kind pass in a while, and counts the others for the next one that passes.

    A kind is a logger and a format string; at most `max_kinds` are kept, the least recent are forgotten.
    """

    def __init__(
        self,
        *,
        burst: int = _BURST,
        window_s: float = _WINDOW_S,
        max_kinds: int = _MAX_KINDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`burst` records of a kind pass in each `window_s`."""
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._max_kinds = max_kinds
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, str], _Repeats] = OrderedDict()
        # Handlers ask their filters before they take their own lock.
        self._guard = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """False for what is left out; `record.left_out` is how many were before it."""
        if record.levelno < logging.WARNING:
            return True
        now_s = self._clock()
        with self._guard:
            kind = (record.name, str(record.msg))
            repeats = self._kinds.pop(kind, None) or _Repeats(now_s)
            self._kinds[kind] = repeats
            if len(self._kinds) > self._max_kinds:
                self._kinds.popitem(last=False)
            if now_s - repeats.since_s >= self._window_s:
                repeats.since_s, repeats.passed = now_s, 0
            if repeats.passed >= self._burst:
                repeats.left_out += 1
                return False
            repeats.passed += 1
            record.left_out, repeats.left_out = repeats.left_out, 0
        return True


@dataclass(slots=True)
class _Repeats:
    since_s: float
    passed: int = 0
    left_out: int = 0


def one_line(text: str) -> str:
    """`text` with every character that is not printable as an escape, cut where it is long."""
    if len(text) > _MAX_CHARACTERS:
        text = text[:_MAX_CHARACTERS] + "…"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


@functools.lru_cache(maxsize=4)
def _second(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))


class _LineFormatter(logging.Formatter):
    """The parts that both forms have."""

    def parts(self, record: logging.LogRecord) -> dict[str, object]:
        """Everything that is known of a record, in the order of a line."""
        told: dict[str, object] = {
            "time": f"{_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields: Mapping[str, object] = getattr(record, "fields", {})
        # A line about a request that has ended says itself whose it is.
        for name, whose in (("request_id", fields.get("request_id", REQUEST_ID.get())), ("peer", PEER.get())):
            if whose is not None:
                told[name] = one_line(str(whose))
        told["message"] = one_line(_message(record))
        for name, value in fields.items():
            told[name] = one_line(value) if isinstance(value, str) else value
        left_out = getattr(record, "left_out", 0)
        if left_out:
            told["left_out"] = left_out
        if record.exc_info and record.exc_info[1] is not None:
            told["exception"] = exception_text(record.exc_info[1])
        return told


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.name == "asyncio":
        # It goes on with the representations of tasks and callbacks, which quote their arguments.
        text = re.split(r"[\n<(]", text, maxsplit=1)[0].rstrip()
    return text


def _word(value: object) -> str:
    """A value in a line of text, in quotes where it could pass for something else."""
    if value is None:
        return "-"
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


class _TextFormatter(_LineFormatter):
    """`TIME LEVEL LOGGER name=value … message name=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        told = self.parts(record).items()
        return " ".join(str(value) if name in _BARE else f"{name}={_word(value)}" for name, value in told)


class _JsonFormatter(_LineFormatter):
    """One JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.parts(record), ensure_ascii=False)


def exception_text(error: BaseException) -> str:
    """What was raised and where, in one line, without texts that could quote a request.

    The system's own errors keep their text. Causes are not followed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.name} {Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1])
    text = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return one_line(
        f"{type(error).__name__}{text} in {places}" if places else f"{type(error).__name__}{text}"
    )
