"""Logs of child processes: nothing of an earlier start is lost, and they stay small while a child writes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.serving.engines import log_file
from prfaas.serving.engines.log_file import LogFile
from prfaas.serving.engines.process_group import ProcessGroup


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def written(path: Path, text: str, **limits: int) -> LogFile:
    log = LogFile(path, **({"max_bytes": 1000, "kept_files": 2} | limits))
    with log.open() as file:
        file.write(text.encode())
    return log


def test_a_start_appends(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "e.log"
    written(path, "why it ended\n")
    log = written(path, "again\n")
    assert log.tail(20) == "again"
    assert log.written_bytes == len("again\n")
    lines = path.read_text().splitlines()
    assert lines[1] == "why it ended" and lines[3] == "again"
    assert lines[0].startswith("=== started 20") and lines[2].startswith("=== started 20")


def test_no_other_user_reads_a_log(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            written(tmp_path / "logs" / "e.log", "x" * 2000)
    finally:
        os.umask(before)
    folder = tmp_path / "logs"
    assert {each.name: each.stat().st_mode & 0o777 for each in (folder, *folder.iterdir())} == {
        "logs": 0o700,
        "e.log": 0o600,
        "e.log.1": 0o600,
    }


def test_a_large_file_is_put_aside_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "e.log"
    for number in range(5):
        written(path, f"{number}" * 2000 + "\n")
    contents = {file.name: file.read_text().split("\n")[1][:1] for file in tmp_path.iterdir()}
    assert contents == {"e.log": "4", "e.log.1": "3", "e.log.2": "2"}


def test_a_running_child_goes_on_in_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "e.log"
    log = LogFile(path, max_bytes=1000, kept_files=2)
    with log.open() as file:
        child = subprocess.Popen(
            [sys.executable, "-uc", "for line in iter(input, 'end'): print(line)"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
    assert child.stdin is not None

    def say(text: str) -> None:
        assert child.stdin is not None
        child.stdin.write(text + "\n")
        wait_until(lambda: path.read_text().endswith(text + "\n"))

    try:
        say("a" * 2000)
        assert log.rotate() and not log.rotate()
        say("b")
        assert path.read_text() == "b\n"
        assert log.tail(2) == "a" * 2000 + "\nb"
        assert log.written_bytes == 2
        assert "a" * 2000 in (tmp_path / "e.log.1").read_text()
    finally:
        child.communicate("end\n", timeout=60)


def test_a_group_keeps_its_log_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "_POLL_S", 0.01)
    path = tmp_path / "e.log"
    code = "import sys, time\nwhile True: print('x' * 99, flush=True); time.sleep(0.001)"
    group = ProcessGroup.start(
        [sys.executable, "-c", code], os.environ, LogFile(path, max_bytes=2000, kept_files=3)
    )
    try:
        wait_until((tmp_path / "e.log.3").exists)
        # Just after it was begun anew it is empty.
        wait_until(lambda: bool(group.log.tail(2)))
    finally:
        group.kill()
    parts = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(parts) == 4
