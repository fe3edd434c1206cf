"""Installs the environment and says where it is: a line for each phase, with its time. pip's words go to a log.

    python requirements/set_up.py .venv build/setup.log [option of pip …]

`make setup` runs this with the machine's own Python: only the standard library may be imported here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).parent
OLDEST, TOO_NEW = (3, 11), (3, 14)
_LAST_LINES = 15
_LOOK_EVERY_S = 0.2
_LINE_CHARACTERS = 96
_COMPILE = (
    "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"
)


class SetUpError(Exception):
    """A phase failed; the text says which, and the end of what its program printed."""


def parts_of_lock(folder: Path, count: int = min(os.cpu_count() or 1, 4)) -> list[Path]:
    """The lock's requirements, dealt out to so many files in `folder`."""
    wanted = re.findall(
        r"^[^#\s].*?[^\\]$", (HERE / "cpu.lock").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"cpu-{number}.lock" for number in range(1, count + 1)]
    for number, part in enumerate(parts):
        part.write_text("\n".join([*wanted[number::count], ""]), encoding="utf-8")
    return parts


def phases(
    environment: Path, lock_parts: Sequence[Path], pip_options: Sequence[str]
) -> list[tuple[str, list[list[object]]]]:
    """What is done, in order: a name for people, and commands that run at the same time.

    pip downloads, unpacks and compiles on one core: so several install parts of the lock side by side, and
    `compileall`, which takes all cores, compiles what they leave alone. The lock is complete and installed without
    dependency resolution: it leaves out torchvision, torchaudio and torchcodec, which vLLM's CPU build names but which
    don't load beside the CPU build of torch. It says why torch is apart.
    """
    python = environment / "bin" / "python"
    install: list[object] = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    made = [] if python.exists() else [("virtual environment", [[sys.executable, "-m", "venv", environment]])]
    return [
        *made,
        (
            "PyTorch's CPU build, vLLM and what they need",
            [
                [*install, *pip_options, "-r", HERE / "torch.txt"],
                *([*install, "--require-hashes", "-r", part] for part in lock_parts),
            ],
        ),
        ("bytecode", [[python, "-c", _COMPILE]]),
        ("prfaas itself", [[*install, "--no-build-isolation", "--editable", HERE.parent]]),
    ]


def run_phases(
    wanted: Sequence[tuple[str, Sequence[Sequence[object]]]], log_path: Path, out: TextIO = sys.stdout
) -> None:
    """Run phases one after the other; on a terminal the line of the running one moves.

    Raises:
        SetUpError: one failed.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("a", encoding="utf-8") as log:
        log.truncate(0)
        for number, (name, commands) in enumerate(wanted, start=1):
            title = f"[{number}/{len(wanted)}] {name}"
            _run(title, [[str(word) for word in command] for command in commands], log, log_path, out)


def _run(title: str, commands: Sequence[Sequence[str]], log: TextIO, log_path: Path, out: TextIO) -> None:
    started_s = time.monotonic()
    if not out.isatty():
        print(f"{title} …", file=out, flush=True)
    log.writelines(f"$ {' '.join(command)}\n" for command in commands)
    log.flush()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands
        )
        failed = _wait(processes, title, started_s, log_path, out)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    took = f"{time.monotonic() - started_s:.0f} s"
    if failed:
        last = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise SetUpError("\n".join([f"{title}: failed after {took}; all of it is in {log_path}:", *last]))
    _show(f"{title}: {took}", out, is_last=True)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], title: str, started_s: float, log_path: Path, out: TextIO
) -> bool:
    """Until all have ended well, or one has not: whether one has not."""
    while True:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return True
        if None not in statuses:
            return False
        if out.isatty():
            elapsed_s = time.monotonic() - started_s
            _show(f"{title}: {elapsed_s:.0f} s  {_latest(log_path)}", out, is_last=False)
        time.sleep(_LOOK_EVERY_S)


def _latest(log_path: Path) -> str:
    """The last line of a log."""
    with log_path.open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - 4096))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return lines[-1].strip() if lines else ""


def _show(line: str, out: TextIO, is_last: bool) -> None:
    if out.isatty():
        print(
            f"\r{line[:_LINE_CHARACTERS]:<{_LINE_CHARACTERS}}",
            end="\n" if is_last else "",
            file=out,
            flush=True,
        )
    else:
        print(line, file=out, flush=True)


def main() -> None:
    environment, log_path, *pip_options = sys.argv[1:]
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        sys.exit("prfaas needs Python 3.11 to 3.13: make PYTHON=/path/to/python3.11")
    started_s = time.monotonic()
    try:
        parts = parts_of_lock(Path(log_path).parent)
        run_phases(phases(Path(environment), parts, pip_options), Path(log_path))
    except SetUpError as error:
        sys.exit(str(error))
    print(f"the environment {environment} is ready after {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
