"""Streams in any pieces: whole events pass, all of them, and what was written is what is kept."""

import asyncio
from types import SimpleNamespace
from typing import cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.answers import streams
from prfaas.serving.gateway.answers.streams import EventStream
from prfaas.serving.gateway.bodies import cached_tokens_of
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.http_pool import EngineResponse

EVENTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        # The text of an error event is only text.
        st.just('data: {"error": {"code": 500}}\n\n'),
        st.just("[DONE]"),
    ).map(lambda text: DATA + orjson.dumps({"choices": [{"text": text}]}) + END_OF_EVENT),
    max_size=8,
)
FAILURE = DATA + b'{"error": {"message": "EngineDeadError", "code": 500}}' + END_OF_EVENT


def cut(raw: bytes, data: st.DataObject) -> list[bytes]:
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    return [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True) if a < b]


def event_stream() -> EventStream:
    """One whose chunks the test hands over itself."""
    return EventStream(cast(EngineResponse, None), "decode-0")


def test_cached_tokens_are_read_from_the_usage_alone() -> None:
    usage = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}}
    text = {"choices": [{"text": '"cached_tokens": 3'}]}
    assert cached_tokens_of(orjson.dumps(text | usage)) == 7
    assert cached_tokens_of(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 12}}}') == 12
    assert cached_tokens_of(orjson.dumps(text | {"usage": {"prompt_tokens_details": None}})) is None


@settings(deadline=None)
@given(EVENTS, st.booleans(), st.data())
def test_all_whole_events_pass_in_order(events: list[bytes], ends: bool, data: st.DataObject) -> None:
    stream = event_stream()
    raw = b"".join(events) + (LAST_EVENT if ends else b"")
    passed = b""
    for chunk in cut(raw, data):
        piece = stream.take(chunk)
        assert not piece or piece.endswith(END_OF_EVENT)
        passed += piece
    assert passed == raw
    assert stream.ended is ends and stream.failure is None


@settings(deadline=None)
@given(EVENTS, st.data())
def test_nothing_passes_of_an_event_cut_off(events: list[bytes], data: st.DataObject) -> None:
    stream = event_stream()
    raw = b"".join(events)
    end = data.draw(st.integers(0, len(raw)))
    passed = b"".join(stream.take(chunk) for chunk in cut(raw[:end], data))
    whole = [event for n, event in enumerate(events) if len(b"".join(events[: n + 1])) <= end]
    assert passed == b"".join(whole)


@settings(deadline=None)
@given(EVENTS, st.data())
def test_an_engines_failure_is_held_back(events: list[bytes], data: st.DataObject) -> None:
    stream = event_stream()
    before = b"".join(events)
    passed = b""
    for chunk in cut(before + FAILURE + LAST_EVENT, data):
        passed += stream.take(chunk)
        if stream.failure is not None:
            break
    assert passed == before and stream.failure == FAILURE


def test_a_refusal_in_a_stream_is_the_clients() -> None:
    stream = event_stream()
    refusal = DATA + b'{"error": {"message": "bad grammar", "code": 400}}' + END_OF_EVENT
    assert stream.take(refusal) == refusal and stream.failure is None


def test_a_long_event_passes_whole() -> None:
    stream = event_stream()
    begin = DATA + b"x" * (1 << 21)
    assert stream.take(begin) == b""
    assert stream.take(b"y" + END_OF_EVENT) == begin + b"y" + END_OF_EVENT


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_UNREAD_S", 0.05)
    cut_off = []

    class Stuck:
        version, transport = (1, 0), SimpleNamespace(abort=lambda: cut_off.append(True))

    async def main() -> None:
        writer = streams.ResponseWriter(Stuck(), SimpleNamespace(tells_details=True), None)  # type: ignore[arg-type]
        writer._response = SimpleNamespace(  # type: ignore[assignment]
            write=lambda _chunk: asyncio.Event().wait(), write_eof=lambda: asyncio.Event().wait()
        )
        writer.latest = b"data: w\n\n"
        for unread in (writer.write(b"data: x\n\n"), writer.end()):
            with pytest.raises(ConnectionResetError, match="reads nothing"):
                await unread

    asyncio.run(main())
    assert cut_off == [True, True]
