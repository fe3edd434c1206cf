"""Installs the environment and says where it is: a line for each phase, with its time. pip's words go to a log.

    python requirements/set_up.py .venv build/setup.log [option of pip …]

`make setup` runs this with the machine's own Python: only the standard library may be imported here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).parent
OLDEST, TOO_NEW = (3, 11), (3, 14)
_LAST_LINES = 15
_LOOK_EVERY_S = 0.5
_LINE_CHARACTERS = 96
_COMPILE = "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"


class SetUpError(Exception):
    """A phase failed; the text says which, and the end of what its program printed."""


def phases(environment: Path, pip_options: Sequence[str]) -> list[tuple[str, list[object]]]:
    """What is done, in order: a name for people, and the command.

    The lock is complete and installed without dependency resolution: it leaves out torchvision, torchaudio and
    torchcodec, which vLLM's CPU build names but which don't load beside the CPU build of torch. It says why torch is
    apart. pip would compile every file on one core; `compileall` takes all.
    """
    python = environment / "bin" / "python"
    install: list[object] = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    made = [] if python.exists() else [("virtual environment", [sys.executable, "-m", "venv", environment])]
    return [
        *made,
        ("PyTorch's CPU build", [*install, *pip_options, "-r", HERE / "torch.txt"]),
        ("vLLM and what it needs", [*install, "--require-hashes", "-r", HERE / "cpu.lock"]),
        ("bytecode", [python, "-c", _COMPILE]),
        ("prfaas itself", [*install, "--no-build-isolation", "--editable", HERE.parent]),
    ]


def run_phases(
    wanted: Sequence[tuple[str, Sequence[object]]], log_path: Path, out: TextIO = sys.stdout
) -> None:
    """Run commands one after the other; on a terminal the line of the running one moves.

    Raises:
        SetUpError: one failed.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as log:
        for number, (name, command) in enumerate(wanted, start=1):
            title = f"[{number}/{len(wanted)}] {name}"
            _run(title, [str(word) for word in command], log, log_path, out)


def _run(title: str, command: Sequence[str], log: TextIO, log_path: Path, out: TextIO) -> None:
    started_s = time.monotonic()
    if not out.isatty():
        print(f"{title} …", file=out, flush=True)
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            status = _wait(process, title, started_s, log_path, out)
        except BaseException:
            process.terminate()
            raise
    took = f"{time.monotonic() - started_s:.0f} s"
    if status != 0:
        last = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise SetUpError("\n".join([f"{title}: failed after {took}; all of it is in {log_path}:", *last]))
    _show(f"{title}: {took}", out, is_last=True)


def _wait(
    process: subprocess.Popen[bytes], title: str, started_s: float, log_path: Path, out: TextIO
) -> int:
    while True:
        try:
            return process.wait(_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            if out.isatty():
                elapsed_s = time.monotonic() - started_s
                _show(f"{title}: {elapsed_s:.0f} s  {_latest(log_path)}", out, is_last=False)


def _latest(log_path: Path) -> str:
    """The last line of a log."""
    with log_path.open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - 4096))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return lines[-1].strip() if lines else ""


def _show(line: str, out: TextIO, is_last: bool) -> None:
    if out.isatty():
        print(f"\r{line[:_LINE_CHARACTERS]:<{_LINE_CHARACTERS}}", end="\n" if is_last else "", file=out, flush=True)
    else:
        print(line, file=out, flush=True)


def main() -> None:
    environment, log_path, *pip_options = sys.argv[1:]
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        sys.exit("prfaas needs Python 3.11 to 3.13: make PYTHON=/path/to/python3.11")
    started_s = time.monotonic()
    try:
        run_phases(phases(Path(environment), pip_options), Path(log_path))
    except SetUpError as error:
        sys.exit(str(error))
    print(f"the environment {environment} is ready after {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
