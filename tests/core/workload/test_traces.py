import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import read_requests

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 1500, "input_length": 1400, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 600, "output_length": 30, "hash_ids": [1, 9]},
    {"timestamp": 3000, "input_length": 1000, "output_length": 40, "hash_ids": [1, 2]},
]


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows(values: list[dict[str, object]]) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n\n"


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"data/some/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_with_the_prefixes_that_an_endless_cache_holds(tmp_path: Path, name: str) -> None:
    trace = read_requests(written(tmp_path / name, rows(MOONCAKE)))
    # Request 2 finds 2 blocks of 512, request 3 one, and request 4 everything; one token is always computed.
    assert trace.lengths.mean() == 1000
    assert sorted(trace.uncached.lengths.tolist()) == [1, 600 - 512, 1400 - 1024, 1000]
    assert trace.mean_output_tokens == 25


def test_azure(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:05.9799600,3180,8\r\n"
    )
    trace = read_requests(written(tmp_path / "azure.csv", text))
    assert trace.lengths.mean() == trace.uncached.mean() == 3994 and trace.mean_output_tokens == 9


def test_our_own_format(tmp_path: Path) -> None:
    values: list[dict[str, object]] = [
        {"arrival_s": 0.5, "input_tokens": 100, "output_tokens": 5, "block_tokens": 64, "block_ids": [3, 4]},
        {
            "arrival_s": 1.5,
            "input_tokens": 200,
            "output_tokens": 15,
            "block_tokens": 64,
            "block_ids": [3, 5, 6, 7],
        },
    ]
    trace = read_requests(written(tmp_path / "t.jsonl", rows(values)))
    assert trace.lengths.lengths.tolist() == [100, 200] and trace.mean_output_tokens == 10
    assert trace.uncached.lengths.tolist() == [100, 200 - 64]


