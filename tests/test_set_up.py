"""`make setup` and what `make demo` looks at first, without installing anything."""

import importlib.util
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "requirements" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


machine, set_up = loaded("machine"), loaded("set_up")
GOOD = machine.MachineFacts("Linux", "x86_64", 9 * 10**9, 10**9, 5 * 10**9)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"system": "Darwin", "architecture": "arm64"},
            "Linux on x86-64, for vLLM's CPU build; this is Darwin on arm64",
        ),
        ({"free_disk_bytes": 10**9}, "4.0 GB of disk for the environment, 1.0 GB are free"),
        ({"free_memory_bytes": 2 * 10**9}, "7.0 GB of memory for three engines, 2.0 GB are free"),
        (
            {"free_shared_memory_bytes": 64 << 20},
            "shared memory for two pools, 0.1 GB are free: make /dev/shm larger",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(changed: dict[str, object], words: str) -> None:
    sentence = machine.machine_problem(replace(GOOD, **changed))
    assert sentence is not None and words in sentence and "\n" not in sentence


def test_nothing_is_wrong_with_a_good_machine_nor_with_what_can_not_be_told() -> None:
    assert machine.machine_problem(GOOD) is None
    unknown = machine.MachineFacts("Linux", "x86_64", None, None, None)
    assert machine.machine_problem(unknown) is None


def test_this_machine_has_facts(tmp_path: Path) -> None:
    facts = machine.machine_facts(tmp_path / "not" / "there")
    assert facts.free_disk_bytes > 0 and facts.free_memory_bytes > 0
    assert machine.machine_facts().free_disk_bytes is None


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used, memory = (tmp_path / name for name in ("max", "current", "meminfo"))
    memory.write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    monkeypatch.setattr(machine, "_MEMORY_FILE", memory)
    monkeypatch.setattr(machine, "_LIMIT_FILES", (limit, used))
    assert machine.machine_facts().free_memory_bytes == 8_000_000 * 1024
    limit.write_text("2000000000\n")
    used.write_text("500000000\n")
    assert machine.machine_facts().free_memory_bytes == 1_500_000_000
    limit.write_text("max\n")
    assert machine.machine_facts().free_memory_bytes == 8_000_000 * 1024


def echo(text: str, status: int = 0) -> list[object]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"]


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_a_line_for_each_phase(out: io.StringIO, tmp_path: Path) -> None:
    log = tmp_path / "build" / "setup.log"
    set_up.run_phases([("one", [echo("first words"), echo("beside")]), ("two", [echo("second")])], log, out)
    shown = [line.strip() for line in out.getvalue().replace("\r", "\n").splitlines() if line.strip()]
    last = [line for line in shown if line.endswith(" s")]
    assert [line.rpartition(":")[0] for line in last] == ["[1/2] one", "[2/2] two"]
    assert "first words" not in out.getvalue() and all(
        word in log.read_text() for word in ("first words", "beside", "second")
    )
    assert max(map(len, shown)) < 100


def test_a_terminal_sees_what_pip_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "_LOOK_EVERY_S", 0.02)
    out, stop = Terminal(), tmp_path / "stop"
    waiting = f"import pathlib, time\nwhile not pathlib.Path({str(stop)!r}).exists(): time.sleep(0.01)"
    written = Terminal.write

    def write(self: Terminal, text: str) -> int:
        if "Collecting torch" in text:
            stop.touch()
        return written(self, text)

    monkeypatch.setattr(Terminal, "write", write)
    code = f"print('Collecting torch', flush=True)\n{waiting}"
    set_up.run_phases([("one", [[sys.executable, "-c", code]])], tmp_path / "log", out)
    assert "[1/1] one: 0 s  Collecting torch" in out.getvalue()


def test_a_failed_command_ends_all_and_shows_the_end_of_the_log(tmp_path: Path) -> None:
    out, log, endless = (
        io.StringIO(),
        tmp_path / "log",
        [sys.executable, "-c", "import time; time.sleep(600)"],
    )
    with pytest.raises(set_up.SetUpError) as failed:
        set_up.run_phases(
            [("one", [endless, echo("no such wheel", 3), endless]), ("two", [echo("never")])], log, out
        )
    assert str(failed.value).startswith("[1/2] one: failed after")
    assert str(log) in str(failed.value) and str(failed.value).endswith("no such wheel")
    assert "never" not in log.read_text()


def test_the_parts_of_the_lock_are_all_of_it(tmp_path: Path) -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    parts = set_up.parts_of_lock(tmp_path / "build", 3)
    lines = [line for part in parts for line in part.read_text().splitlines()]
    assert sorted(lines) == sorted(line for line in lock if not line.startswith("#"))
    for part in parts:
        requirements = part.read_text().split("\n")[:-1]
        assert sum("==" in line for line in requirements) > 50
        # A requirement and its hashes stay together.
        assert all(
            after.startswith("    --hash=") == before.endswith(" \\")
            for before, after in zip(requirements, [*requirements[1:], ""], strict=True)
        )


def test_the_phases_install_packages_side_by_side_and_prfaas_last(tmp_path: Path) -> None:
    phases = set_up.phases(tmp_path, [tmp_path / "1", tmp_path / "2"], ["--extra-index-url", "URL"])
    packages = "PyTorch's CPU build, vLLM and what they need"
    assert [name for name, _ in phases] == ["virtual environment", packages, "bytecode", "prfaas itself"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (_, (torch, *locked)), *_ = set_up.phases(tmp_path, [tmp_path / "1"], ["--extra-index-url", "URL"])
    assert torch[-4:-2] == ["--extra-index-url", "URL"] and "--require-hashes" not in torch
    assert len(locked) == 1 and "--require-hashes" in locked[0]


def test_make_asks_both_of_them() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "demo", "VENV=not-there"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    commands = [line for line in done.stdout.splitlines() if "requirements/" in line or "prfaas demo" in line]
    assert [line.split()[1] for line in commands] == [
        "requirements/machine.py",
        "requirements/set_up.py",
        "demo",
    ]
    assert commands[0].endswith("machine.py not-there")
    skipped = subprocess.run(
        ["make", "--dry-run", "demo", "CHECK=no"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "machine.py" not in skipped.stdout
