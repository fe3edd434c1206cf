"""Ctrl-C in the middle of the burst."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_TIMEOUT_S = 120


def _default_sigint() -> None:
    # Whoever runs the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _processes_with(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command:
            found.append(command)
    return found


@pytest.mark.extended("the burst is in `make test`, to its end")
@pytest.mark.slow("the burst comes in real time, to two times twelve stand-ins")
def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    # SIGTERM raises the same exception.
    demo = subprocess.Popen(
        [sys.executable, "-m", "prfaas.cli.main", "demo", "--act", "pays"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PRFAAS_HOME": str(tmp_path)},
        preexec_fn=_default_sigint,
    )
    try:
        assert demo.stdout is not None
        seen = []
        for line in demo.stdout:
            seen.append(line)
            if line.startswith("burst: 100 of "):
                assert _processes_with(str(tmp_path))
                demo.send_signal(signal.SIGINT)
                break
        rest, _ = demo.communicate(timeout=_TIMEOUT_S)
        assert demo.returncode == 130, "".join(seen) + rest
        assert rest.splitlines()[-1] == "stopped"
        assert "Traceback" not in rest
        assert _processes_with(str(tmp_path)) == []
    finally:
        demo.kill()
