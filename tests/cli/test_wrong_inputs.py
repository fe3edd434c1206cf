"""Wrong command lines and files of every kind: one sentence on stderr, exit code 2, nothing on stdout."""

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.cli import main as cli
from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.deployment.schema import json_schema

EXAMPLES = Path(__file__).parents[2] / "examples"
PAPER, LOCAL = EXAMPLES / "paper.yaml", EXAMPLES / "local.yaml"

BAD_FILES: dict[str, bytes | None] = {
    "missing.yaml": None,
    "empty.yaml": b"",
    "binary.yaml": bytes(range(256)) * 9,
    "list.yaml": b"- 1\n- 2\n",
    "broken.yaml": b"a: [1\nb: {",
    "nul.yaml": b"name: a\0b\n",
    "utf16.yaml": "name: x".encode("utf-16"),
    "deep.yaml": b"[" * 3000,
    "other.json": b'{"model_type": "x"}',
    "cut.json": b"{",
    "header.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "cells.csv": b"arrived,input,output\n1,2,3\n2,x,3\n",
    "lines.jsonl": b'{"timestamp": 1}\n',
}
# Of each, `{}` is one of the files above.
READERS = """
plan {}
simulate {}
up {}
serve {}
engine {} x
key {}
certs {}
emit systemd {} --out out
emit kubernetes {} --out out
emit compose {} --out out
status {}
drain x {}
undrain x {}
reload {}
rollout {} --command true
worth {}
explain x {}
model fetch {}
pool start {} x
pool status {}
demo {}
study bandwidth --deployment {} --out out
models {}
bandwidth {} --gpus 3
bandwidth kimi-linear --gpus 8 --profile {}
bandwidth kimi-linear --gpus 8 --trace {}
plan PAPER --trace {}
simulate PAPER --trace {}
replay http://127.0.0.1:1 --trace {}
"""
LINES = Path(__file__).parents[1] / "data" / "wrong_commands.txt"


def _lines() -> Iterator[str]:
    command = ""
    for line in LINES.read_text().splitlines()[1:]:
        if not line.startswith(" "):
            command = line.removeprefix("prfaas")
        else:
            yield f"{command} {line.strip()}".strip().removesuffix(" -")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files, in the folder where a command runs, whose home is empty."""
    for name, content in BAD_FILES.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    return tmp_path


def refused(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a command line. AssertionError: not one sentence and nothing else."""
    words = shlex.split(command.replace("PAPER", str(PAPER)).replace("LOCAL", str(LOCAL)))
    monkeypatch.setattr(sys, "argv", ["prfaas", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, ""), command
    assert printed.err.startswith("prfaas: "), command
    assert printed.err.count("\n") == 1, command
    return printed.err


@pytest.mark.parametrize("command", list(_lines()))
def test_wrong_words(
    command: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(command, monkeypatch, capsys)


@pytest.mark.parametrize("reader", READERS.strip().splitlines())
def test_wrong_files(
    reader: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*BAD_FILES, "."):
        said = refused(reader.format(name), monkeypatch, capsys)
        assert name in said, (reader, said)


def test_a_trace_that_nobody_writes_is_not_waited_for(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(files / "fifo")
    assert "its name doesn't say" in refused("plan PAPER --trace fifo", monkeypatch, capsys)


@pytest.mark.parametrize("words", ["", "pool", "emit", "model", "monitoring"])
def test_no_words_show_help(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prfaas", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "Usage: " in capsys.readouterr().out


def _fields() -> Iterator[tuple[str | int, ...]]:
    """Places of all fields of a deployment file, the first entry of lists."""
    schema = json_schema()

    def inside(part: Any, place: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
        while "$ref" in part:
            part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]]
        for each in (*part.get("anyOf", ()), *part.get("oneOf", ())):
            yield from inside(each, place)
        for name, field in part.get("properties", {}).items():
            yield (*place, name)
            yield from inside(field, (*place, name))
        if isinstance(part.get("items"), dict):
            yield (*place, 0)
            yield from inside(part["items"], (*place, 0))

    return inside(schema, ())


def _with(document: Any, place: tuple[str | int, ...], value: object) -> Any:
    changed = at = deepcopy(document)
    for here, inner in zip(place, (*place[1:], None), strict=True):
        empty: Any = value if inner is None else [] if isinstance(inner, int) else {}
        if isinstance(at, list) and not at:
            at.append(empty)
        elif inner is None or not isinstance(at[here] if isinstance(at, list) else at.get(here), list | dict):
            at[here] = empty
        at = at[here]
    return changed


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": 1}},
        10**400,
        *(
            pytest.param(other, marks=pytest.mark.extended("the others are in `make test`"))
            for other in (math.nan, -1e30, [[]])
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_field_takes_what_it_can_not_be(value: object, tmp_path: Path) -> None:
    """The sentence names the field, or what is missing beside it."""
    example, path = yaml.safe_load(LOCAL.read_text()), tmp_path / "wrong.yaml"
    fields = sorted(set(_fields()), key=str)
    assert len(fields) > 200
    for place in fields:
        path.write_text(yaml.safe_dump(_with(example, place, value), allow_unicode=True))
        with pytest.raises(DeploymentError) as refusal:
            load_deployment(path)
        said = str(refusal.value)
        assert "\n" not in said, (place, said)
        name = [part for part in place if isinstance(part, str)][-1]
        assert name in said or "is missing" in said, (place, said)


@pytest.mark.parametrize("command", ["worth LOCAL", "up LOCAL", "plan PAPER"])
def test_a_package_that_is_missing_is_named(command: str, files: Path) -> None:
    """In a process of its own: what is imported already is not missing."""
    words = shlex.split(command.replace("PAPER", str(PAPER)).replace("LOCAL", str(LOCAL)))
    without = "import sys; sys.modules['msgspec'] = None; from prfaas.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, *words], capture_output=True, text=True, timeout=120, check=False
    )
    owner = "plan" if command.startswith("plan") else "gateway"
    assert (done.returncode, done.stdout) == (2, "")
    assert "packages (msgspec is missing): pip install" in done.stderr
    assert f"'.[{owner}]'" in done.stderr
    assert done.stderr.count("\n") == 1
