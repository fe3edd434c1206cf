"""An engine that answers with anything: clients get an answer or an error, and others are served as before."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mutations import no_exception_logged

from prfaas.serving.control.engine_reading import read_exposition
from prfaas.serving.gateway import http_pool
from prfaas.serving.gateway.answers import streams
from prfaas.serving.gateway.answers.answer_bytes import TakenIds, without_cached_tokens
from prfaas.serving.gateway.answers.streams import EventStream
from prfaas.serving.gateway.bodies import error_body, without_transfer_params
from prfaas.serving.gateway.dialects import END_OF_EVENT, LAST_EVENT, OPENAI, RESPONSES
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.ways.first_token import SampledTokens, begins_stop

from .stand_in import StandInEngine, answer_text
from .world import World

InWorld = Callable[..., None]
SHORT = list(range(60, 90))


@asynccontextmanager
async def answering(engine: StandInEngine, status: str, kind: str, body: bytes) -> AsyncIterator[None]:
    """In place of the engine's HTTP server one that gives everybody the same answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        writer.write(b"HTTP/1.1 %b\r\nContent-Type: %b\r\n" % (status.encode(), kind.encode()))
        writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    await engine.stop_http()
    server = await asyncio.start_server(serve, "127.0.0.1", engine.http_port)
    try:
        yield
    finally:
        server.close()


def piece(ids: str) -> bytes:
    """An event of a stream with such token ids."""
    choice = f'{{"index":0,"text":"a","logprobs":null,"finish_reason":null,"token_ids":{ids}}}'
    return f'data: {{"id":"x","object":"text_completion","created":1,"choices":[{choice}]}}\n\n'.encode()


STREAMS = {
    "ids that are words": piece("[7,b]"),
    "ids that are too large": piece("[9" + "9" * 400 + "]"),
    "ids that are negative": piece("[-1]"),
    "ids of too many digits": piece("[" + "9" * 5000 + "]"),
    "no JSON, then nothing": piece("[7]") + b"data: {]\n\n",
    "comments": b": x\n\n" * 1000,
    "an error without a code": b'data: {"error":[]}\n\n',
    "nothing": b"",
}


