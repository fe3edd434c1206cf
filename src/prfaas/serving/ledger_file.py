"""The file of a ledger (`core/ledger.py`): an SQLite database with one table, which any number of processes may use.

A gateway's is bounded: a row for each request that was routed, the oldest of which are dropped.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import astuple

from prfaas.core.deployment import LedgerConfig
from prfaas.core.ledger import COLUMNS, VERSION, LedgerEntry
from prfaas.serving.secret_files import LedgerFileError

logger = logging.getLogger(__name__)

# How long one process waits for another that writes.
_BUSY_S = 5.0
_WRITE_S = 1.0
_DROP_S = 60.0
# What a disk that stands still may keep in memory: some 40 MB.
_MOST_UNWRITTEN = 50_000
_DAY_S = 86_400.0
_INSERT = f"INSERT INTO requests VALUES ({', '.join('?' * len(COLUMNS))})"


def open_ledger(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """The file, made if there is none. One thread at a time may use the connection.

    Raises:
        LedgerFileError: it is none, or of another release; with `read_only`, also where it is not there.
    """
    try:
        if not read_only:
            # It may be the first that is kept of a deployment.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            timeout=_BUSY_S,
            check_same_thread=False,
        )
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0 and not read_only:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"CREATE TABLE IF NOT EXISTS requests ({', '.join(COLUMNS)})")
            connection.execute("CREATE INDEX IF NOT EXISTS by_time ON requests (at_s)")
            connection.execute(f"PRAGMA user_version={VERSION}")
            connection.commit()
        elif found != VERSION:
            raise LedgerFileError(f"{path} is no ledger of this release; name another file")
        # Another program's file may have the same number.
        connection.execute(f"SELECT {', '.join(COLUMNS)} FROM requests LIMIT 0")
    except (sqlite3.Error, OSError) as error:
        raise LedgerFileError(f"{path} can't be used as a ledger: {error}") from error
    return connection


class Ledger:
    """Writes rows in a thread of its own, a second's worth at a time. What it can't write is lost and counted."""

    def __init__(self, config: LedgerConfig, on_lost: Callable[[int], None]) -> None:
        """
        Args:
            config: of the file.
            on_lost: told how many rows were lost.

        Raises:
            LedgerFileError: the file can't be used.
        """
        self._config = config
        self._on_lost = on_lost
        self._rows: deque[LedgerEntry] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._write, args=(open_ledger(config.file),), name="prfaas-ledger", daemon=True
        )
        self._thread.start()

    def add(self, row: LedgerEntry) -> None:
        """Keep what became of a request."""
        if len(self._rows) < _MOST_UNWRITTEN:
            self._rows.append(row)
        else:
            self._on_lost(1)

    def close(self) -> None:
        """Write what is left."""
        self._ended.set()
        self._thread.join(_BUSY_S)

    def _write(self, connection: sqlite3.Connection) -> None:
        """Until it is closed."""
        dropped_s, ends = 0.0, False
        while not ends:
            ends = self._ended.wait(_WRITE_S)
            rows = [astuple(self._rows.popleft()) for _ in range(len(self._rows))]
            try:
                with connection:
                    connection.executemany(_INSERT, rows)
                    if time.monotonic() > dropped_s + _DROP_S:
                        dropped_s = time.monotonic()
                        self._drop(connection)
            except sqlite3.Error as error:
                self._on_lost(len(rows))
                logger.warning("the ledger %s could not be written: %s", self._config.file, error)
        connection.close()

    def _drop(self, connection: sqlite3.Connection) -> None:
        """Remove what is too old, and the oldest of what is too much."""
        connection.execute("DELETE FROM requests WHERE at_s < ?", (time.time() - self._config.days * _DAY_S,))
        newest = connection.execute("SELECT max(rowid) FROM requests").fetchone()[0] or 0
        connection.execute("DELETE FROM requests WHERE rowid <= ?", (newest - self._config.requests,))
