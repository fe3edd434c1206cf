"""Streams of every API in any pieces: whole events pass, the end is known, an engine's failure is held back."""

from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.answers.streams import EventStream
from prfaas.serving.gateway.bodies import error_body
from prfaas.serving.gateway.dialects import (
    ANTHROPIC,
    DATA,
    END_OF_EVENT,
    LAST_EVENT,
    OPENAI,
    RESPONSES,
    Dialect,
    dialect_of,
)
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.prompts.prompt import Endpoint

TEXTS = st.one_of(
    st.text(max_size=20),
    # What would end a stream or tell of an error is only text here.
    st.sampled_from(
        [
            "event: message_stop\n\n",
            "event: error\n",
            "event: response.completed\n",
            "[DONE]",
            'data: {"error":',
        ]
    ),
)


def event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


def text_event(dialect: Dialect, text: str) -> bytes:
    if dialect is OPENAI:
        return DATA + orjson.dumps({"choices": [{"text": text}]}) + END_OF_EVENT
    return event("response.output_text.delta" if dialect is RESPONSES else "content_block_delta", delta=text)


LAST = {
    OPENAI: LAST_EVENT,
    ANTHROPIC: event("message_stop"),
    RESPONSES: event("response.completed", response={"output": "x" * 50}),
}
FAILURES = {
    OPENAI: DATA + b'{"error": {"message": "EngineDeadError", "code": 500}}' + END_OF_EVENT,
    ANTHROPIC: event("error", error={"type": "internal_error", "message": "EngineDeadError"}),
    RESPONSES: event("error", code="server_error", message="EngineDeadError"),
}
REFUSALS = {
    OPENAI: DATA + b'{"error": {"message": "bad grammar", "code": 400}}' + END_OF_EVENT,
    ANTHROPIC: event("error", error={"type": "invalid_request_error", "message": "bad grammar"}),
    RESPONSES: event("error", code="invalid_request_error", message="bad grammar"),
}
EACH = pytest.mark.parametrize(
    "dialect", [OPENAI, ANTHROPIC, RESPONSES], ids=["openai", "anthropic", "responses"]
)


def cut(raw: bytes, data: st.DataObject) -> list[bytes]:
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    return [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True) if a < b]


def stream_of(dialect: Dialect) -> EventStream:
    return EventStream(cast(EngineResponse, None), "decode-0", dialect)


@EACH
@settings(deadline=None)
@given(st.lists(TEXTS, max_size=6), st.booleans(), st.data())
def test_whole_events_pass_and_the_end_is_known(
    dialect: Dialect, texts: list[str], ends: bool, data: st.DataObject
) -> None:
    stream = stream_of(dialect)
    raw = b"".join(text_event(dialect, text) for text in texts) + (LAST[dialect] if ends else b"")
    passed = b""
    for chunk in cut(raw, data):
        assert not stream.ended
        piece = stream.take(chunk)
        assert not piece or piece.endswith(END_OF_EVENT)
        passed += piece
    assert passed == raw and stream.ended is ends and stream.failure is None


@EACH
@settings(deadline=None)
@given(st.lists(TEXTS, max_size=6), st.data())
def test_an_engines_failure_is_held_back(dialect: Dialect, texts: list[str], data: st.DataObject) -> None:
    stream = stream_of(dialect)
    before = b"".join(text_event(dialect, text) for text in texts)
    passed = b""
    for chunk in cut(before + FAILURES[dialect] + LAST[dialect], data):
        passed += stream.take(chunk)
        if stream.failure is not None:
            break
    assert passed == before and stream.failure == FAILURES[dialect] and not stream.ended


@EACH
def test_a_refusal_in_a_stream_is_the_clients(dialect: Dialect) -> None:
    stream = stream_of(dialect)
    assert stream.take(REFUSALS[dialect]) == REFUSALS[dialect] and stream.failure is None


def test_a_last_event_that_passes_in_parts_is_still_the_last() -> None:
    stream = stream_of(RESPONSES)
    last = event("response.completed", response={"output": "x" * (3 << 20)})
    passed = b""
    for begin in range(0, len(last), 700_000):
        assert not stream.ended
        passed += stream.take(last[begin : begin + 700_000])
    assert passed == last and stream.ended


ROLE = (
    DATA
    + b'{"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
)
PREFACES = {
    OPENAI: (ROLE * 2, DATA + b'{"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'),
    RESPONSES: (
        b"".join(event(f"response.{name}") for name in ("created", "in_progress", "output_item.added"))
        + event("response.content_part.added"),
        event("response.output_text.delta", delta="a"),
    ),
    ANTHROPIC: (
        event("message_start") + event("ping") + event("content_block_start", index=0),
        event("content_block_delta", delta={"type": "text_delta", "text": "message_start"}),
    ),
}


@EACH
@pytest.mark.parametrize("comment", [b"", b": still here\n\n"])
def test_what_comes_before_the_first_token_is_held_until_then(dialect: Dialect, comment: bytes) -> None:
    stream = stream_of(dialect)
    preface, told = PREFACES[dialect]
    preface = comment + preface + comment
    assert stream.take(preface[:70]) == b"" == stream.take(preface[70:])
    assert stream.take(told) == preface + told
    assert stream.take(told) == told


@given(st.sampled_from([400, 403, 404, 413, 429, 500, 502, 503, 504]), TEXTS)
def test_errors_have_the_form_of_their_api(status: int, sentence: str) -> None:
    for dialect in (OPENAI, ANTHROPIC, RESPONSES):
        before = event("response.output_text.delta", sequence_number=7) + event("x", sequence_number=8)
        told = dialect.error_event(status, sentence, before)
        assert (
            told.startswith(dialect.error_mark) and told.endswith(END_OF_EVENT) and told.count(b"\n\n") == 1
        )
        found = dialect.status_in(told)
        assert found is not None and (found >= 500) == (status >= 500)
    said = orjson.loads(told.split(DATA, 1)[1])
    assert said["sequence_number"] == 9 and said["message"] == sentence


def test_refusals_have_the_form_of_their_path() -> None:
    body = error_body(429, "Too much.")
    for endpoint in Endpoint:
        told = orjson.loads(dialect_of(endpoint.path).refusal(body))
        if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS, Endpoint.RENDER_MESSAGE):
            assert told == {"type": "error", "error": {"type": "rate_limit_error", "message": "Too much."}}
        else:
            assert told["error"]["code"] == 429
    assert dialect_of("/nothing") is OPENAI and dialect_of("/v1/messages/batches") is ANTHROPIC


def test_an_engines_parameters_are_taken_out_of_events() -> None:
    stream = stream_of(RESPONSES)
    leak: dict[str, Any] = {
        "output": [],
        "kv_transfer_params": {"host": "10.0.0.1"},
        "ec_transfer_params": None,
    }
    told = stream.take(
        event("response.output_text.delta", delta="a") + event("response.completed", response=leak)
    )
    assert b"10.0.0.1" not in told and b'"kv_transfer_params":null' in told and stream.ended
