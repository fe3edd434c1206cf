"""Runs on several processes."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from studies import STUDIES
from studies._runs import Run

from prfaas.lab.studies import StudyContext, page_of, run_studies
from prfaas.lab.studies.study import LostProcessError, StudyOutcome, StudyRun, run_all


def _runs(context: StudyContext) -> list[Run]:
    base = Run(("first",), context.planned, context.poisson(0.8), 200, 5)
    return [
        base,
        replace(base, key=("other policy",), policy="tilted", params={"beta": 0.5}),
        replace(base, key=("for a while",), duration_s=100.0, course_parts=4, seed=6),
    ]


@pytest.mark.slow("starts processes that simulate")
def test_the_number_of_processes_changes_nothing(context: StudyContext) -> None:
    runs = _runs(context)
    told: list[tuple[StudyRun, StudyOutcome]] = []
    alone = run_all(runs, jobs=1)
    together = run_all(runs, jobs=2, on_done=lambda *each: told.append(each))
    assert [each.numbers for each in alone] == [each.numbers for each in together]
    assert sorted(run.key for run, _ in told) == sorted(run.key for run in runs)
    assert all(outcome is together[runs.index(run)] for run, outcome in told)


def test_runs_that_differ_in_their_keys_alone_are_simulated_once(
    context: StudyContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other, longer = _runs(context)
    runs = [first, other, replace(first, key=("again",)), longer, replace(longer, key=("as long",))]
    simulated: list[StudyRun] = []

    def outcome(run: Run) -> StudyOutcome:
        simulated.append(run)
        return StudyOutcome({"number": len(simulated)}, 1.0)

    monkeypatch.setattr(Run, "outcome", outcome)
    told: list[StudyRun] = []
    found = run_all(runs, jobs=1, on_done=lambda run, _: told.append(run))
    assert simulated == [first, other, longer]
    assert [each.numbers["number"] for each in found] == [1, 2, 1, 3, 3]
    assert [each.wall_s for each in found] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert sorted(run.key for run in told) == sorted(run.key for run in runs)


def test_variants_of_a_seed_meet_the_same_requests(context: StudyContext) -> None:
    first, other, _ = run_all(_runs(context), jobs=1)
    assert first.numbers["simulated_s"] == other.numbers["simulated_s"]
    assert first.numbers != other.numbers


def test_a_course_covers_the_counted_time(context: StudyContext) -> None:
    run = _runs(context)[2]
    (outcome,) = run_all([run], jobs=1)
    at_s = [each for each in outcome.numbers["course"]["at_s"] if each is not None]
    assert len(at_s) == len(outcome.numbers["course"]["ttft_s"]) == 4
    assert at_s == sorted(at_s) and 0 < at_s[0] < at_s[-1] < 90
    assert outcome.numbers["course"][f"prefill_instances_{context.pd}"] == [context.optimum.n_prefill] * 4
    assert run.expected_requests == pytest.approx(100 * run.traffic.mean_per_s)


@pytest.mark.slow("starts processes that simulate")
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_run_raises_passes_through(context: StudyContext, jobs: int) -> None:
    good, *_ = _runs(context)
    with pytest.raises(ValueError, match="no policy"):
        run_all([good, replace(good, policy="none such"), good], jobs=jobs)


@dataclass(frozen=True)
class FatalRun:
    """Its process ends by itself, as one that the kernel ends; if `once` is a file, only until that exists."""

    key: tuple[str, ...]
    once: Path | None = None
    expected_requests: float = 1e9

    def outcome(self) -> StudyOutcome:
        if self.once is None:
            os._exit(9)
        if not self.once.exists():
            self.once.touch()
            os._exit(9)
        return StudyOutcome({}, 0.5)


@pytest.mark.slow("starts processes that simulate")
def test_what_a_lost_process_had_not_simulated_is_simulated_again(
    context: StudyContext, tmp_path: Path
) -> None:
    good, *_ = _runs(context)
    told: list[StudyRun] = []
    found = run_all(
        [good, FatalRun(("once",), tmp_path / "died")], jobs=2, on_done=lambda run, _: told.append(run)
    )
    assert found[0].numbers == good.outcome().numbers
    assert found[1].wall_s == 0.5
    assert sorted(run.key for run in told) == [("first",), ("once",)]


@pytest.mark.slow("starts processes that simulate")
def test_a_run_that_always_loses_its_process_is_named(context: StudyContext) -> None:
    good, *_ = _runs(context)
    with pytest.raises(LostProcessError, match="'always'"):
        run_all([good, FatalRun(("always",))], jobs=2)


@pytest.mark.slow("starts processes that simulate")
def test_the_same_seed_gives_the_same_bytes_of_a_section(context: StudyContext) -> None:
    few = replace(context, seed=11)
    study = STUDIES["burst"]

    def section(jobs: int) -> str:
        found = study.describe(few, run_studies([study], few, jobs=jobs)[study.name])
        drawings = "".join(figure.svg for figure in found.figures)
        return page_of(few, {study.name: (study, found)}, "prfaas study burst") + drawings

    assert section(1) == section(2)
