"""The file of a ledger (`core/ledger.py`): an SQLite database with one table, which any number of processes may use."""

import sqlite3
from pathlib import Path

from prfaas.core.ledger import COLUMNS, VERSION
from prfaas.serving.secret_files import LedgerFileError

BUSY_S = 5.0
"""How long one process waits for another that writes."""


def open_ledger(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """The file, made if there is none.

    Raises:
        LedgerFileError: it is none, or of another release; with `read_only`, also where it is not there.
    """
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}", uri=True, timeout=BUSY_S
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
    except sqlite3.Error as error:
        raise LedgerFileError(f"{path} can't be used as a ledger: {error}") from error
    return connection