@pytest.mark.parametrize("said", STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_of_anything_is_ended_or_goes_on_elsewhere(in_world: InWorld, said: bytes) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        asked = {"model": "stand-in", "prompt": SHORT, "stream": True, "max_tokens": 3}
        async with (
            answering(world.decode, "200 OK", "text/event-stream", said),
            world.client.post("/v1/completions", json=asked) as response,
        ):
            answer = await response.text()
        assert "[DONE]" in answer or '"error"' in answer
        world.plane.prefers = "spare"
        _, after = await world.complete(SHORT)
        assert after["choices"][0]["text"] == answer_text(SHORT)

    with no_exception_logged():
        in_world(body, spare=True)


WHOLE = {
    "more tokens than a number holds": ("200 OK", b'{"usage":{"completion_tokens":1%b}}' % (b"0" * 2000)),
    "usage of words": ("200 OK", b'{"usage":{"input_tokens":"a","cache_read_input_tokens":[]}}'),
    "300 levels": ("200 OK", b'{"kv_transfer_params":1,"x":%b1%b}' % (b"[" * 300, b"]" * 300)),
    "a status that means nothing": ("799 What", b"{"),
    "another one": ("599 What", b'{"error":{"message":"no"}}'),
    "no words": ("400 Bad Request", b"\xff" * 100),
}


@pytest.mark.parametrize(("status", "said"), WHOLE.values(), ids=WHOLE.keys())
def test_an_answer_of_anything_is_passed_on(in_world: InWorld, status: str, said: bytes) -> None:
    async def body(world: World) -> None:
        # Of one token nothing is moved, which would wait for an engine that takes it.
        asked = {"model": "stand-in", "prompt": [5]}
        async with (
            answering(world.decode, status, "application/json", said),
            world.client.post("/v1/completions", json=asked) as response,
        ):
            assert response.status == int(status[:3]) and await response.read()
        assert await world.metric("prfaas_gateway_answer_tokens_total") == 0

    with no_exception_logged():
        in_world(body)


def test_an_answer_that_is_too_long_takes_no_engine_out(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pool.EngineResponse.read, "__defaults__", (1000,))

    async def body(world: World) -> None:
        asked = {"model": "stand-in", "prompt": SHORT}
        async with answering(world.decode, "200 OK", "application/json", b"x" * 1001):
            response, answer = await world.post("/v1/completions", asked)
        assert response.status == 502 and "too long for one piece" in answer["error"]["message"]
        assert world.spare is not None and world.spare.generated() == []
        assert world.plane.suspected == []
        assert await world.metric('prfaas_gateway_refused_total{reason="too-long"}') == 1

    in_world(body, spare=True)


class Pieces:
    """What an engine sends, however it is read."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def pump(self, sink: Callable[[bytes], bool]) -> None:
        while self._pieces and sink(self._pieces.pop(0)):
            pass


@pytest.mark.parametrize("pumped", [False, True])
@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b"data: " + b"x" * 600, *[b"x" * 600] * 3], "too-long"),
        ([b'data: {"choices":[{"token_ids":[1,x]}]}\n\n'], "garbled"),
        ([b'data: {"choices":[{"token_ids":[1,', b"99999999999]}]}\n\n"], "garbled"),
    ],
)
def test_a_fault_in_a_stream_is_told_by_the_next_read(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], reason: str, pumped: bool
) -> None:
    monkeypatch.setattr(streams, "_MOST_EVENT_BYTES", 2000)
    ids = TakenIds(Endpoint.COMPLETIONS, is_asked=False)
    stream = EventStream(cast(EngineResponse, Pieces(*pieces)), "decode-0", ids=ids)

    async def body() -> None:
        if pumped:
            await stream.pump(lambda _: True)
        with pytest.raises(EngineCallError) as failed:
            await stream.read()
        assert failed.value.reason == reason

    asyncio.run(body())


@given(st.binary(max_size=200), st.lists(st.integers(1, 7), max_size=60))
def test_events_pass_whole_however_they_are_cut(text: bytes, cuts: list[int]) -> None:
    """Pieces may end inside of the mark between events."""
    text = text.replace(b"\0", END_OF_EVENT) + END_OF_EVENT
    stream, passed = EventStream(cast(EngineResponse, None), "decode-0"), []
    at = 0
    for size in [*cuts, len(text)]:
        passed.append(stream.take(text[at : at + size]) if text[at : at + size] else b"")
        at += size
    assert all(not each or each.endswith(END_OF_EVENT) for each in passed)
    # All of it, or nothing where it only says what comes before anything is generated.
    assert b"".join(passed) in (text, b"")


def test_the_beginning_of_a_stream_is_held_back_up_to_a_length() -> None:
    stream, held = EventStream(None, "decode-0"), b""  # type: ignore[arg-type]
    for _ in range(3):
        comment = b": " + b"x" * (1 << 19) + b"\n\n"
        held += comment
        passed = stream.take(comment)
    assert passed == held
    assert stream.take(LAST_EVENT) == LAST_EVENT and stream.ended


@pytest.mark.timeout(60)
def test_what_is_looked_for_in_answers_takes_time_as_they_are_long() -> None:
    """Each of these took the square of it: minutes, in which nobody else is served."""
    tools = b'{"usage":{%b"z":{}}}' % (b'"cache_a":0,' * 200_000)
    assert without_cached_tokens(tools) == tools
    assert read_exposition(b"vllm:cache_config_info{%b}" % (b"a" * (2 << 20))).cache_blocks is None


def test_only_as_much_of_a_stop_string_is_compared_as_a_text_has() -> None:
    class Looked(str):
        looks = 0

        def __getitem__(self, key: object) -> str:
            Looked.looks += 1
            return super().__getitem__(key)  # type: ignore[index]

    stop = Looked("ab" * 1_000_000)
    assert begins_stop("xa", [stop]) and not begins_stop("xyz", [stop])
    assert Looked.looks <= len("xa") + len("xyz")


@pytest.mark.parametrize("token", ["-1", "9" * 30, "9" * 5000, "x", ""])
def test_a_first_token_is_one_that_there_may_be(token: str) -> None:
    choice = {"text": "a", "finish_reason": "length", "logprobs": {"tokens": [f"token_id:{token}"]}}
    with pytest.raises(ValueError, match="no first token"):
        SampledTokens.of(json.dumps({"choices": [choice], "usage": {}}).encode())


def test_what_can_t_be_written_again_is_passed_on() -> None:
    deep = b'{"kv_transfer_params":1,"x":%b1%b}' % (b"[" * 300, b"]" * 300)
    assert without_transfer_params(deep) == deep
    assert json.loads(error_body(799, "no"))["error"]["type"] == "Error"


def test_a_number_of_an_event_is_short_or_none() -> None:
    before = b'data: {"sequence_number":%b}\n\n' % (b"9" * 5000)
    event = RESPONSES.error_event(502, "no", before)
    assert b'"sequence_number":0' in event
    assert OPENAI.error_event(502, "no", before).startswith(b"data: ")
