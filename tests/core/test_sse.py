"""Server-sent events, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.sse import SseParser

STREAM = b': a comment\ndata: {"a": 1}\n\nevent: other\r\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": 2}']


@given(st.lists(st.integers(0, len(STREAM)), max_size=8).map(sorted))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    parser = SseParser()
    found: list[bytes] = []
    for begin, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
        found += parser.feed(STREAM[begin:end])
    assert found == EVENTS
    assert parser.ended


def test_a_line_that_is_not_whole_is_no_event_yet() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1") == []
    assert parser.feed(b"2\n") == [b"12"]
    assert not parser.ended


def test_a_line_without_end_is_given_up() -> None:
    parser = SseParser()
    with pytest.raises(ValueError, match="a line of the stream has more than 16777216 bytes"):
        for _ in range(20):
            parser.feed(bytes(1 << 20))
