"""How far a replay has come: a bar on a terminal, a line now and then elsewhere, and a record per request."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from prfaas.cli.errors import CliError

if TYPE_CHECKING:
    from prfaas.replay import RequestRecord

_LINE_EVERY_S = 10.0
_Show = Callable[[str, int], None]
_Say = Callable[[str], None]


@contextlib.contextmanager
def shown_replay(total: int | None, records: Path | None) -> "Iterator[ShownReplay]":
    """Shows on stderr; `records` gets a line per request.

    Raises:
        CliError: the file can't be written.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        _opened(records) as file,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("sent", total=total)

        def show(line: str, ended: int) -> None:
            progress.update(task, completed=ended, description=line)

        def say(line: str) -> None:
            if not console.is_terminal:
                console.print(line)

        yield ShownReplay(file, show, say)


class ShownReplay:
    """Told of every request when it is due, and when it has ended."""

    def __init__(self, file: IO[str] | None, show: _Show, say: _Say) -> None:
        self._file = file
        self._show = show
        self._say = say
        self._due = self._ended = self._lost = 0
        self._said_s = time.monotonic()

    def due(self) -> None:
        self._due += 1

    def ended(self, record: "RequestRecord") -> None:
        self._ended += 1
        self._lost += record.is_lost
        line = f"{self._due} sent, {self._due - self._ended} open, {self._lost} lost"
        self._show(line, self._ended)
        if time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            self._say(line)
        if self._file is not None:
            self._file.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise CliError(f"--records {path}: can't be written ({error.strerror})") from error
    with file:
        yield file
