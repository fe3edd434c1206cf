"""The file that a child process writes its output to: appended to, and rotated by size while the child writes.

The child holds the file open and knows nothing of this. So a full file is copied aside and then emptied; what the child
writes in the instant between is lost. A pipe would lose nothing, but a child must not wait for its parent to read.
"""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import IO

_POLL_S = 5.0
_TAIL_BYTES = 64 * 1024


class LogFile:
    """`path`, and earlier parts of it as `path.1` (the newest), `path.2`, ….

    The file must be open for appending wherever it is written to: else it would grow back to its size.
    """

    def __init__(self, path: Path, *, max_bytes: int, kept_files: int) -> None:
        """A file of more than `max_bytes` becomes an earlier part, of which `kept_files` are kept."""
        self.path = path
        self._max_bytes = max_bytes
        self._kept_files = kept_files
        self._began_bytes = 0
        self._rotated = False
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    def open(self) -> IO[bytes]:
        """The file for a new child, after a line that says when it was started. Rotates it before, if it is large."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.rotate()
        self.path.touch(0o600)
        log = self.path.open("ab")
        log.write(f"=== started {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} ===\n".encode())
        log.flush()
        self._began_bytes, self._rotated = log.tell(), False
        return log

    def keep_small(self) -> None:
        """Look every few seconds whether it must be rotated, in a thread, until `close`."""
        self._watcher = threading.Thread(target=self._watch, name=f"prfaas-log-{self.path.stem}", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """The child has ended. Idempotent."""
        self._closing.set()
        # The next child's log is the same file.
        if self._watcher is not None:
            self._watcher.join()

    def rotate(self) -> bool:
        """Make an earlier part of the file if it is large. True if it was."""
        try:
            if self.path.stat().st_size <= self._max_bytes:
                return False
        except FileNotFoundError:
            return False
        self._make_room()
        self._part(1).touch(0o600)
        with self.path.open("rb") as full, self._part(1).open("wb") as part:
            shutil.copyfileobj(full, part, 1 << 20)
            os.truncate(self.path, 0)
        self._began_bytes, self._rotated = 0, True
        return True

    @property
    def written_bytes(self) -> int:
        """Bytes that the child has written to this file so far."""
        return max(self.path.stat().st_size - self._began_bytes, 0)

    def tail(self, lines: int) -> str:
        """The last lines that the child has written."""
        text = _end_of(self.path, self._began_bytes)
        if self._rotated:
            text = _end_of(self._part(1), 0) + text
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            # A full disk, or a folder that was removed: the log is not worth the child.
            with contextlib.suppress(OSError):
                self.rotate()

    def _make_room(self) -> None:
        for number in range(self._kept_files, 1, -1):
            if self._part(number - 1).exists():
                self._part(number - 1).replace(self._part(number))

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _end_of(path: Path, begin: int) -> bytes:
    """The last of what a file holds from `begin` on."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(min(begin, end), end - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)
