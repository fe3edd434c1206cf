"""Answers of engines of any content: they pass, or are refused by the one error that is read for it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mutations import mutated

from prfaas.serving.gateway.answers.answer_bytes import (
    PromptCut,
    TakenIds,
    note_answer_tokens,
    taken_of_whole,
    without_cached_tokens,
)
from prfaas.serving.gateway.answers.streams import EventStream
from prfaas.serving.gateway.answers.transcript import (
    NotPlainError,
    StreamTranscript,
    events,
    last_said,
    plain,
)
from prfaas.serving.gateway.bodies import cached_tokens_of, without_transfer_params
from prfaas.serving.gateway.dialects import dialect_of
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.ways.first_token import SampledTokens

FUZZ = settings(max_examples=300, deadline=None)

HEAD = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,'
COMPLETION = (
    HEAD + b'"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1,2],'
    b'"token_ids":[7]}]}\n\n'
    + HEAD
    + b'"text":"b","logprobs":{"tokens":["b"],"text_offset":[1]},"finish_reason":"stop","token_ids":[8,9]}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
    b"data: [DONE]\n\n"
)
CHAT = (
    b': x\n\ndata: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}],"prompt_token_ids":[1]}\n\n'
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,"token_ids":[7]}]}\n\n'
    b'data: {"error":{"message":"x","type":"y","code":500}}\n\n'
)
RESPONSE = (
    b'event: response.created\ndata: {"type":"response.created","response":{"kv_transfer_params":{"a":1}}}\n\n'
    b'event: response.output_text.delta\ndata: {"sequence_number":4,"delta":"a"}\n\n'
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":1,"output_tokens":2,'
    b'"input_tokens_details":{"cached_tokens":1}}}}\n\n'
)
MESSAGE = (
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":1,"cache_read_input_tokens":2}}}\n\n'
    b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\nevent: error\ndata: {"error":{"type":"x"}}\n\n'
    b"event: message_stop\ndata: {}\n\n"
)
ENDPOINTS = {
    Endpoint.COMPLETIONS: COMPLETION,
    Endpoint.CHAT: CHAT,
    Endpoint.RESPONSES: RESPONSE,
    Endpoint.MESSAGES: MESSAGE,
}
FIRST = (
    b'{"choices":[{"text":"a","finish_reason":"length","logprobs":{"tokens":["token_id:7"]}}],'
    b'"usage":{"prompt_tokens_details":null}}'
)


class Engine:
    """Its answer comes in pieces, and then ends."""

    def __init__(self, said: bytes, cuts: Sequence[float]) -> None:
        places = sorted({0, len(said), *(int(cut * len(said)) for cut in cuts)})
        self._pieces = [said[a:b] for a, b in pairwise(places)]

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def record() -> Any:
    return SimpleNamespace(answer_tokens=None, trace=SimpleNamespace(is_kept=True), finish_reasons=())


@FUZZ
@pytest.mark.slow("hundreds of requests through a whole gateway")
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
@given(data=st.data(), cuts=st.lists(st.floats(0, 1), max_size=6))
def test_an_engine_may_stream_anything(endpoint: Endpoint, data: st.DataObject, cuts: list[float]) -> None:
    said = data.draw(mutated([ENDPOINTS[endpoint]]))
    keeps_ids = endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)
    ids = TakenIds(endpoint, is_asked=data.draw(st.booleans())) if keeps_ids else None
    dialect = dialect_of(endpoint)
    stream = EventStream(
        Engine(said, cuts),  # type: ignore[arg-type]
        "decode-0",
        dialect,
        cut=PromptCut() if keeps_ids else None,
        ids=ids,
    )

    async def read() -> None:
        latest = b""
        with suppress(EngineCallError):
            while piece := await stream.read():
                latest = without_cached_tokens(piece)
                note_answer_tokens(record(), latest)
        dialect.error_event(502, "no", latest)

    asyncio.run(read())
    assert ids is None or len(ids.ids) <= len(said)


@FUZZ
@given(said=mutated([COMPLETION, CHAT]), rest=mutated([COMPLETION, CHAT]))
def test_a_stream_of_anything_is_gone_on_with_or_not_plain(said: bytes, rest: bytes) -> None:
    with suppress(NotPlainError), plain():
        transcript = StreamTranscript.of(Endpoint.COMPLETIONS, said)
        last_said(said)
        for event in events(TakenIds(Endpoint.COMPLETIONS, is_asked=True).take(rest)):
            if event is not None:
                transcript.rewrite(event, 2, 1, may_stop=True)
        list(transcript.closing_events(2, 3, usage=True))


@FUZZ
@given(said=mutated([FIRST, COMPLETION[6:], RESPONSE.split(b"data: ")[1]]))
def test_an_engine_may_answer_anything(said: bytes) -> None:
    note_answer_tokens(record(), said)
    assert isinstance(without_transfer_params(without_cached_tokens(said)), bytes)
    cached = cached_tokens_of(said)
    assert cached is None or cached < 10**9
    with suppress(ValueError, OverflowError):
        taken_of_whole(said)
    with suppress(ValueError):
        first = SampledTokens.of(said)
        assert 0 <= first.token_ids[0] < 1 << 32
