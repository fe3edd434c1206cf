"""The support table is what the tests of real engines say, and these can't say what their engines are not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.stack import write_deployment
from tests.support_table import ROOT, Row, Shown, deployments_in, problems, tables

from prfaas.core.deployment import Deployment, load_deployment

SHOWN = Shown(model="qwen3-next")


def written(folder: Path, **engine: Any) -> Deployment:
    path = write_deployment(folder, bandwidth="1 Gbit/s")
    document = json.loads(path.read_text())
    document["engine"] |= engine
    path.write_text(json.dumps(document))
    return load_deployment(path)


@pytest.mark.slow("a process of its own collects all tests of real engines")
def test_the_page_is_what_the_marks_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support_table"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mark_that_says_what_is_there_is_let_pass(tmp_path: Path) -> None:
    assert problems(SHOWN, written(tmp_path)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "qwen3"),
        ("prefill", "TP 2"),
        ("decode", "TP 1, DP 2"),
        ("drafts", "MTP"),
        ("dtype", "fp8_e4m3"),
        ("pool", True),
        ("nixl", True),
        ("first_token", True),
    ],
)
def test_a_mark_that_says_what_is_not_there_is_named(field: str, value: object, tmp_path: Path) -> None:
    (found,) = problems(replace(SHOWN, **{field: value}), written(tmp_path))
    assert found.startswith(f"{field}: its mark `shows` says ")


def test_drafts_that_no_mark_names_are_found(tmp_path: Path) -> None:
    drafting = written(tmp_path, extra_args=["--speculative-config", '{"method": "mtp"}'])
    assert [each.partition(":")[0] for each in problems(SHOWN, drafting)] == ["drafts"]


def test_deployments_are_found_in_what_fixtures_give(tmp_path: Path) -> None:
    class Stack:
        deployment = written(tmp_path)

    class Group:
        stack = Stack()

    assert len(list(deployments_in([Group(), ("a case", Stack()), tmp_path]))) == 2


def test_what_ran_interpreted_alone_has_a_star() -> None:
    rows = [
        Row(SHOWN, "test_chain", "test"),
        Row(replace(SHOWN, drafts="MTP", interpreted=True), "test_drafts", "test-all"),
        Row(replace(SHOWN, pool=True, interpreted=True), "test_pool", "test-all"),
        Row(replace(SHOWN, pool=True), "test_pool", "test"),
    ]
    (line,) = (line for line in tables(rows).splitlines() if line.startswith("| Qwen3-Next | random"))
    assert "| MTP* |" in line and "| yes |" in line and "| CPU; CPU, interpreted | no |" in line
    assert (
        "| Qwen3-Next | TP 1 | MTP | 16 bits | – | CPU, interpreted | `test_drafts` | `make test-all` |"
        in tables(rows)
    )


def test_a_model_that_nobody_knows_is_refused() -> None:
    with pytest.raises(SystemExit, match="knows no model qwen9"):
        tables([Row(Shown(model="qwen9"), "test_chain", "test")])
