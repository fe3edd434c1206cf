import io
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prfaas.tools.replay.client import BadAnswerError, ReplayAnswer, ReplayedRequest, Target
from prfaas.tools.replay.result import Percentiles, ReplayResult, closing, fallbacks, route_bytes, times_table


def record(index: int, **changes: object) -> ReplayedRequest:
    arrival_s = float(index)
    fields: dict[str, object] = {
        "sent_s": arrival_s,
        "first_token_s": arrival_s + 1,
        "last_token_s": arrival_s + 3,
        "ended_s": arrival_s + 3,
        "answered_tokens": 5,
        "status": 200,
    }
    return ReplayedRequest(index, arrival_s, 100, 5, **(fields | changes))  # type: ignore[arg-type]


def result(*records: ReplayedRequest, waited: int = 0) -> ReplayResult:
    return ReplayResult(Target("http://x", "m"), 0.0, 20.0, records, waited)


def test_times_of_a_record() -> None:
    one = record(2, sent_s=2.25)
    assert (one.ttft_s, one.tpot_s, one.e2e_s, one.behind_s) == (1, 0.5, 3, 0.25)
    assert record(0, answered_tokens=1).tpot_s is None and record(0, answered_tokens=None).tpot_s is None
    assert record(0, error="broken").e2e_s is None
    assert set(one.to_json()) == set(ReplayedRequest.__slots__)


def test_a_result_in_numbers() -> None:
    offload = {"route": "offload", "route_fields": {"bytes": "1000", "fallback": "timeout"}}
    found = result(
        record(0, **offload, cached_tokens=7),
        record(1, route="local", route_fields={"bytes": "0"}),
        record(2, error="status 503: full", status=503, answered_tokens=None, route="local"),
        record(4, sent_s=4.5, route="local", route_fields={"bytes": "lots"}),
    )
    document = json.loads(json.dumps(found.to_json()))
    assert document["requests"] == 4 and document["lost"] == 1
    assert document["errors"] == {"status 503: full": 1}
    assert document["offered_per_s"] == 1 and document["answered_per_s"] == 3 / 20
    assert document["input_tokens_per_s"] == 15 and document["output_tokens_per_s"] == 15 / 20
    assert document["cached_tokens"] == 7
    assert document["ttft_s"]["p50"] == 1 and document["tpot_s"]["mean"] == 0.5
    assert document["behind"] == {"requests": 1, "max_s": 0.5, "waited_for_a_connection": 0}
    assert list(document["routes"]) == ["local", "offload"]
    assert document["routes"]["offload"] == {
        "requests": 1,
        "kv_bytes": 1000,
        "fallbacks": 1,
        "ttft_s": Percentiles(1, 1, 1, 1, 1).to_json(),
    }
    assert route_bytes(found.records) == 1000 and fallbacks(found.records) == 1
    console = Console(file=io.StringIO(), width=120)
    console.print(times_table(found))
    text = " ".join(closing(found))
    assert "1 of 4 requests were lost" in text and "1 x status 503: full" in text
    assert "fell behind: 1 requests were sent late, by up to 500 ms; this machine was too busy" in text
    assert "1 prefills elsewhere failed" in text
    assert "too many requests were open" in " ".join(closing(result(record(0, sent_s=1.0), waited=1)))


def test_an_empty_result() -> None:
    found = result()
    assert found.to_json()["ttft_s"] is None and found.offered_per_s == 0 and found.max_behind_s == 0
    assert list(closing(found))[-1] == "no request was lost"


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=50))
def test_percentiles_are_of_what_is_known(values: list[float | None]) -> None:
    known = sorted(value for value in values if value is not None)
    found = Percentiles.of(values)
    if not known:
        assert found is None
        return
    assert found is not None and found.max == known[-1]
    assert found.mean == pytest.approx(sum(known) / len(known))
    assert known[0] <= found.p50 <= found.p90 <= found.p99 <= found.max


EVENTS = (
    b': comment\n\ndata: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "\\n"}]}\r\n\r\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": null}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=8).map(sorted))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    answer = ReplayAnswer()
    edges = [0, *cuts, len(EVENTS)]
    for now, (start, end) in enumerate(itertools.pairwise(edges)):
        answer.feed(EVENTS[start:end], float(now))
    answer.check(2)
    assert answer.answered_tokens == 2 and answer.cached_tokens is None
    assert answer.first_token_s is not None and answer.last_token_s is not None
    assert answer.first_token_s <= answer.last_token_s
    with pytest.raises(BadAnswerError, match="2 of 3 tokens"):
        answer.check(3)


def test_a_server_that_doesn_t_count_is_believed() -> None:
    answer = ReplayAnswer()
    answer.feed(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', 1.0)
    answer.check(9)
    assert answer.answered_tokens is None


def test_an_event_without_end_is_a_bad_answer() -> None:
    with pytest.raises(BadAnswerError, match="a line of the stream"):
        ReplayAnswer().feed(bytes(17 << 20), 0.0)
