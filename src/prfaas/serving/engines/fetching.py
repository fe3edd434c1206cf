"""Progress and failure of fetching a model."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Protocol

from prfaas.core.units import format_bytes
from prfaas.serving.engines import EngineError


class ModelFetchError(EngineError):
    """A model can't be had from where it is kept; one sentence that says what to do."""


class FetchReport(Protocol):
    """Who is told of a model that is fetched. Called on the fetching thread or another one, never on two at once."""

    def notice(self, line: str) -> None:
        """Something to read before it goes on: a licence, terms, what is waited for."""
        ...

    def fetched(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """So many bytes of `what` are here."""
        ...


class LoggedFetch:
    """Lines on stderr: notices, and the beginning and the end of what is fetched."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def notice(self, line: str) -> None:
        """As `FetchReport`."""
        print(line, file=sys.stderr, flush=True)

    def fetched(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """As `FetchReport`."""
        if what not in self._begun:
            self._begun.add(what)
            self.notice(f"fetching {what}, {format_bytes(total_bytes)}")
        if done_bytes == total_bytes:
            self.notice(f"fetched {what}")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, which another process writes: how far a download is."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            # A file may have got its name in the meantime.
            with contextlib.suppress(OSError):
                total += Path(directory, name).stat().st_size
    return total
