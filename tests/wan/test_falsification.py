"""The falsification run without engines: phases, the scaled slice, what the planner says, and the comparison."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import falsification
from falsification_phases import (
    FEWEST_ANSWER,
    LEAST_SHARE,
    LONGEST_TOKENS,
    MOST_ANSWER,
    PHASES,
    SHORTEST_TOKENS,
    STATIC,
    LinkPhase,
    TraceSlice,
    bytes_between,
    capacity_per_s,
    mean_bits_per_s,
    phase_of,
    pieces_of,
    telemetry_bits_per_s,
)
from falsification_report import compared, plots_of, table_of, verdict_of
from fidelity_stack import EAST
from fidelity_stack import HOME as HOME_PROFILE
from prfaas.core.latency.files import profile_text
from prfaas.core.latency.profile import Curve, DecodeCurve, LatencyProfile
from prfaas.core.planner import problem_of
from prfaas.core.scheduling.policy import POLICIES
from prfaas.core.workload.requests import RequestTrace, TracedRequest, read_requests

NEED = 10e6


def test_phases_are_read_as_they_are_written() -> None:
    assert LinkPhase.parse("half=0.5") == LinkPhase("half", 0.5)
    assert LinkPhase.parse("wandering=0.75:0.3") == LinkPhase("wandering", 0.75, 0.3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("half", "a phase is written"),
        ("half=x", "a phase is written"),
        ("=0.5", "a phase is written"),
        ("half=0", "above 0"),
        ("half=1:-1", "0 or more"),
        ("low=0.5:0.3", "a mean above 0.5"),
    ],
)
def test_a_phase_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LinkPhase.parse(text)


@given(
    needed=st.floats(1e5, 1e9),
    cap=st.floats(0.4, 10.0),
    phase_s=st.floats(5.0, 200.0),
    seed=st.integers(0, 1000),
)
def test_the_line_is_within_its_limits_at_all_times(
    needed: float, cap: float, phase_s: float, seed: int
) -> None:
    pieces = pieces_of(PHASES, needed, cap * needed, phase_s, seed)
    times = [at_s for at_s, _ in pieces]
    assert times[0] == 0
    assert times == sorted(set(times))
    assert times[-1] == len(PHASES) * phase_s
    least = min(LEAST_SHARE, cap) * needed
    assert all(least * (1 - 1e-9) <= bits <= cap * needed * (1 + 1e-9) for _, bits in pieces)
    assert pieces == pieces_of(PHASES, needed, cap * needed, phase_s, seed)


def test_a_constant_phase_has_its_share_and_a_wandering_one_moves() -> None:
    pieces = pieces_of(PHASES, NEED, 6 * NEED, 60.0, seed=1)
    means = [mean_bits_per_s(pieces, number * 60.0, (number + 1) * 60.0) / NEED for number in range(4)]
    assert means[:3] == pytest.approx([4.0, 1.0, 0.5])
    assert 0.5 < means[3] < 1.2
    assert len({bits for at_s, bits in pieces if 180 <= at_s < 240}) > 20
    assert mean_bits_per_s(pieces, 30.0, 90.0) == pytest.approx(2.5 * NEED)


def trace(count: int = 400) -> RequestTrace:
    """Prompts of two blocks, the first of which every second prompt has in common with the first one."""
    return RequestTrace.of(
        "made up",
        [
            TracedRequest(float(number), 1024, 100, (0 if number % 2 else 10 * number, 10 * number + 1), 512)
            for number in range(count)
        ],
        "s",
    )


def test_a_slice_has_what_no_earlier_prompt_began_with() -> None:
    cut = TraceSlice.of(trace(), start_s=100, lasts_s=50, mean_tokens=3000, seed=1)
    assert len(cut.arrival_s) == 50
    assert cut.arrival_s[0] == 0.0
    # Half of them have twice as much to compute as the others.
    assert sorted(set(cut.input_tokens.tolist())) == [2000, 4000]
    assert set(cut.output_tokens.tolist()) == {5}


def test_a_slice_beyond_the_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="has no request from 1000 s"):
        TraceSlice.of(trace(), start_s=1000, lasts_s=50, mean_tokens=3000, seed=1)


def test_thinning_keeps_the_pace() -> None:
    cut = TraceSlice.of(
        read_requests(falsification.TRACE), start_s=600, lasts_s=300, mean_tokens=4000, seed=1
    )
    requests = cut.thinned(200)
    assert len(requests) == 200
    arrivals = [each.arrival_s for each in requests]
    assert arrivals == sorted(arrivals)
    whole, _ = np.histogram(cut.arrival_s, 10, (0, 300))
    kept, _ = np.histogram(arrivals, 10, (0, 300))
    assert np.abs(whole / len(cut.arrival_s) * 200 - kept).max() <= 1
    assert all(SHORTEST_TOKENS <= each.input_tokens <= LONGEST_TOKENS for each in requests)
    assert all(FEWEST_ANSWER <= each.output_tokens <= MOST_ANSWER for each in requests)
    # No two prompts begin alike.
    assert len({each.block_ids[0] for each in requests}) == len(requests)
    with pytest.raises(ValueError, match="and 100000 are wanted"):
        cut.thinned(100_000)


def test_policies_meet_the_same_lengths_and_other_tokens(document: dict[str, Any]) -> None:
    one, other = (falsification.requests_of(document, policy) for policy in ("paper", "tilted"))
    assert [(each.arrival_s, each.input_tokens) for each in one] == [
        (each.arrival_s, each.input_tokens) for each in other
    ]
    blocks = [{block for each in requests for block in each.block_ids} for requests in (one, other)]
    assert not blocks[0] & blocks[1]


def test_a_run_goes_on_with_the_same_settings_only(document: dict[str, Any], tmp_path: Path) -> None:
    again = json.loads(json.dumps(document))
    settings = again["settings"]
    options = argparse.Namespace(
        **{name: settings[name] for name in ("engines", "bandwidth", "load", "mean_tokens")},
        seconds=settings["phase_s"],
        phases=PHASES,
        start=settings["start_s"],
    )
    falsification.plan(again, options, tmp_path)
    assert set(again["drives"]) == set(document["drives"])
    options.mean_tokens = 2000
    falsification.plan(again, options, tmp_path)
    assert again["drives"] == {}


def test_requests_and_bytes_belong_to_their_phase() -> None:
    assert phase_of(np.array([0.0, 59.9, 60.0, 240.0, 500.0]), 4, 60.0).tolist() == [0, 0, 1, 3, 3]
    carried = [(0.0, 100), (10.0, 200), (30.0, 1000)]
    assert bytes_between(carried, 5.0, 20.0) == pytest.approx(600 - 150)
    assert bytes_between([], 0.0, 10.0) == 0.0


def test_telemetry_is_what_the_line_carries_when_it_is_quietest() -> None:
    """100 bytes/s all the time, 5,000 more from 10 s to 30 s: quiet at both ends."""
    carried = [(float(s), 100 * s + 5000 * min(max(s - 10, 0), 20)) for s in range(37)]
    assert telemetry_bits_per_s(carried) == pytest.approx(800.0)
    assert telemetry_bits_per_s(carried[11:30]) == pytest.approx(8 * 5100.0)
    assert telemetry_bits_per_s(carried[:3]) == 0.0


def test_the_default_policy_is_one_that_exists() -> None:
    assert falsification.default_policy() in POLICIES


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run leaves, with made-up engines, and with the simulator in place of the live drives."""
    prefill = Curve.through_points(
        tuple((float(tokens), 0.02 + tokens * 3e-4) for tokens in (512, 2048, 12288)), "monotone"
    )
    decode = DecodeCurve(Curve.through_points(((1.0, 0.01), (8.0, 0.02)), "linear"), 256)
    profiles = {
        name: profile_text(LatencyProfile(name, "cpu", "tiny", 1, prefill, has, "made up"))
        for name, has in ((EAST, None), (HOME_PROFILE, decode))
    }

    def cluster(name: str, kind: str, roles: list[str]) -> dict[str, Any]:
        instances = [
            {"name": f"{name}-{role}", "roles": [role], "host": f"10.0.0.{number + 1}", "http_port": 8100,
             "kv_port": 8200}
            for number, role in enumerate(roles)
        ]  # fmt: skip
        return {"name": name, "kind": kind, "hardware": "cpu", "instances": instances}

    made: dict[str, Any] = {
        "measured": {"profiles": profiles, "request_s": 0.01, "hop_s": 0.01},
        "machine": {"cores": 2, "load_average": 0.0},
        "deployment": {
            "name": "wan",
            "model": {"served_name": "tiny", "path": "nowhere", "max_model_len": 16384},
            "clusters": [
                cluster("far", "prfaas", ["prefill"]),
                cluster("home", "pd", ["prefill", "decode"]),
            ],
            "links": [{"source": "far", "target": "home", "bandwidth": 60e6, "rtt_s": 0.03}],
        },
    }
    options = argparse.Namespace(
        engines="vllm",
        bandwidth="60 Mbit/s",
        seconds=60.0,
        phases=PHASES,
        load=0.5,
        start=600.0,
        mean_tokens=4000,
    )
    falsification.plan(made, options, tmp_path_factory.mktemp("plan"))
    for policy in ("paper", "tilted", STATIC):
        requests = falsification.requests_of(made, policy)
        made["drives"][policy] = {
            "requests": [
                [each.arrival_s, each.input_tokens, each.output_tokens, None, None, "", None]
                for each in requests
            ],
            "lasted_s": 240.0,
            "cpu_s": dict.fromkeys(
                ("east-prefill-0", "home-prefill-0", "home-decode-0", "gateway", "client"), 60.0
            ),
            "strangers_cpu_s": 24.0,
            "probes_s": [1.3] * 8,
            "behind_s": 0.0,
            "load_average": 1.0,
            "readings": [[0.5, 1000.0, 60e6], [100.0, None, 60e6]],
            "carried": [[0.0, 0], [240.0, 24_000_000]],
        }
    falsification.simulate_drives(made)
    for drive in made["drives"].values():
        predicted = drive["simulated"]
        columns = zip(
            drive["requests"], predicted["ttft_s"], predicted["e2e_s"], predicted["offloaded"], strict=True
        )
        for row, ttft_s, e2e_s, offloaded in columns:
            row[3:6] = [row[0] + 1.1 * ttft_s, row[0] + e2e_s, "offload" if offloaded else "local"]
    json.dumps(made)
    return made


