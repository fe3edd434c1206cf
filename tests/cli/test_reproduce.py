"""`prfaas reproduce`: the page in docs/ is what the command writes, and every deviation has its reason."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from studies import _reproduction as paper_tables

from prfaas.cli import main as cli
from prfaas.core.deployment import load_planned

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
    assert all(row["reason"] for row in numbers.values() if row["is_off"])
    assert numbers["claims/ring_512_gpus_128k_gbps"]["says"] == "below"


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
    """What the data files say that they take from the paper, and all that follows from it."""
    rows = rows_of_the_paper()
    kinds = {row.key: row.kind for row in rows}
    assert {kind for key, kind in kinds.items() if key.startswith("table3/")} == {"input"}
    assert {kind for key, kind in kinds.items() if key.startswith("table5/kv_mib/")} == {"fitted"}
    for key in (
        "table6/optimum/theta_pd_p",
        "table6/homogeneous/theta_pd_p",
        "table6/homogeneous/ttft_p90_s",
        "table6/naive/ttft_mean_s",
        "claims/equal_cost_ratio",
    ):
        assert kinds[key] == "fitted"
    for key in (
        "optimum/lambda_max",
        "optimum/threshold_tokens",
        "homogeneous/ttft_mean_s",
        "ratio_to_homogeneous",
    ):
        assert kinds[f"table6/{key}"] == "derived"


def test_independent_checks_stay_when_what_was_fitted_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another H20 and another decode batch change what is derived, and no check."""
    planned = load_planned(paper_tables.example_path("paper.yaml"))
    changed = replace(
        planned,
        clusters=tuple(
            replace(each, profile=each.profile.sped_up(1.1)) if each.kind == "pd" else each
            for each in planned.clusters
        ),
    )
    before = {row.key: row for row in rows_of_the_paper()}
    plan = paper_tables.make_plan(paper_tables.problem_of(changed), "mean length")
    after = {row.key: row for section in paper_tables.sections(plan) for row in section.rows}
    moved = {key for key, row in after.items() if row.ours != before[key].ours}
    assert "table6/optimum/lambda_max" in moved and "claims/ttft_mean_saved" in moved
    assert {before[key].kind for key in moved} <= {"derived", "fitted"}


def test_each_text_is_of_some_number() -> None:
    rows, numbers = rows_of_the_paper(), paper_tables.paper_numbers()
    for kind in ("input", "fitted", "derived"):
        for key in numbers[kind]:
            assert any(row.key.startswith(key) and row.kind == kind for row in rows), key


def test_a_place_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "reproduce", "--out", tmp_path / "no" / "page.md") == 2
    assert "--out: there is no directory" in capsys.readouterr().err
