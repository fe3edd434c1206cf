"""Streams in any pieces: whole events pass, all of them, and what was passed on is what is remembered."""

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.stream import DATA, END_OF_EVENT, LAST_EVENT, Budget, EventStream

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


@settings(deadline=None)
@given(EVENTS, st.booleans(), st.data())
def test_all_whole_events_pass_in_order(events: list[bytes], ends: bool, data: st.DataObject) -> None:
    budget = Budget(1 << 20)
    stream = EventStream(budget, 1 << 20, remember=True)
    raw = b"".join(events) + (LAST_EVENT if ends else b"")
    passed = b""
    for chunk in cut(raw, data):
        piece = stream.take(chunk)
        assert not piece or piece.endswith(END_OF_EVENT)
        passed += piece
    assert passed == raw == stream.passed()
    assert stream.ended is ends and not stream.torn and stream.failure is None
    assert budget.left_bytes == (1 << 20) - len(raw)
    stream.forget()
    assert budget.left_bytes == 1 << 20 and stream.passed() is None


@settings(deadline=None)
@given(EVENTS, st.data())
def test_nothing_passes_of_an_event_cut_off(events: list[bytes], data: st.DataObject) -> None:
    stream = EventStream(Budget(1 << 20), 1 << 20, remember=True)
    raw = b"".join(events)
    end = data.draw(st.integers(0, len(raw)))
    for chunk in cut(raw[:end], data):
        stream.take(chunk)
    whole = [event for n, event in enumerate(events) if len(b"".join(events[: n + 1])) <= end]
    assert stream.passed() == b"".join(whole)


@settings(deadline=None)
@given(EVENTS, st.data())
def test_an_engines_failure_is_held_back(events: list[bytes], data: st.DataObject) -> None:
    stream = EventStream(Budget(1 << 20), 1 << 20, remember=True)
    before = b"".join(events)
    passed = b""
    for chunk in cut(before + FAILURE + LAST_EVENT, data):
        passed += stream.take(chunk)
        if stream.failure is not None:
            break
    assert passed == before == stream.passed() and stream.failure == FAILURE


def test_a_refusal_in_a_stream_is_the_clients() -> None:
    stream = EventStream(Budget(100), 100, remember=False)
    refusal = DATA + b'{"error": {"message": "bad grammar", "code": 400}}' + END_OF_EVENT
    assert stream.take(refusal) == refusal and stream.failure is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(0, 300), st.integers(0, 300))
def test_no_more_is_kept_than_there_is_room_for(sizes: list[int], limit: int, budget_bytes: int) -> None:
    budget = Budget(budget_bytes)
    streams = [EventStream(budget, limit, remember=True) for _ in range(3)]
    taken = [b"", b"", b""]
    for number, size in enumerate(sizes):
        event = b"x" * size + END_OF_EVENT
        assert streams[number % 3].take(event) == event
        taken[number % 3] += event
        assert 0 <= budget.left_bytes <= budget_bytes
    for stream, all_of_it in zip(streams, taken, strict=True):
        assert stream.passed() in (None, all_of_it)
        assert stream.passed() is None or len(all_of_it) <= limit
        stream.forget()
    assert budget.left_bytes == budget_bytes


def test_an_event_without_end_passes_in_pieces_and_is_not_kept() -> None:
    stream = EventStream(Budget(1 << 30), 1 << 30, remember=True)
    begin = DATA + b"x" * (1 << 21)
    assert stream.take(begin) == begin and stream.torn and stream.passed() is None
    assert stream.take(b"y" + END_OF_EVENT) == b"y" + END_OF_EVENT and not stream.torn
