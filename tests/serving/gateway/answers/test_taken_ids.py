"""Token ids that the gateway asked for: the client's bytes are those of a stream without, and no id is lost."""

from array import array
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.answers.answer_bytes import PromptCut, TakenIds, taken_of_whole
from prfaas.serving.gateway.answers.streams import EventStream
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.prompts.prompt import Endpoint

from .test_streams import cut

# Texts that look like what is cut out: in JSON their quotes are escaped.
TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(('"token_ids":[1]', '"prompt_token_ids":[', '],"delta":{},', "data: \n\n", "")),
)
IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=4)
# Text, or None where a parser holds all of it back; ids; whether it has log probabilities.
TOKENS = st.lists(st.tuples(st.one_of(st.none(), TEXTS), IDS, st.booleans()), max_size=6)


def event(**fields: Any) -> bytes:
    return DATA + orjson.dumps({"id": "x", "object": "chunk", **fields}) + END_OF_EVENT


def written(
    endpoint: Endpoint, prompt: list[int], tokens: list[tuple[str | None, list[int], bool]], *, asked: bool
) -> bytes:
    """A stream as vLLM 0.32 writes it: with ids where they are `asked` for."""
    chat, told = endpoint is Endpoint.CHAT, b""
    if chat:
        role = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        told += event(choices=[role], prompt_token_ids=prompt if asked else None)
    for number, (text, ids, has_logprobs) in enumerate(tokens):
        is_last = number == len(tokens) - 1
        logprobs = {"content": [{"token": "a", "bytes": [97]}]} if has_logprobs else None
        if chat and text is None and not (asked or is_last or has_logprobs):
            continue
        delta = {} if text is None else {"content": text}
        choice: dict[str, Any] = {"index": 0} | ({"delta": delta} if chat else {"text": text or ""})
        choice |= {"logprobs": logprobs, "finish_reason": "stop" if is_last else None}
        if not chat or is_last:
            choice["stop_reason"] = None
        if not chat:
            choice["prompt_token_ids"] = prompt if asked and not number else None
        told += event(choices=[choice | {"token_ids": ids if asked else None}])
    return told + event(choices=[], usage={"prompt_tokens": 1}) + LAST_EVENT


@settings(deadline=None)
@given(
    st.sampled_from((Endpoint.CHAT, Endpoint.COMPLETIONS)),
    st.lists(st.integers(0, 1 << 31), max_size=40),
    TOKENS,
    st.data(),
)
def test_a_client_that_asked_for_no_ids_gets_the_bytes_without(
    endpoint: Endpoint,
    prompt: list[int],
    tokens: list[tuple[str | None, list[int], bool]],
    data: st.DataObject,
) -> None:
    ids = TakenIds(endpoint, is_asked=False)
    stream = EventStream(cast(EngineResponse, None), "decode", cut=PromptCut(), ids=ids)
    raw = b": ping\n\n" * data.draw(st.integers(0, 2)) + written(endpoint, prompt, tokens, asked=True)
    passed = b"".join(stream.take(piece) for piece in cut(raw, data))
    assert passed.replace(b": ping\n\n", b"") == written(endpoint, prompt, tokens, asked=False)
    assert ids.ids == array("I", [each for _, told, _ in tokens for each in told])
    assert stream.ended


@settings(deadline=None)
@given(st.sampled_from((Endpoint.CHAT, Endpoint.COMPLETIONS)), TOKENS, st.data())
def test_a_client_that_asked_gets_all_of_it(
    endpoint: Endpoint, tokens: list[tuple[str | None, list[int], bool]], data: st.DataObject
) -> None:
    ids = TakenIds(endpoint, is_asked=True)
    stream = EventStream(cast(EngineResponse, None), "decode", ids=ids)
    raw = written(endpoint, [1, 2], tokens, asked=True)
    assert b"".join(stream.take(piece) for piece in cut(raw, data)) == raw
    assert ids.shown == len(ids.ids) == sum(len(told) for _, told, _ in tokens)


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_what_shows_nothing_is_not_counted_as_shown(endpoint: Endpoint) -> None:
    ids = TakenIds(endpoint, is_asked=False)
    stream = EventStream(cast(EngineResponse, None), "decode", cut=PromptCut(), ids=ids)
    tokens: list[tuple[str | None, list[int], bool]] = [
        ("a", [1], False),
        ("b", [2, 3], False),
        ("", [4], False),
    ]
    stream.take(written(endpoint, [9], [*tokens, (None, [5], False), ("end", [6], False)], asked=True)[:-1])
    assert (ids.shown_before, ids.shown) == (5, 6)
    ids = TakenIds(endpoint, is_asked=False)
    raw = written(endpoint, [9], [*tokens, (None, [5], False), ("end", [6], False)], asked=True)
    before_end = raw[: raw.index(b'"token_ids":[6]')].rfind(DATA)
    stream = EventStream(cast(EngineResponse, None), "decode", cut=PromptCut(), ids=ids)
    stream.take(raw[:before_end])
    assert (ids.shown_before, ids.shown, len(ids.ids)) == (1, 3, 5)


def test_a_long_prompts_ids_are_not_kept_while_they_pass() -> None:
    cutter, held = PromptCut(), 0
    raw = written(Endpoint.CHAT, list(range(200_000)), [("a", [1], False)], asked=True)
    passed = b""
    for at in range(0, len(raw), 65536):
        passed += cutter.take(raw[at : at + 65536])
        held = max(held, len(cutter._head))
    assert len(raw) > 1 << 20 and held < 500 and b'"prompt_token_ids":null' in passed


@pytest.mark.parametrize("chat", [False, True])
def test_the_ids_of_an_answer_in_one_piece(chat: bool) -> None:
    def answer(prompt: list[int] | None, ids: list[int] | None) -> bytes:
        choice = {"index": 0, "text": '"token_ids":[7]', "token_ids": ids}
        whole = {"choices": [choice], "prompt_token_ids": prompt}
        return orjson.dumps(whole if chat else {"choices": [{"prompt_token_ids": prompt, **choice}]})

    assert taken_of_whole(answer([1, 2], [3, 4])) == (answer(None, None), array("I", [3, 4]))
    assert taken_of_whole(answer(None, None)) == (answer(None, None), array("I"))