def test_the_plan_of_the_run_is_that_of_its_slice(document: dict[str, Any]) -> None:
    assert document["per_s"] == pytest.approx(0.5 * document["capacity_per_s"])
    assert document["count"] == round(document["per_s"] * 240)
    assert 1e6 < document["needed_bits_per_s"] < 60e6
    assert document["pieces"][1][1] == pytest.approx(document["needed_bits_per_s"])


def test_a_plan_with_a_threshold_that_stays_carries_less(document: dict[str, Any], tmp_path: Path) -> None:
    problem = problem_of(falsification.planned_of(document, tmp_path))
    half = document["needed_bits_per_s"] / 2
    best, fixed = (
        capacity_per_s(problem, half, threshold) for threshold in (None, document["threshold_tokens"])
    )
    assert fixed == pytest.approx(document["per_s"] / 2, rel=0.05)
    assert best > 1.5 * fixed
    assert capacity_per_s(problem, 60e6, document["threshold_tokens"]) == pytest.approx(
        document["capacity_per_s"], rel=0.01
    )


def test_a_run_that_is_a_tenth_slower_is_reported_as_that(document: dict[str, Any], tmp_path: Path) -> None:
    found = compared(document, problem_of(falsification.planned_of(document, tmp_path)))
    assert len(found) == 12
    assert sum(each["requests"] for each in found) == 3 * document["count"]
    for each in found:
        assert each["ttft"]["mean"]["error"] == pytest.approx(1 / 1.1 - 1, abs=1e-6)
        assert each["is_met"]
        assert each["same_route"] == 1.0
        assert each["line_bytes"] == pytest.approx(6_000_000)
        assert each["threshold"] == (1000.0 if each["phase"] == "ample" else None)
    by_name = {(each["policy"], each["phase"]): each for each in found}
    assert not by_name[STATIC, "half"]["stable_by_plan"]
    assert by_name["paper", "half"]["stable_by_plan"]
    # The threshold follows the line.
    assert by_name["paper", "half"]["offloaded"] < by_name["paper", "ample"]["offloaded"]
    assert by_name["paper", "half"]["offloaded_predicted"] < by_name["paper", "ample"]["offloaded_predicted"]
    assert table_of(found).row_count == 12
    said = verdict_of(found, document)
    assert "mean TTFT within 15% of its prediction in 12 of 12 phases" in said
    assert any("others took 5% of the cores" in line for line in said)


