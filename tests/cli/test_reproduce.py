"""`prfaas reproduce`: the page in docs/ is what the command writes, and every deviation has its reason."""

import json
import sys
from pathlib import Path

import pytest
from studies import _reproduction as paper_tables

from prfaas.cli import main as cli

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reproduction.md"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_page_in_docs_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, "reproduce", "--out", tmp_path / "page.md") == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()


def test_numbers_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "reproduce", "--json") == 0
    numbers = {row["key"]: row for row in json.loads(capsys.readouterr().out)["numbers"]}
    assert numbers["table6/optimum/lambda_max"]["paper"] == 3.24
    assert abs(numbers["table6/optimum/lambda_max"]["deviation"]) < 0.02
    assert all(row["reason"] for row in numbers.values() if abs(row["deviation"]) > 0.01)


def test_a_deviation_without_a_reason_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = paper_tables.paper_numbers()
    del numbers["reasons"]["table6/naive"]
    monkeypatch.setattr(paper_tables, "paper_numbers", lambda: numbers)
    assert run(monkeypatch, "reproduce") == 1
    assert "no reason is known for naive heterogeneous: Λ_max" in capsys.readouterr().err


def rows_of_the_paper() -> list[paper_tables.ReproducedNumber]:
    return [row for section in paper_tables.reproduced() for row in section.rows]


def test_no_reason_is_left_over() -> None:
    """A reason for a number that no longer differs would mislead."""
    rows = rows_of_the_paper()
    for key, text in paper_tables.paper_numbers()["reasons"].items():
        reason = " ".join(text.split())
        assert any(row.is_off and row.key.startswith(key) and row.reason == reason for row in rows), key


def test_what_was_fitted_counts_as_no_check() -> None:
    """What the data files say that they take from the paper; and each text is of some number."""
    rows = rows_of_the_paper()
    given = {row.key for row in rows if row.by_construction}
    assert {row.key for row in rows if row.key.startswith("table3/")} <= given
    for key in (
        "optimum/theta_pd_p",
        "homogeneous/theta_pd_p",
        "homogeneous/ttft_p90_s",
        "naive/ttft_mean_s",
    ):
        assert f"table6/{key}" in given
    assert not given & {
        "table6/optimum/lambda_max",
        "table6/naive/lambda_max",
        "table6/homogeneous/ttft_mean_s",
    }
    for key in paper_tables.paper_numbers()["by_construction"]:
        assert any(row.key.startswith(key) for row in rows), key


def test_a_place_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "reproduce", "--out", tmp_path / "no" / "page.md") == 2
    assert "No such file or directory" in capsys.readouterr().err
