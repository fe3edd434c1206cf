"""Runs on several processes."""

from dataclasses import replace

import pytest

from prfaas.lab.studies import Setting
from prfaas.lab.studies.runs import Outcome, Run, carry_out, expected_requests


def _runs(setting: Setting) -> list[Run]:
    base = Run(("first",), setting.planned, setting.poisson(0.8), 200, 5)
    return [
        base,
        replace(base, key=("other policy",), policy="tilted", params={"beta": 0.5}),
        replace(base, key=("for a while",), duration_s=100.0, course_parts=4, seed=6),
    ]


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(setting: Setting) -> None:
    runs = _runs(setting)
    told: list[tuple[Run, Outcome]] = []
    alone = carry_out(runs, jobs=1)
    together = carry_out(runs, jobs=2, on_done=lambda *each: told.append(each))
    assert [(each.numbers, each.course) for each in alone] == [
        (each.numbers, each.course) for each in together
    ]
    assert sorted(run.key for run, _ in told) == sorted(run.key for run in runs)
    assert all(outcome is together[runs.index(run)] for run, outcome in told)


def test_variants_of_a_seed_meet_the_same_requests(setting: Setting) -> None:
    first, other, _ = carry_out(_runs(setting), jobs=1)
    assert first.numbers["simulated_s"] == other.numbers["simulated_s"]
    assert first.numbers != other.numbers


def test_a_course_covers_the_counted_time(setting: Setting) -> None:
    run = _runs(setting)[2]
    (outcome,) = carry_out([run], jobs=1)
    at_s = [each for each in outcome.course["at_s"] if each is not None]
    assert len(at_s) == len(outcome.course["ttft_s"]) == 4
    assert at_s == sorted(at_s) and 0 < at_s[0] < at_s[-1] < 90
    assert outcome.course[f"prefill_instances_{setting.pd}"] == [setting.optimum.n_prefill] * 4
    assert expected_requests(run) == pytest.approx(100 * run.traffic.mean_per_s)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_run_raises_passes_through(setting: Setting, jobs: int) -> None:
    good, *_ = _runs(setting)
    with pytest.raises(ValueError, match="no policy"):
        carry_out([good, replace(good, policy="none such"), good], jobs=jobs)
