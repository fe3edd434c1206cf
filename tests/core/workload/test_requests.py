import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import TracedRequest, read_requests, write_requests

MOONCAKE = [
    {"timestamp": 27000, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 30000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 30000, "input_length": 512, "output_length": 30, "hash_ids": [1]},
]


def rows(path: Path, values: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values))
    return path


def test_mooncake_in_seconds_from_the_first_arrival(tmp_path: Path) -> None:
    trace = read_requests(rows(tmp_path / "m.jsonl", [*MOONCAKE[1:], MOONCAKE[0]]))
    assert [each.arrival_s for each in trace.requests] == [0, 3, 3]
    assert trace.requests[1] == TracedRequest(3.0, 1100, 20, (1, 2, 3), 512)
    assert "ms" in trace.units and trace.block_tokens == 512 and trace.span_s == 3


def test_without_ids_no_two_prompts_begin_alike(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,1500,10\n"
        "2023-11-16 18:17:03.9799600,0,10\n"
        "2023-11-16 18:17:05.4799600,512,8\n"
    )
    trace = read_requests(azure)
    assert [each.block_ids for each in trace.requests] == [(0, 1, 2), (3,)]
    assert trace.requests[1].arrival_s == pytest.approx(1.5, abs=1e-6) and trace.empty == 1
    own = rows(
        tmp_path / "o.jsonl",
        [{"arrival_s": 1, "input_tokens": 600, "output_tokens": 1, "cached_tokens": 5}] * 2,
    )
    assert [each.block_ids for each in read_requests(own).requests] == [(0, 1), (2, 3)]


@st.composite
def request_lists(draw: st.DrawFn) -> list[TracedRequest]:
    size = draw(st.integers(1, 700))
    requests = []
    times = draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).map(sorted))
    for arrival_s in times:
        prompt = draw(st.integers(1, 3000))
        count = -(-prompt // size)
        blocks = draw(st.lists(st.integers(0, 2**63 - 1), min_size=count, max_size=count))
        moved_s = arrival_s - times[0]
        requests.append(TracedRequest(moved_s, prompt, draw(st.integers(0, 99)), tuple(blocks), size))
    return requests


@given(request_lists(), st.sampled_from(["r.jsonl", "r.jsonl.gz"]))
def test_our_own_format_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, requests: list[TracedRequest], name: str
) -> None:
    path = tmp_path_factory.mktemp("own") / name
    assert write_requests(path, requests) == len(requests)
    assert sorted(read_requests(path).requests, key=repr) == sorted(requests, key=repr)
    # The reader of lengths takes the same file.
    assert read_requests(path).lengths.high == max(each.input_tokens for each in requests)


def test_the_same_requests_make_the_same_file(tmp_path: Path) -> None:
    request = TracedRequest(0.0, 5, 1, (7,), 512)
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_requests(tmp_path / name, [request])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


GOOD = {"arrival_s": 0, "input_tokens": 600, "output_tokens": 1, "block_tokens": 512, "block_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_tokens": -1}, "input_tokens must be a whole number of tokens, not -1"),
        ({"arrival_s": "now"}, "arrival_s must be a time, not 'now'"),
        ({"block_ids": [1]}, "has 1 block_ids for 600 tokens, which begin 2 blocks of 512"),
        ({"block_ids": [1, -2]}, "block_ids must be from 0 to"),
        ({"block_ids": [1, 1 << 63]}, "block_ids must be from 0 to"),
        ({"block_ids": [1, 2.5]}, "block_ids must be a list of whole numbers"),
        ({"block_tokens": 0}, "block_tokens must be above 0"),
        ({"block_ids": None}, "all lines must have block_ids, or none"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    bad = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    path = rows(tmp_path / "bad.jsonl", [GOOD, bad])
    with pytest.raises(WorkloadError, match=rf"bad\.jsonl:2: .*{says}"):
        read_requests(path)


def test_mooncake_ids_must_fit_the_prompt(tmp_path: Path) -> None:
    bad = {**MOONCAKE[0], "input_length": 1025}
    with pytest.raises(
        WorkloadError, match=r":2: has 2 hash_ids for 1025 tokens, which begin 3 blocks of 512"
    ):
        read_requests(rows(tmp_path / "m.jsonl", [MOONCAKE[0], bad]))


def test_files_without_requests_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="has no request with a prompt"):
        read_requests(rows(tmp_path / "e.jsonl", [{**GOOD, "input_tokens": 0, "block_ids": []}]))
    with pytest.raises(WorkloadError, match="blocks of 256 and of 512 tokens"):
        read_requests(rows(tmp_path / "b.jsonl", [GOOD, {**GOOD, "input_tokens": 300, "block_tokens": 256}]))


def test_a_coarse_clock_is_noticed(tmp_path: Path) -> None:
    values = [
        {"arrival_s": 3 * (number // 10), "input_tokens": 5, "output_tokens": 1} for number in range(100)
    ]
    assert read_requests(rows(tmp_path / "c.jsonl", values)).quantum_s == 3
    fine = [{**value, "arrival_s": number / 7} for number, value in enumerate(values)]
    assert read_requests(rows(tmp_path / "f.jsonl", fine)).quantum_s == 0


def test_the_example_is_a_slice_of_mooncakes() -> None:
    path = Path(__file__).parents[3] / "examples" / "traces" / "mooncake_burst.jsonl.gz"
    trace = read_requests(path)
    assert path.stat().st_size < 200_000
    with gzip.open(path) as file:
        assert len(list(file)) == len(trace.requests) == 1000
    assert trace.quantum_s == 3 and trace.span_s == pytest.approx(276, abs=0.01)
    prompts = [each.input_tokens for each in trace.requests]
    assert sum(prompts) == 11_520_705 and max(prompts) == 126_195
