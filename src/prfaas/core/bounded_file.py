"""Files read whole, up to a most number of bytes: what somebody put there may be anything, and without end."""

import errno
import json
from pathlib import Path
from typing import Any

WRITTEN_BYTES = 4 << 20
"""The most of a file that a person writes: a deployment of 20,000 instances."""
MODEL_BYTES = 64 << 20
"""The most of a file that describes a model: the index of a thousand shards has a third of it."""


def file_bytes(path: Path, most_bytes: int) -> bytes:
    """All of a file.

    Raises:
        OSError: it can't be read, or has more than `most_bytes`.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MiB", str(path))
    return content


def file_text(path: Path, most_bytes: int) -> str:
    """All of a file of text in UTF-8.

    Raises:
        OSError: as `file_bytes`.
        UnicodeDecodeError: it is no such text.
    """
    return file_bytes(path, most_bytes).decode("utf-8")


def file_json(path: Path, most_bytes: int) -> Any:
    """What a file of JSON says.

    Raises:
        OSError: as `file_bytes`.
        ValueError: it is no JSON, or nests too deeply.
    """
    try:
        return json.loads(file_text(path, most_bytes))
    except RecursionError:
        raise ValueError("it nests too deeply") from None
