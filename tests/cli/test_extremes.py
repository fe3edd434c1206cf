"""Absurd numbers, full disks and closed pipes: one sentence or silence, never a traceback, never minutes of work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.cli import main as cli

PAPER = Path(__file__).parents[2] / "examples" / "paper.yaml"
# Python's own limits are set in the child: bytes that one file may have, as on a disk that is full. It would cut its
# bytecode off there, and what imports that next ends in an EOFError.
PRELUDE = "import resource, sys; from prfaas.cli.main import main; sys.argv[0] = 'prfaas'; "
LIMITED = "sys.dont_write_bytecode = True; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
SMALL_FILES = PRELUDE + LIMITED + "main()"


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, *args: object
) -> str:
    monkeypatch.setattr(sys, "argv", ["prfaas", command, *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("  h20: 1.0", "  h20: 1.0\n  egress_per_gb: 1.0e+6", "prices: the 5.46e+09 per hour"),
        ("  h20: 1.0", "  h20: 1.0\n  egress_per_gb: 1.0e+308", "prices: the inf per hour"),
        ("  h20: 1.0", "  h20: 1.0e-9", "would buy 8e+09 instances"),
        ("instance_count: 8", "instance_count: 99999999", 'cluster "home" has 99,999,999 instances'),
        ("instance_count: 4", "instance_count: 99999999", 'cluster "east" has 99,999,999 instances'),
    ],
)
def test_absurd_prices_and_counts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    old: str,
    new: str,
    why: str,
) -> None:
    text = PAPER.read_text()
    assert text.count(old) == 1
    path = tmp_path / "absurd.yaml"
    path.write_text(text.replace(old, new))
    said = refused(monkeypatch, capsys, "plan", path)
    assert why in said
    assert "at most 10,000" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--rate", "1e-12"), "at most 366 days are simulated at once"),
        (("--load", "1e-30"), "at most 366 days"),
        (("--rate", "1e-3", "--duration", "1e9"), "at most 366 days"),
        (("--requests", "1" + 12 * "0"), "at most 10,000,000 requests are simulated at once, not 1e+12"),
        (("--rate", "1e300", "--duration", "5"), "at most 10,000,000 requests"),
        (("--policy", ""), '--policy: there is no policy ""'),
    ],
)
def test_absurd_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], why: str
) -> None:
    assert why in refused(monkeypatch, capsys, "simulate", PAPER, *options)


def child(code: str, *args: object, stdout: int) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "args", [("plan", PAPER), ("plan", PAPER, "--json"), ("plan", "--help"), ("--version",)]
)
@pytest.mark.slow("starts processes")
def test_a_full_output_is_one_sentence(args: tuple[object, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = child(PRELUDE + "main()", *args, stdout=full.fileno())
    assert code == 2
    assert said == "prfaas: output: No space left on device\n"


@pytest.mark.parametrize("args", [("models",), ("models", "--json")])
def test_a_reader_that_has_enough_is_no_error(args: tuple[object, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        code, said = child(PRELUDE + "main()", *args, stdout=write)
    finally:
        os.close(write)
    assert (code, said) == (1, "")


def test_an_output_that_nobody_opened_is_no_error() -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', sys.executable, "-c", PRELUDE + "main()", "models", "--json"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(
            ("plan", PAPER, "--sweep", "prices.h200=1:2:2", "--plot", "out"),
            marks=pytest.mark.slow("draws with matplotlib"),
        ),
        ("model", "make", "words"),
    ],
)
def test_a_full_disk_is_one_sentence(
    args: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, said = child(SMALL_FILES, *args, stdout=subprocess.DEVNULL)
    assert code == 2
    assert said.startswith("prfaas: ")
    assert said.count("\n") == 1
    assert "File too large" in said
