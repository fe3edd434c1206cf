"""What studies of distance, spot capacity, agents and other models say of given outcomes."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from studies import STUDIES
from studies._runs import Run
from studies.agentic import SteadySessions
from tests.lab.studies.test_findings import outcome

from prfaas.core.workload.traffic import take
from prfaas.lab.studies import StudyContext, page_of
from prfaas.lab.studies.study import StudyOutcome


def told(context: StudyContext, name: str, found: Callable[[Any], StudyOutcome]) -> tuple[str, str]:
    study = STUDIES[name]
    section = study.describe(context, {run.key: found(run) for run in study.runs(context)})
    return " ".join(section.findings), page_of(context, {name: (study, section)}, "prfaas study x")


def runs_of(context: StudyContext, name: str) -> list[Run]:
    return [run for run in STUDIES[name].runs(context) if isinstance(run, Run)]


def test_windows_are_bytes_per_round_trip(context: StudyContext) -> None:
    limits = {
        (run.key[1], run.key[2]): run.planned.links[0].transfer_limit_bits_per_s
        for run in runs_of(context, "round-trip")
    }
    assert limits["no window", 0.2] == float("inf")
    # Four connections of 4 MiB, five times a second.
    assert limits["window", 0.2] == pytest.approx(4 * 4 * 2**20 * 8 * 5)
    assert {run.planned.links[0].rtt_s for run in runs_of(context, "round-trip")} == {
        rtt_s for _, rtt_s in limits
    }


def test_what_a_round_trip_costs_is_told(context: StudyContext) -> None:
    def found(run: Run) -> StudyOutcome:
        _, kind, rtt_s, seed = run.key
        slow = 1.5 if kind == "window" and float(rtt_s) >= 0.1 else 1.0
        return outcome(context, slow * (2.0 + float(rtt_s) + 0.001 * float(seed)))

    text, page = told(context, "round-trip", found)
    assert "the mean TTFT of `paper` goes from 2.00 ± 0.01 to 2.20 ± 0.01 s (+10 ± 0 %)" in text
    assert (
        "Windows lengthen the mean TTFT of `tilted` by +50 ± 0 % at 100 ms and +50 ± 0 % at 200 ms." in text
    )
    assert "4 windows carry so much up to a round trip of 39 ms, and 200 ms take 21 connections" in text
    assert "| 200 ms | 671.1 Mbit/s |" in page


def test_spot_capacity_is_away_as_often_as_said(context: StudyContext) -> None:
    whole = replace(context, is_quick=False)
    runs = [run for run in runs_of(whole, "spot") if run.key[0] == "tilted"]
    assert all(not run.failures for run in runs if run.key[1] == "none")
    for run in runs:
        kills = 0.0 if run.key[1] == "none" else float(str(run.key[1]).split(" ")[0])
        # Policies know of it.
        assert [each.kills_per_hour for each in run.planned.clusters] == [kills, 0.0]
    often = [run for run in runs if run.key[1] == "20 per hour, notice 30 s, back after 120 s"]
    spares = [run for run in runs if str(run.key[1]).endswith("with spares")]
    # 3 of 5 are up: 7 for the 4 that are wanted. Back after 30 s, 6 of 7 are: 5.
    for return_s, instances in ((120, 7), (30, 5)):
        back = [run for run in spares if f"back after {return_s} s" in str(run.key[1])]
        assert {run.planned.clusters[0].instance_count for run in back} == {instances}
        assert {each.what for run in back for each in run.failures} == {f"east-{k}" for k in range(instances)}
    for run in often:
        for instance in {each.what for each in run.failures}:
            own = [each for each in run.failures if each.what == instance]
            assert all(before.at_s + before.lasts_s < after.at_s for before, after in pairwise(own))
    until_s = often[0].requests / often[0].traffic.mean_per_s + 3600
    count = np.mean([len(run.failures) for run in often])
    # Four instances; up for 180 s and away for 120 s on average.
    assert count == pytest.approx(4 * until_s / 300, rel=0.1)
    assert {each.notice_s for run in often for each in run.failures if each.at_s > 30} == {30.0}


def test_the_same_kills_come_with_any_notice(context: StudyContext) -> None:
    kills = {
        run.key[1]: [(each.what, each.at_s) for each in run.failures]
        for run in runs_of(context, "spot")
        if run.key[0] == "paper" and run.key[2] == context.seed
    }
    assert (
        kills["6 per hour, notice 0 s, back after 120 s"]
        == kills["6 per hour, notice 30 s, back after 120 s"]
    )


def test_what_spot_capacity_costs_is_told(context: StudyContext) -> None:
    def found(run: Run) -> StudyOutcome:
        label, way = str(run.key[1]), run.key[3]
        kills = 0.0 if label == "none" else float(label.split(" ")[0])
        assert run.keeps_transfers is (way == "kept")
        more_s = kills / (40 if way == "kept" else 10)
        base = outcome(context, (2.0 + more_s) * (1 + 0.001 * run.seed))
        return replace(base, numbers={**base.numbers, "retries": 0 if "notice 30 s" in label else kills})

    text, page = told(context, "spot", found)
    assert "where all is lost, by +10 ± 0 % mean, +10 ± 0 % P99.9 at 2 kills per hour" in text
    assert "where what has come is kept, by +2 ± 0 % mean, +2 ± 0 % P99.9 at 2 kills per hour" in text
    assert "−38 ± 0 % mean, −38 ± 0 % P99.9 at 20 kills per hour, against losing it" in text
    assert "Notice takes the attempts that `paper` makes again from 4 to 4 with 10 s at 2 kills" in text
    assert "4 to 0 with 30 s at 2 kills (mean TTFT 0 %)" in text
    assert "No request is lost in any run." in text
    assert "Where all is lost, and without notice, it is 2.00 ± 0.00 times (not met) with `paper`" in text
    assert (
        "Where what has come is kept, and without notice, it is 1.25 ± 0.00 times (met) with `paper`" in text
    )
    assert "| 20 per hour, notice 0 s, back after 120 s | 60 % |" in page
    assert "| 6 per hour, notice 0 s, back after 120 s | 2.61 ± 0.02 | 2.16 ± 0.01 |" in page


@pytest.mark.parametrize(("spread", "verdict"), [(0.001, "(met)"), (0.2, "(open)")])
def test_the_goal_is_open_where_seeds_can_not_tell(
    context: StudyContext, spread: float, verdict: str
) -> None:
    def found(run: Run) -> StudyOutcome:
        more = 0.0 if run.key[1] == "none" else 0.25 + spread * (run.seed - context.seed - 0.5)
        return outcome(context, 2.0 * (1 + more))

    text, _ = told(context, "spot", found)
    assert f"1.25 ± {'0.01' if spread < 0.1 else '1.27'} times {verdict}" in text


def test_a_lost_request_is_not_hidden(context: StudyContext) -> None:
    base = outcome(context, 2.0)
    text, _ = told(
        context, "spot", lambda run: replace(base, numbers={**base.numbers, "lost": run.seed == 3})
    )
    assert "requests are lost." in text and "No request is lost" not in text


@pytest.mark.slow("simulates the cases of a study")
def test_where_bandwidth_is_enough_is_found_between_the_steps(context: StudyContext) -> None:
    def found(run: Run) -> StudyOutcome:
        name, factor, _seed = run.key
        # Equal at 1.2 times the planner's bandwidth for hybrid models, nowhere for dense ones.
        hybrid = name not in ("minimax-m2.5", "qwen3-235b")
        ttft_s = 2.0 if not factor else 2.0 * (1.2 / float(factor) if hybrid else 1.5)
        return outcome(context, ttft_s)

    text, page = told(context, "dense-hybrid", found)
    assert "The simulated bandwidths are 1.20" in text and "With dense models PrfaaS has" not in text
    assert re.search(r"Λ_max dense models need 83\.\d* Gbit/s \(qwen3-235b\*\) to 159\.?\d* Gbit/s", text)
    assert page.count("| outside |") == 2


def test_with_which_models_it_pays_is_told(context: StudyContext) -> None:
    def found(run: Run) -> StudyOutcome:
        name, system, seed = run.key
        if name == "ring-2.5-1t":
            return outcome(context, 2.0, stable=system == "PrfaaS")
        ahead = 0.5 if name == "internal-1t" else 1.0
        return outcome(context, (2.0 if system == "PD alone" else 2.0 * ahead) + 0.001 * float(seed))

    text, page = told(context, "models", found)
    assert "shorter with internal-1t (−50 ± 0 %; P99 −50 ± 0 %)" in text
    assert "No difference can be told from chance with kimi-linear*" in text
    assert "Queues grow in one of the two with ring-2.5-1t*." in text
    assert (
        "PrfaaS carries more than PD alone with internal-1t (1.19 times), kimi-linear* (1.15 times)" in text
    )
    assert "qwen3-235b* (1.15 times)" in text and "and no more with minimax-m2.5 (0.82 times)" in text
    assert "| minimax-m2.5 | 248 KiB | 3.12 | 37K | 4 / 4 |" in page


@pytest.mark.slow("simulates thousands of requests")
def test_what_stores_are_worth_to_agents_is_told(context: StudyContext) -> None:
    worth = {"nothing kept": 4.0, "engines' caches, no moves": 2.0, "engines' caches, moves": 1.5}

    def found(run: Run) -> StudyOutcome:
        store = str(run.key[2])
        stable = store != "nothing kept"
        return outcome(context, worth.get(store, 1.0) + 0.001 * run.seed, stable=stable, hits=0.9)

    text, page = told(context, "agentic", found)
    assert text.count("the mean TTFT changes by: moves without pools −25 ± 0 %, pools −50 ± 0 %") == 4
    assert "queues grow with *nothing kept*." in text
    assert re.search(r"An infinite cache would spare 9\d % of all tokens", page.replace("\n", " "))


def test_agents_come_as_often_as_planned_from_the_beginning(context: StudyContext) -> None:
    run = next(run for run in runs_of(replace(context, is_quick=False), "agentic"))
    traffic = run.traffic
    assert isinstance(traffic, SteadySessions)
    requests = list(take(traffic.chunks(np.random.default_rng(1)), until_s=4000.0))
    for part in range(4):
        here = sum(1000 * part <= each.arrival_s < 1000 * (part + 1) for each in requests)
        assert here / 1000 == pytest.approx(traffic.mean_per_s, rel=0.2)
    assert all(len(each.block_ids) == -(-each.input_tokens // 512) for each in requests)
    assert max(each.input_tokens for each in requests) <= context.range_tokens[1]
