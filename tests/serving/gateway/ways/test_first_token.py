"""What is read of a prefill's answer, and when the client may have the first token by itself."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.gateway.ways.first_token import NO_TEXT, STOP_SPANS, FirstTokenAsk, SampledTokens


def answer(**fields: Any) -> bytes:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "stop_reason": None}
    choice |= {"logprobs": {"tokens": ["token_id:17"]}} | fields
    return orjson.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})


def test_a_token_that_the_limit_ended_goes_on() -> None:
    assert SampledTokens.of(answer()) == SampledTokens((17,), "a")


def test_a_token_that_ends_the_answer_says_why() -> None:
    ended = SampledTokens.of(answer(text="", finish_reason="stop", stop_reason="x"))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "x") and ended.held(FirstTokenAsk({})) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"not JSON",
        b"[]",
        b'{"choices": []}',
        answer(logprobs=None),
        answer(logprobs={"tokens": []}),
        answer(logprobs={"tokens": [" the"]}),
        answer(text=None),
        answer(finish_reason="abort"),
        answer(finish_reason=None),
    ],
)
def test_anything_else_is_no_first_token(raw: bytes) -> None:
    with pytest.raises(ValueError, match="prefill's answer"):
        SampledTokens.of(raw)


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("a", (), None),
        ("", (), NO_TEXT),
        ("a\ufffd", (), NO_TEXT),
        ("a", ("a",), None),
        ("ba", ("ab",), STOP_SPANS),
        ("ab", ("abc", "x"), STOP_SPANS),
        ("ab", ("b", "ca"), None),
    ],
)
def test_it_is_held_where_the_second_token_has_a_say(
    text: str, stops: tuple[str, ...], held: str | None
) -> None:
    assert SampledTokens((1,), text).held(FirstTokenAsk({}, stops)) == held


@given(
    st.text("ab", min_size=1, max_size=4), st.text("ab", max_size=4), st.text("ab", min_size=1, max_size=3)
)
def test_what_is_not_held_never_begins_a_stop_string(first: str, more: str, stop: str) -> None:
    if SampledTokens((1,), first).held(FirstTokenAsk({}, (stop,))) is None:
        whole = first + more
        spans = [
            at for at in range(len(whole)) if whole.startswith(stop, at) and at < len(first) < at + len(stop)
        ]
        assert spans == []
