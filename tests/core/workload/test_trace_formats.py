"""Every format that is read: pieces of published files, or the published form with made-up rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import RequestTrace, TracedRequest, read_requests, write_requests
from prfaas.core.workload.trace_columns import FORMATS, TraceColumns, guess_format

PIECES = Path(__file__).parents[2] / "data" / "traces"


def rows_of(trace: RequestTrace) -> list[tuple[float, int, int]]:
    return [(pytest.approx(each.arrival_s), each.input_tokens, each.output_tokens) for each in trace]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "form", "count", "first_tokens"),
    [
        ("azure_2023_code.csv", "azure", 7, 4808),
        ("azure_2023_conv.csv", "azure", 7, 374),
        ("mooncake_conversation.jsonl", "mooncake", 8, 6758),
    ],
)
def test_pieces_of_published_files(name: str, form: str, count: int, first_tokens: int) -> None:
    trace = read_requests(PIECES / name)
    assert guess_format(PIECES / name) == form
    assert (len(trace), trace.input_tokens[0]) == (count, first_tokens)
    assert trace.span_s < 25


def test_a_client_of_servegen() -> None:
    """0.15 requests/s in one window of ten minutes."""
    trace = read_requests(PIECES / "servegen_reason_52.tar.gz")
    assert len(trace) == 90 and trace.span_s < 600
    assert trace.block_ids is None


def test_timings_of_vllm_by_the_names_of_their_fields() -> None:
    columns = TraceColumns.parse("arrival=arrival_time,input=input_toks,output=output_toks")
    trace = read_requests(PIECES / "llmservingsim_vllm.jsonl", columns=columns)
    assert rows_of(trace)[:2] == [(0.0, 2358, 531), (0.2650914, 1034, 769)]


QWEN = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 9}


def qwen(path: Path, count: int = 3) -> Path:
    return lines(
        path,
        [
            QWEN | {"timestamp": 0.2 * n, "input_length": 20 + n % 3, "hash_ids": [7, 8 + n], "turn": n % 2}
            for n in range(count)
        ],
    )


def test_qwen_bailian_counts_in_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    trace = read_requests(qwen(tmp_path / "q.jsonl"))
    assert rows_of(trace) == [(0.0, 20, 9), (0.2, 21, 9), (0.4, 22, 9)]
    assert trace.block_tokens == 16
    assert trace.uncached_tokens().tolist() == [20, 5, 6]


def test_azure_of_2024_has_time_zones(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    )
    assert rows_of(read_requests(path)) == [(0.0, 2162, 5), (0.99007, 2399, 6)]


def test_detailed_results_of_vllm_bench_serve(tmp_path: Path) -> None:
    document = {
        "model_id": "m",
        "completed": 2,
        "input_lens": [10, 30, 20],
        "output_lens": [1, 0, 2],
        "start_times": [5.5, 6.0, 5.0],
        "itls": [[], [], [0.1]],
        "errors": ["", "refused", ""],
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    trace = read_requests(path)
    assert rows_of(trace) == [(0.0, 20, 2), (0.5, 10, 1)]
    assert "1 requests that failed are left out" in trace.units
    document["input_lens"] = [10, 30, -2]
    path.write_text(json.dumps(document))
    with pytest.raises(WorkloadError, match=r"result\.json: entry:3: input_lens must be a whole number"):
        read_requests(path)


def test_records_of_aiperf(tmp_path: Path) -> None:
    def record(start_ns: int, **tokens: int) -> dict[str, Any]:
        metrics = {name: {"value": value, "unit": "tokens"} for name, value in tokens.items()}
        return {"metadata": {"request_start_ns": start_ns}, "metrics": metrics, "error": None}

    path = lines(
        tmp_path / "profile_export.jsonl",
        [
            record(1759813207532900363, input_sequence_length=550, output_sequence_length=9),
            record(1759813207732900363, input_sequence_length=100, output_sequence_length=200),
            {
                "metadata": {"request_start_ns": 1759813209000000000},
                "metrics": {},
                "error": {"code": 499, "type": "x"},
            },
        ],
    )
    assert guess_format(path) == "aiperf"
    assert rows_of(read_requests(path)) == [(0.0, 550, 9), (0.2, 100, 200)]


def test_times_of_another_unit_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """Qwen's seconds read as Mooncake's milliseconds would be 5,000 requests/s."""
    rows = [
        {"timestamp": 0.2 * n, "input_length": 5, "output_length": 1, "hash_ids": [n]} for n in range(200)
    ]
    path = lines(tmp_path / "odd.jsonl", rows)
    with pytest.raises(WorkloadError, match=r"5,025 requests/s.*another unit"):
        read_requests(path)
    assert read_requests(path, "mooncake").span_s == pytest.approx(0.0398)
    assert read_requests(qwen(tmp_path / "q.jsonl", 200)).span_s == pytest.approx(39.8)


def test_other_columns_are_kept(tmp_path: Path) -> None:
    trace = read_requests(qwen(tmp_path / "q.jsonl"))
    assert set(trace.own) == {"chat_id", "parent_chat_id", "type", "turn"}
    turns = trace.own["turn"]
    assert [turns.words[code] for code in turns.codes] == ["0", "1", "0"]
    path = tmp_path / "c.csv"
    path.write_text("team,at,in,out\nblue,9,5,1\nred,1,6,2\n,2,0,1\nblue,4,7,3\n")
    trace = read_requests(path, columns=TraceColumns("at", "in", "out"))
    teams = trace.own["team"]
    assert [teams.words[code] for code in teams.codes] == ["red", "blue", "blue"]


def test_every_format_can_be_told_from_the_others() -> None:
    """By the columns that it needs; two of the same columns differ by more (`guess_format`)."""
    needed = {form: tuple(columns.names[:3]) for form, columns in FORMATS.items() if form != "qwen"}
    assert len(set(needed.values())) == len(needed)


def test_a_trace_of_single_requests_gives_them_back(tmp_path: Path) -> None:
    requests = [TracedRequest(2.0, 5, 1, (9, 8), 4), TracedRequest(0.0, 4, 2, (9,), 4)]
    trace = RequestTrace.of("made up", requests, "")
    assert list(trace) == [requests[1], requests[0]]
    write_requests(tmp_path / "t.jsonl", trace)
    assert list(read_requests(tmp_path / "t.jsonl")) == list(trace)


def test_a_request_without_blocks_is_16_bytes(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},9,9\n" for n in range(20_000)))
    trace = read_requests(path)
    columns = (trace.arrival_s, trace.input_tokens, trace.output_tokens)
    assert sum(each.nbytes for each in columns) == 16 * len(trace) and trace.block_ids is None
    assert trace.own == {}
