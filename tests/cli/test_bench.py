"""`prfaas bench` around a stand-in for vLLM's tool; tests/test_clients_page.py runs the real one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.cli import main as cli
from prfaas.core.deployment import load_deployment
from prfaas.tools.bench.vllm_serve import load_test_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"
OPTIONS = ("--num-prompts", "7", "--base-url", "http://127.0.0.1:9")


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def page(requests: int) -> str:
    labels = 'endpoint="completions",outcome="ok",route="local"'
    return (
        "# TYPE prfaas_gateway_requests counter\n"
        f"prfaas_gateway_requests_total{{{labels}}} {requests}\n"
        "# TYPE prfaas_gateway_transferred_bytes counter\n"
        f'prfaas_gateway_transferred_bytes_total{{route="local"}} {requests * 1024}\n'
    )


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway has answered 3 requests before the test, and 10 after it."""
    pages: Iterator[str] = iter([page(3), page(10)])
    monkeypatch.setattr("prfaas.cli.bench.fetch_text", lambda admin, path: next(pages))


def tool(
    monkeypatch: pytest.MonkeyPatch, *, status: int = 0, result: str | None = '{"completed": 7}'
) -> list[Any]:
    """vLLM's tool ends with this status, having written this."""
    asked: list[Any] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    def ran(command: list[str], **options: Any) -> SimpleNamespace:
        asked.append((command, options))
        if result is not None:
            folder = Path(command[command.index("--result-dir") + 1])
            (folder / command[command.index("--result-filename") + 1]).write_text(result)
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", ran)
    return asked


def test_both_counts_are_joined(
    readings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(monkeypatch)
    assert run(monkeypatch, "bench", EXAMPLE, "--json", "--", *OPTIONS) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["vllm"] == {"completed": 7}
    assert document["gateway"]["routes"]["local"]["requests"] == 7
    assert document["gateway"]["routes"]["local"]["kv_bytes"] == 7 * 1024


def test_for_people(
    readings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tool(monkeypatch, result='{"completed": 5}')
    assert run(monkeypatch, "bench", EXAMPLE) == 0
    out = capsys.readouterr().out
    assert "7.0 KiB" in out and "2 requests were others' or warm-up" in out
    ((_, options),) = asked
    # Results go to stdout; the tool's text doesn't.
    assert options["stdout"] == 2


def test_the_user_s_options_come_after_ours(tmp_path: Path) -> None:
    deployment = load_deployment(EXAMPLE)
    command = load_test_command(deployment, OPTIONS, tmp_path)
    urls = [number for number, word in enumerate(command) if word == "--base-url"]
    assert [command[number + 1] for number in urls] == [deployment.gateway.url, "http://127.0.0.1:9"]
    assert command[command.index("--model") + 1] == "words"
    assert command[command.index("--tokenizer") + 1] == str(deployment.model.path)
    assert command[command.index("--result-dir") + 1] == str(tmp_path)


@pytest.mark.parametrize(
    ("status", "result", "words"),
    [
        (3, None, "`vllm bench serve` ended with exit code 3; it says why above"),
        (0, None, "`vllm bench serve` wrote no result"),
        (0, "no json", "`vllm bench serve` wrote no result"),
        (0, "[]", "no JSON object"),
    ],
)
def test_a_tool_that_fails_is_one_sentence(
    readings: None,
    status: int,
    result: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool(monkeypatch, status=status, result=result)
    assert run(monkeypatch, "bench", EXAMPLE) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_without_vllm_it_says_so(
    readings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(monkeypatch, "bench", EXAMPLE) == 2
    assert "vLLM is not installed in this environment" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["<html>{", None])
def test_a_gateway_that_is_none_is_said_before_the_test(
    answer: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = tool(monkeypatch)
    text = EXAMPLE.read_text().replace("port: 8000", "port: 8000\n  admin: {port: 9}")
    (tmp_path / "d.yaml").write_text(text)
    if answer is not None:
        monkeypatch.setattr("prfaas.cli.bench.fetch_text", lambda admin, path: answer)
    assert run(monkeypatch, "bench", tmp_path / "d.yaml") == 2
    error = capsys.readouterr().err
    assert ("is no page of a prfaas gateway" if answer else "no gateway answers at") in error and not asked
