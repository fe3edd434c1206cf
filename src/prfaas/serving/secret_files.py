"""Files of secrets: what is wrong with one, and the token that operators show.

Every command may have to say it, and `prfaas status` reads a token, so this needs the standard library only.
"""

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

KEY_BYTES = 32
"""Of a deployment's key: the secret that its members share."""

_TOKEN = re.compile(r"[!-~]{16,1024}")
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}):[ \t]*([!-~](?:[ -~]{0,8000}[!-~])?)[ \t]*")


class SecretFileError(ValueError):
    """A file of this machine that processes show each other or trust can't be used; the message says which."""


class KeyFileError(SecretFileError):
    """The key file is missing, unreadable, open to others, or not 64 hex digits."""


class TlsFileError(SecretFileError):
    """A certificate, key or authority file cannot be used; the message names it."""


class AdminTokenError(SecretFileError):
    """The token's file is missing, unreadable, open to all, or holds no token."""


class ClientsFileError(SecretFileError):
    """The file of clients cannot be used; the message names it, and what would be right."""


class LedgerFileError(SecretFileError):
    """The ledger's file cannot be used; the message names it."""


def create_key(path: Path) -> bytes:
    """Write a new key to `path` (mode 0600); never overwrites a file.

    Returns:
        The key, 32 bytes.

    Raises:
        KeyFileError: the file exists or cannot be written.
    """
    key = secrets.token_bytes(KEY_BYTES)
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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

    Raises:
        KeyFileError: in one sentence, the file and what would be right.
    """
    text = secret_text(path, "key file", KeyFileError, others=0o077).strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyFileError(f"key file {path} must hold {2 * KEY_BYTES} hex digits and nothing else")
    return key


def create_token(path: Path) -> None:
    """Write a new token to `path` (mode 0600); never overwrites a file.

    Raises:
        AdminTokenError: the file exists or cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise AdminTokenError(f"token file {path} cannot be written: {error.strerror}") from None


def make_private_folder(path: Path) -> None:
    """Make a folder that only this process's user can enter, unless it is there.

    Raises:
        PermissionError: it is another user's, or others can enter it.
        OSError: it can't be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a folder of this user alone; `chmod 700` it, or remove it")


class TraceHeadersError(SecretFileError):
    """The file of headers for a collector is missing, unreadable, open to all, or holds a line that is no header."""


def secret_text(
    path: Path, kind: str, error_type: type[SecretFileError], *, others: int = 0o007, hint: str = ""
) -> str:
    """The first 64 KiB of a file that holds a secret. `kind`: its name in errors. `others`: bits its mode can't have.

    Raises:
        SecretFileError: of `error_type`: it can't be read, `hint`, or others can read it.
    """
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            mode, text = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(1 << 16)
    except OSError as error:
        raise error_type(f"{kind} {path} cannot be read: {error.strerror}{hint}") from None
    if mode & others:
        raise error_type(f"{kind} {path} has mode {mode:04o}: others can read it, run chmod 600 on it")
    return text


def load_headers(path: Path) -> dict[str, str]:
    """The HTTP headers in `path`, one `Name: value` a line; empty lines and lines with # are left out.

    Its group may read it, others may not: such headers are secrets.

    Raises:
        TraceHeadersError: in one sentence, the file and what would be right. It quotes no value.
    """
    headers = {}
    for number, line in enumerate(secret_text(path, "headers file", TraceHeadersError).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _HEADER.fullmatch(line)
        if found is None:
            raise TraceHeadersError(f'headers file {path}: line {number} is no header; write "Name: value"')
        headers[found[1]] = found[2]
    return headers


def load_token(path: Path) -> str:
    """The token in `path`: at least 16 printable characters without blanks. Its group may read it, others may not.

    Raises:
        AdminTokenError: in one sentence, the file and what would be right.
    """
    make = f"; make it: (umask 077; openssl rand -hex 32 > {path})"
    token = secret_text(path, "token file", AdminTokenError, hint=make).strip()
    if not _TOKEN.fullmatch(token):
        raise AdminTokenError(
            f"token file {path} must hold 16 characters or more without blanks and nothing else"
        )
    return token