def test_servegen_mixes_clients_by_their_requests(tmp_path: Path) -> None:
    """Client 0: 10 requests/s for 10 s then none; client 1: 30/s in the second window. So 100 and 300 requests."""
    path = archive(
        tmp_path / "some.tar.gz",
        {
            "chunk-0-trace.csv": "0,10,1,Gamma,1,1\n10,0,0,,0,0\n",
            "chunk-0-dataset.json": json.dumps(
                {"0": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{10: 1.0}"}}
            ),
            "chunk-1-trace.csv": "0,0,0,,0,0\n10,30,1,Weibull,1,1\n",
            "chunk-1-dataset.json": json.dumps(
                {
                    "0": {"input_tokens": "{}", "output_tokens": "{}"},
                    "10": {"input_tokens": "{400: 1.0}", "output_tokens": "{50: 2.0}"},
                }
            ),
            "chunk-2-trace.csv": "0,5,1,Gamma,1,1\n",
            "chunk-3-trace.csv": "0,4,1,Gamma,1,1\n10,4,1,Gamma,1,1\n",
            "chunk-3-dataset.json": json.dumps({"0": {"input_tokens": "{}", "output_tokens": "{}"}}),
        },
    )
    trace = read_requests(path)
    assert trace.lengths.lengths.tolist() == [100, 300, 400]
    assert trace.lengths.probabilities.tolist() == [0.125, 0.125, 0.75]
    assert trace.mean_output_tokens == pytest.approx((100 * 10 + 300 * 50) / 400)
    assert trace.block_ids is None and trace.uncached.mean() == trace.lengths.mean()
    # The first window has client 0's requests, the second client 1's; and always the same.
    late = trace.arrival_s + 0.1 > 10
    assert 300 <= late.sum() <= 301 and set(trace.input_tokens[late].tolist()[-300:]) == {400}
    assert trace.arrival_s.tolist() == read_requests(path).arrival_s.tolist()


def test_bursts_of_servegen_are_its_own(tmp_path: Path) -> None:
    """Gaps have the CV of their window."""
    lengths = {"0": {"input_tokens": "{100: 1}", "output_tokens": "{10: 1}"}}
    found = {}
    for cv in (0.2, 1.0, 3.0):
        files = {
            "chunk-0-trace.csv": f"0,20,{cv},Gamma,1,1\n200,0,0,,0,0\n",
            "chunk-0-dataset.json": json.dumps(lengths),
        }
        gaps_s = np.diff(read_requests(archive(tmp_path / f"{cv}.tar.gz", files)).arrival_s)
        found[cv] = gaps_s.std() / gaps_s.mean()
    assert found == {cv: pytest.approx(cv, rel=0.1) for cv in found}


def bad_row(**fields: object) -> str:
    return rows([MOONCAKE[0], {**MOONCAKE[1], **fields}])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", bad_row(input_length=-1), ":2: input_length must be a whole number of tokens, not -1"),
        ("t.jsonl", bad_row(input_length=True), ":2: input_length must be a whole number"),
        ("t.jsonl", bad_row(output_length="8"), ":2: output_length must be a whole number"),
        ("t.jsonl", bad_row(timestamp=None), ":2: timestamp is missing"),
        ("t.jsonl", bad_row(hash_ids=["a"]), ":2: hash_ids must be a list of whole numbers"),
        ("t.jsonl", rows([MOONCAKE[0]]) + "{broken\n", ":3: is not JSON"),
        ("t.jsonl", rows([MOONCAKE[0]]) + "[1]\n", ":3: must be a JSON object"),
        (
            "t.jsonl",
            '{"arrival_s": 1, "output_tokens": 3}\n',
            ":1: has arrival_s, output_tokens, which is no format that is known: Mooncake's (timestamp,",
        ),
        ("t.jsonl", "", "has no request with a prompt"),
        ("t.jsonl", "not json\n", ":1: is not JSON"),
        ("t.csv", "", "is empty; the first line must name the columns"),
        (
            "t.csv",
            "TIMESTAMP,Context\n",
            ":1: has Context, TIMESTAMP, which is no format that is known: Mooncake's (timestamp, input_length, ",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n",
            ":2: TIMESTAMP must be a time, not 'yesterday'",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:17:03,1,2\n",
            ":2: TIMESTAMP",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1.5,2\n",
            ":2: ContextTokens must be a whole number of tokens, not '1.5'",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1\n",
            ":2: has 2 values for 3 columns",
        ),
        ("t.txt", "", "its name doesn't say what format it has; give one of mooncake, qwen"),
        ("t.tar.gz", "no archive", "can't be read as a ServeGen archive"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(WorkloadError) as error:
        read_requests(path)
    assert str(error.value).startswith(str(path)) and words in str(error.value)


@pytest.mark.parametrize(
    ("trace", "dataset", "words"),
    [
        ("0,x\n", "{}", "chunk-0-trace.csv:1: must begin with"),
        ("0,1\n5,-1\n", "{}", "chunk-0-trace.csv:2: the window's start, rate and CV must be finite"),
        ("5,1\n5,1\n", "{}", "chunk-0-trace.csv:2: window 5 must start after"),
        ("0,1\n", "{", "chunk-0-dataset.json: is not what ServeGen writes"),
        ("0,1\n", "[]", "chunk-0-dataset.json: is not what ServeGen writes"),
        ("0,1\n", '{"x": {}}', "chunk-0-dataset.json: is not what ServeGen writes"),
        ("0,1\n", '{"0": {"input_tokens": 3}}', "is not what ServeGen writes"),
        (
            "0,1\n",
            '{"0": {"input_tokens": "{1: a}", "output_tokens": "{}"}}',
            "window 0: must have texts like",
        ),
        (
            "0,1\n",
            '{"0": {"input_tokens": "{1: -2}", "output_tokens": "{}"}}',
            "window 0: must have texts like",
        ),
        ("0,1\n", '{"0": {"input_tokens": "{}", "output_tokens": "{}"}}', "has no client with requests"),
    ],
)
def test_malformed_servegen_is_named(tmp_path: Path, trace: str, dataset: str, words: str) -> None:
    path = archive(tmp_path / "a.tgz", {"chunk-0-trace.csv": trace, "chunk-0-dataset.json": dataset})
    with pytest.raises(WorkloadError) as error:
        read_requests(path)
    assert str(path) in str(error.value) and words in str(error.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.csv", "none.tar.gz"):
        with pytest.raises(WorkloadError, match="there is no such trace"):
            read_requests(tmp_path / name)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(rows(MOONCAKE).encode())[:-12])
    with pytest.raises(WorkloadError, match="can't be read as a trace"):
        read_requests(tmp_path / "cut.jsonl.gz", "mooncake")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="can't be read as a trace"):
        read_requests(tmp_path / "binary.csv")
