"""`prfaas study` as a user types it."""

import json
import sys
from pathlib import Path

import pytest

from prfaas.cli import main as cli
from prfaas.cli import study_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "study", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.slow("simulates the cases of a study")
def test_a_study_is_the_same_for_any_number_of_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for jobs in (1, 2):
        assert run(monkeypatch, "scale", "--quick", "--json", "--jobs", jobs, "--seed", 7) == 0
        captured = capsys.readouterr()
        assert "per second" in captured.err
        texts.append(captured.out)
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert (found["deployment"], found["seed"], found["quick"]) == ("paper", 7, True)
    assert found["studies"]["scale"][0]["run"] == ["paper", 1, 7]
    assert found["studies"]["scale"][0]["ttft_mean_s"] > 0


@pytest.mark.slow("simulates the cases of a study")
def test_a_study_is_written_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("scale", "--quick", "--jobs", 1, "--deployment", EXAMPLES / "paper.yaml")
    assert run(monkeypatch, *given, "--out", tmp_path / "new") == 0
    assert capsys.readouterr().out == ""
    page = (tmp_path / "new" / "study-scale.md").read_text(encoding="utf-8")
    assert "](img/study-scale.svg)" in page and "`--quick`" in page
    svg = (tmp_path / "new" / "img" / "study-scale.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert run(monkeypatch, *given) == 0
    assert capsys.readouterr().out == page


def test_an_installed_package_says_where_the_studies_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(study_folder, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "scale") == 2
    assert "run this in a checkout of its repository, which has them in studies/" in capsys.readouterr().err


OWN = """
from prfaas.lab.studies import Study
from prfaas.lab.studies.study import Run, StudySection

def runs(context):
    return [Run(("mine",), context.planned, context.poisson(0.5), 50, context.seed)]

def describe(context, outcomes):
    return StudySection("Mine?", "One run.", [f"{len(outcomes)} run."], {})

STUDIES = {"mine": Study("mine", "Mine", runs, describe)}
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, jobs: int
) -> None:
    folder = tmp_path / f"own_studies_{jobs}"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "__init__.py").write_text("STUDY = 1")
    assert run(monkeypatch, "mine", "--studies", folder) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is no folder of studies, a Python package whose STUDIES has each by its name" in said
    sys.modules.pop(folder.name)
    (folder / "__init__.py").write_text(OWN)
    assert run(monkeypatch, "mine", "--studies", folder, "--jobs", jobs) == 0
    assert "1 run." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("nothing",), 'there is no study "nothing"; there are equal-cost'),
        (("scale", "--deployment", EXAMPLES / "multi.yaml"), "one prfaas and one pd cluster"),
        (("scale", "--quick", "--out", "/proc/none"), "/proc/none: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[object, ...], why: str
) -> None:
    assert run(monkeypatch, *args) == 2
    assert why in capsys.readouterr().err
