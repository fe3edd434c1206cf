"""`prfaas monitoring`: files that are written, what is printed, and mistakes."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from prfaas.cli import main as cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"
BOARDS = {"overview", "links", "engines", "caches", "series"}


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "monitoring", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_dashboards_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "dashboards"
    assert run(monkeypatch, "grafana", "-o", str(folder)) == 0
    files = {folder / f"prfaas-{board}.json" for board in BOARDS}
    assert set(folder.iterdir()) == files
    assert {Path(line) for line in capsys.readouterr().out.splitlines()} == files
    for file in files:
        assert json.loads(file.read_text())["uid"] == file.stem


def test_alerts_are_printed_or_written_and_are_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRFAAS_DOCS", "https://docs.example")
    assert run(monkeypatch, "alerts") == 0
    printed = capsys.readouterr().out
    assert run(monkeypatch, "alerts", "-o", str(tmp_path)) == 0
    assert (tmp_path / "prfaas.rules.yaml").read_text() == printed
    assert yaml.safe_load(printed)["groups"]
    assert "https://docs.example/guides/alerts.html#prfaaslinkdown" in printed


def test_the_scrape_configuration_of_a_deployment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "scrape", str(EXAMPLE)) == 0
    printed = capsys.readouterr().out
    assert "job_name: prfaas-gateway" in printed
    assert run(monkeypatch, "scrape", str(EXAMPLE), "-o", str(tmp_path)) == 0
    assert (tmp_path / "prfaas.scrape.yaml").read_text() == printed
    assert yaml.safe_load(printed)["scrape_configs"]


def test_a_folder_that_is_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert run(monkeypatch, "grafana", "-o", str(tmp_path / "taken")) == 2
    assert "taken: File exists" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prfaas.rules.yaml").mkdir()
    assert run(monkeypatch, "alerts", "-o", str(tmp_path)) == 2
    assert "prfaas.rules.yaml: Is a directory" in capsys.readouterr().err