def test_a_missed_phase_is_named(document: dict[str, Any], tmp_path: Path) -> None:
    late = json.loads(json.dumps(document))
    for row in late["drives"]["paper"]["requests"]:
        if 60 <= row[0] < 120:
            row[3] += 10.0
    found = compared(late, problem_of(falsification.planned_of(document, tmp_path)))
    assert [(each["policy"], each["phase"]) for each in found if not each["is_met"]] == [("paper", "needed")]
    assert any(line.startswith("  missed: paper, needed: -") for line in verdict_of(found, late))


def test_lost_requests_count_as_lost(document: dict[str, Any], tmp_path: Path) -> None:
    broken = json.loads(json.dumps(document))
    broken["drives"]["paper"]["requests"][0][3:] = [None, None, "", "no answer"]
    found = compared(broken, problem_of(falsification.planned_of(document, tmp_path)))
    assert found[0]["lost"] == 1
    assert sum(each["lost"] for each in found) == 1


def test_the_plots_are_drawings(document: dict[str, Any], tmp_path: Path) -> None:
    found = compared(document, problem_of(falsification.planned_of(document, tmp_path)))
    plots = plots_of(found, document)
    assert len(plots) == 3
    assert all(svg.startswith("<svg") and "live" in svg for svg in plots.values())
