"""What shells offer, asked as bash asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from studies import STUDIES

from prfaas.cli.completions import instance_names, model_names, policy_names, pool_names
from prfaas.cli.study_folder import study_names
from prfaas.core.scheduling.policy import POLICIES, known_policies

EXAMPLES = Path(__file__).parents[2] / "examples"


def offered(*words: str, folder: Path = EXAMPLES) -> list[str]:
    """What bash is offered for the last of these words after `prfaas`."""
    asked = {"_PRFAAS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["prfaas", *words])}
    done = subprocess.run(
        [sys.executable, "-c", "from prfaas.cli.main import main; import sys; sys.argv = ['prfaas']; main()"],
        env={**os.environ, **asked, "COMP_CWORD": str(len(words))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.slow("starts a process for each word")
def test_commands_and_names() -> None:
    assert {"status", "study", "explain"} <= set(offered(""))
    assert offered("study", "ab") == ["ablation"]
    assert set(POLICIES) <= set(offered("simulate", "paper.yaml", "--policy", ""))
    assert set(policy_names()) == set(known_policies())
    assert "h200" in offered("profile", "--gpu", "")
    assert "kimi-linear-h200" in offered("bandwidth", "kimi-linear", "--profile", "kimi")
    assert "mooncake" in offered("plan", "paper.yaml", "--format", "")


def test_instances_of_the_file_on_the_command_line() -> None:
    assert offered("engine", "local.yaml", "home") == ["home-prefill-0", "home-decode-0"]
    assert offered("pool", "start", "local.yaml", "prfaas") == ["prfaas-east-pool"]


class _Context:
    def __init__(self, **params: object) -> None:
        self.params = params


def test_instances_of_the_files_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("clusters: [{instances: [{name: one}, {}, 3]}, 4]")
    (tmp_path / "b.yaml").write_text("clusters: [{instances: [{name: two")
    (tmp_path / "c.yaml").write_text("- no mapping")
    (tmp_path / "d.yaml").write_bytes(b"\xff\xfe")
    assert instance_names(_Context()) == ["one"]
    assert instance_names(_Context(where=str(tmp_path / "none.yaml"))) == []
    assert pool_names(_Context(deployment=tmp_path / "a.yaml")) == []
    assert pool_names(_Context()) == []


def test_study_names_are_those_of_the_studies() -> None:
    assert sorted(STUDIES) == study_names()
    assert "kimi-k2" in model_names()
