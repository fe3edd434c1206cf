"""The shared secret of a deployment: 32 random bytes, kept as hex in a file only its owner may read."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

KEY_BYTES = 32


class KeyFileError(ValueError):
    """The key file is missing, unreadable, open to others, or not 64 hex digits."""


def create_key(path: Path) -> bytes:
    """Write a new key to `path` (mode 0600) and return its 32 bytes; never overwrites a file.

    Raises KeyFileError when the file exists or cannot be written.
    """
    key = secrets.token_bytes(KEY_BYTES)
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key.hex() + "\n")
    except FileExistsError:
        raise KeyFileError(f"key file {path} exists already: remove it first to make a new key") from None
    except OSError as error:
        raise KeyFileError(f"key file {path} cannot be written: {error.strerror}") from None
    return key


def load_key(path: Path) -> bytes:
    """Read the 32-byte key that `create_key` wrote.

    Raises KeyFileError with one sentence naming the file and what would be right.
    """
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(4096).strip()
    except OSError as error:
        raise KeyFileError(f"key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"key file {path} must hold {2 * KEY_BYTES} hex digits and nothing else") from None
    if mode & 0o077:
        raise KeyFileError(f"key file {path} has mode {mode:04o}: others can read it, run chmod 600 on it")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyFileError(f"key file {path} must hold {2 * KEY_BYTES} hex digits and nothing else")
    return key
