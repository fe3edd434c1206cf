"""`prfaas policies`: what there is, from where, with which parameters."""

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

import pytest

from prfaas.cli import main as cli
from prfaas.core.scheduling.parameters import parameters_of
from prfaas.core.scheduling.policy import POLICIES, known_policies, make_policy, policy_class

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "policies", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two entry points, of which one is broken, as `pip install` leaves it."""
    (tmp_path / "outside.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Far:\n"
        '    """Always far.\n\n    More of it.\n    """\n\n    share: float = 0.5\n\n'
        "    def decide(self, request, view):\n        raise NotImplementedError\n"
    )
    info = tmp_path / "outside_policies-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-policies\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[prfaas.policies]\nfar = outside:Far\nbroken = outside:Gone\npaper = outside:Far\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("outside", None)


def test_ours_with_their_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed][: len(POLICIES)] == list(POLICIES)
    paper = next(each for each in listed if each["name"] == "paper")
    assert (paper["from"], paper["problem"]) == ("prfaas", None) and paper["text"].endswith(".")
    mark = paper["parameters"][0]
    assert (mark["name"], mark["default"], mark["above"], mark["least"]) == ("queue_mark", 0.5, 0, None)
    assert run(monkeypatch, "paper") == 0
    said = capsys.readouterr().out
    assert said.startswith("paper  (prfaas)\n") and "queue_mark: " in said and "default 0.5" in said


def test_those_of_other_packages(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json") == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["far"]["from"] == "outside-policies 1.2" and listed["far"]["text"] == "Always far."
    assert [each["name"] for each in listed["far"]["parameters"]] == ["share"]
    assert "has no class" in listed["broken"]["problem"]
    assert listed["paper"]["from"] == "prfaas", "our names can't be taken"
    assert make_policy("far", {"share": 0.25}).share == 0.25  # type: ignore[attr-defined]
    assert run(monkeypatch, "broken") == 2
    assert capsys.readouterr().err == 'prfaas: policy broken: module "outside" has no class "Gone"\n'
    assert run(monkeypatch) == 0
    assert "can't be used: policy broken" in capsys.readouterr().out


def test_our_names_are_entry_points_too() -> None:
    entry_points = PROJECT["entry-points"]["prfaas.policies"]
    assert list(entry_points) == list(POLICIES)
    for name, value in entry_points.items():
        assert importlib.metadata.EntryPoint(name, value, "prfaas.policies").load() is policy_class(name)
    assert list(known_policies())[: len(POLICIES)] == list(POLICIES)


def test_every_parameter_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "scheduling.md").read_text()
    for name in POLICIES:
        for parameter in parameters_of(policy_class(name)):
            assert f"`{parameter}`" in page, (name, parameter)
