"""`prfaas replay` as a user types it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prfaas.cli import main as cli
from prfaas.core.workload.requests import TracedRequest, write_requests
from replay.stub import served, well
from replay.test_replay import refuses

EXAMPLE = Path(__file__).parents[3] / "examples" / "traces" / "mooncake_burst.jsonl.gz"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "replay", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A trace of thirty short requests within 0.06 s."""
    path = tmp_path / "few.jsonl"
    write_requests(path, [TracedRequest(n / 500, 5 + n, 2, (n,), 64) for n in range(30)])
    return path


def test_a_trace_faster_and_shorter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "records.jsonl"
    options = ("--speed", 200, "--scale-lengths", 1 / 16, "--scale-answers", 0.01, "--limit", 60)
    with served(well) as stub:
        arguments = (f"{stub.url}/v1", "--trace", EXAMPLE, *options, "--max-input-tokens", 900)
        code = run(monkeypatch, *arguments, "--json", "--records", file)
    assert code == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["requests"] == 60 == len(stub.bodies) and document["lost"] == 0
    assert document["model"] == "tiny" and document["left_out"] > 0
    assert all(len(body["prompt"]) <= 900 for body in stub.bodies)
    # All of Mooncake's conversations begin with the same block, here of 512 / 16 tokens.
    assert len({tuple(body["prompt"][:32]) for body in stub.bodies}) == 1
    assert (
        "timestamp as date and time, or in ms" in err
        and "clock has steps of 3 s" in err
        and "32 tokens per block" in err
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(60))


def test_prompts_that_the_model_can_t_take_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    lengths = [(4000, 96), (4000, 97), (10, 1)]
    write_requests(path, [TracedRequest(0.0, *each, (0,), 4096) for each in lengths])
    with served(well) as stub:
        assert run(monkeypatch, stub.url, "--trace", path) == 0
    out, err = capsys.readouterr()
    assert len(stub.bodies) == 2 and "no request was lost" in out and "1 requests were too long" in err


@pytest.mark.parametrize(
    "options",
    [
        ("--limit", 20),
        ("--rounds", 2, "--duration-s", 0.05, "--jitter-s", 0.01),
        ("--limit", 20, "--no-stream", "--no-ignore-eos", "--model", "other"),
    ],
)
def test_ways_of_sending(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    few: Path,
    options: tuple[object, ...],
) -> None:
    with served(well) as stub:
        code = run(monkeypatch, stub.url, "--trace", few, *options)
    assert code == 0 and len(stub.bodies) > 0
    out = capsys.readouterr().out
    assert "no request was lost" in out and f"{len(stub.bodies)} requests to" in out


def test_headers_are_sent(monkeypatch: pytest.MonkeyPatch, few: Path) -> None:
    seen = []

    async def handler(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append((asked.headers["x-tenant"], asked.headers["x-more"]))
        return await well(asked, body)

    with served(handler) as stub:
        options = ("--header", "x-tenant: a:b", "--header", "x-more:1")
        assert run(monkeypatch, stub.url, "--trace", few, "--limit", 2, *options) == 0
    assert seen == [("a:b", "1")] * 2


def test_lost_requests_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], few: Path
) -> None:
    with served(refuses) as stub:
        assert run(monkeypatch, stub.url, "--trace", few, "--limit", 3) == 1
    out = capsys.readouterr().out
    assert "3 x status 503: no room" in out and "3 of 3 requests were lost" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give what to send as --trace FILE"),
        (("--trace", EXAMPLE, "--speed", 0), "must be above 0"),
        (("--trace", EXAMPLE, "--rounds", 0), "1 time or more"),
        (("--trace", "no.jsonl"), "there is no such trace"),
        (("--trace", EXAMPLE, "--format", "csv"), "has one of the formats mooncake"),
        (("--trace", EXAMPLE, "--format", "azure"), "TIMESTAMP is missing"),
        (
            ("--trace", EXAMPLE, "--columns", "arrival=at,input=in,output=out"),
            "at is missing",
        ),
        (("--limit", 1, "--columns", "x"), "--format and --columns are of a --trace; there is none"),
        (("--trace", EXAMPLE, "--records", "no/such/folder"), "no/such/folder: No such file or directory"),
        (("--trace", EXAMPLE, "--limit", 1, "--model", "third"), "doesn't serve third"),
        (("--trace", EXAMPLE, "--limit", 1, "--header", "tenant"), "must be NAME:VALUE"),
    ],
)
def test_what_can_t_be_done_is_one_sentence_and_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[object, ...],
    says: str,
) -> None:
    with served(well) as stub:
        assert run(monkeypatch, stub.url, *options) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""
    assert captured.err.count("prfaas: ") == 1
