"""What is sent: rates, lengths that are cut, traces that are scaled."""

from pathlib import Path

import numpy as np
import pytest

from prfaas.cli.simulate_inputs import SimulatedTraffic, traffic_asked
from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import TracedRequest, read_requests, write_requests
from prfaas.core.workload.traffic import RequestChunk
from prfaas.lab.simulator.recording import Arriving

PAPER = Path(__file__).parents[2] / "examples" / "paper.yaml"


@pytest.fixture(scope="module")
def deployment() -> PlannedDeployment:
    return load_planned(PAPER)


def chunks_of(traffic: SimulatedTraffic, count: int, seed: int = 0) -> list[RequestChunk]:
    chunks = traffic.traffic.chunks(np.random.default_rng(seed))
    found = [next(chunks)]
    while sum(len(each) for each in found) < count:
        found.append(next(chunks))
    return found


def trace_of(tmp_path: Path, lengths: list[int], gap_s: float = 1.0) -> Path:
    path = tmp_path / "trace.jsonl"
    write_requests(
        path,
        (
            TracedRequest(number * gap_s, tokens, 10, tuple(range(-(-tokens // 512))), 512)
            for number, tokens in enumerate(lengths)
        ),
    )
    return path


@pytest.mark.parametrize(("bursts", "diurnal"), [(False, None), (True, None), (False, "0.8/600")])
def test_made_up_requests_have_the_rate_and_the_lengths_of_the_file(
    deployment: PlannedDeployment, bursts: bool, diurnal: str | None
) -> None:
    traffic = traffic_asked(Arriving.of(deployment, None), 3.0, bursts=bursts, diurnal=diurnal)
    assert traffic.traffic.mean_per_s == pytest.approx(3.0)
    chunks = chunks_of(traffic, 200_000)
    arrivals = np.concatenate([each.arrival_s for each in chunks])
    lengths = np.concatenate([each.input_tokens for each in chunks])
    assert len(arrivals) / arrivals[-1] == pytest.approx(3.0, rel=0.03 if bursts else 0.01)
    assert lengths.mean() == pytest.approx(27_486, rel=0.01)
    assert lengths.min() >= 128 and lengths.max() <= 131_072
    assert {int(tokens) for each in chunks for tokens in each.output_tokens} == {1024}
    assert traffic.described["mean_input_tokens"] == pytest.approx(27_486, rel=0.001)


def test_a_hit_ratio_of_the_file_shortens_prompts_and_is_said() -> None:
    half = load_planned(PAPER, changes={"workload.prefix_hit_ratio": 0.5, "workload.lengths.low": 256})
    traffic = traffic_asked(Arriving.of(half, None), 3.0, bursts=False, diurnal=None)
    lengths = chunks_of(traffic, 8000)[0].input_tokens
    assert lengths.mean() == pytest.approx(13_800, rel=0.05)
    assert any("prefix_hit_ratio of 0.5" in note for note in traffic.notes)


def replayed(deployment: PlannedDeployment, path: Path, rate_rps: float) -> SimulatedTraffic:
    arriving = Arriving.of(deployment, read_requests(path))
    return traffic_asked(arriving, rate_rps, bursts=False, diurnal=None)


def test_a_trace_comes_at_the_rate_that_was_asked_for(tmp_path: Path, deployment: PlannedDeployment) -> None:
    path = trace_of(tmp_path, [1000] * 101)
    traffic = replayed(deployment, path, 4.0)
    assert traffic.traffic.mean_per_s == pytest.approx(4.0)
    assert traffic.described["speed_factor"] == pytest.approx(4.0, rel=1e-9)
    assert traffic.described["jitter_s"] == 0
    first, second = chunks_of(traffic, 202)
    assert first.arrival_s[-1] == pytest.approx(25.0)
    assert second.arrival_s[0] == pytest.approx(101 / 4)
    assert not set(first.block_ids.tolist()) & set(second.block_ids.tolist())


def test_prompts_beyond_the_profile_are_simulated_and_counted(
    tmp_path: Path, deployment: PlannedDeployment
) -> None:
    path = trace_of(tmp_path, [1000, 131_072, 131_073, 400_000, 100])
    traffic = replayed(deployment, path, 1.0)
    (chunk,) = chunks_of(traffic, 5)
    assert chunk.input_tokens.tolist() == [1000, 131_072, 131_073, 400_000, 100]
    assert np.diff(chunk.block_starts).tolist() == [2, 256, 257, 782, 1]
    assert traffic.described["profiles_tokens"] == [128, 131_072]
    assert any("20.00% of the prompts are shorter and 40.00% longer" in note for note in traffic.notes)


def test_a_coarse_clock_is_jittered_and_said(tmp_path: Path, deployment: PlannedDeployment) -> None:
    path = tmp_path / "coarse.jsonl"
    write_requests(path, (TracedRequest(3.0 * (n // 10), 600, 1, (0, n + 1), 512) for n in range(100)))
    traffic = replayed(deployment, path, 10.0)
    assert traffic.described["jitter_s"] == 3.0
    (chunk,) = chunks_of(traffic, 100)
    assert len(set(chunk.arrival_s.tolist())) == 100
    assert traffic.traffic.mean_per_s == pytest.approx(10.0)
    assert any("steps of 3 s" in note for note in traffic.notes)


def test_a_trace_without_duration_has_no_rate(tmp_path: Path, deployment: PlannedDeployment) -> None:
    path = trace_of(tmp_path, [1000, 2000], gap_s=0.0)
    with pytest.raises(WorkloadError, match="all requests come at once"):
        replayed(deployment, path, 1.0)
