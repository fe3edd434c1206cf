"""Which answers may be continued, what the second engine is asked, and how its words become the first one's."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prfaas.serving.gateway.answers.transcript import (
    AnswerText,
    NotPlainError,
    StopAccount,
    StreamTranscript,
    events,
    last_said,
)
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.prompts.prompt import Endpoint, can_resume, rest_body, tokens_left

from ..stand_in import write_tokenizer

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
ASKED: dict[str, Any] = {
    "model": "m",
    "prompt": "x",
    "stream": True,
    "max_tokens": 10,
    "temperature": 0.7,
    "stop": ["a", "b"],
    "min_tokens": 4,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1, "temperature": 0},
        {"seed": -1},
        {"logprobs": 1, "top_logprobs": 1},
        {"logit_bias": {"1": 1}, "repetition_penalty": 1.1, "allowed_token_ids": [1]},
        {"tools": [TOOL], "parallel_tool_calls": True},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"strict": True}}], "tool_choice": "none"},
        {"metadata": {"a": 1}, "user": "me", "store": True, "service_tier": "auto", "some_new_field": [1]},
        {"include_reasoning": True, "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
        {"return_token_ids": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_no_sample_may_be_there(fields: dict[str, Any]) -> None:
    assert can_resume(Endpoint.COMPLETIONS, ASKED | fields) and can_resume(Endpoint.CHAT, ASKED | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"stream": None},
        {"n": 2},
        {"seed": 1},
        {"seed": 1, "temperature": None},
        {"echo": True},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 1},
        {"bad_words": ["a b"]},
        {"vllm_xargs": {"a": 1}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {"prompt_logprobs": 1},
        {"include_reasoning": False},
    ],
    ids=str,
)
def test_what_counts_the_answers_own_tokens_may_not(fields: dict[str, Any]) -> None:
    assert can_resume(Endpoint.CHAT, ASKED) and not can_resume(Endpoint.CHAT, ASKED | fields)


def test_streams_of_other_apis_are_not_resumed() -> None:
    body = {"model": "m", "messages": [], "max_tokens": 5, "stream": True}
    assert not can_resume(Endpoint.MESSAGES, body) and not can_resume(Endpoint.RESPONSES, body)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 80)), st.booleans())
def test_both_engines_together_generate_what_one_would(
    prompt: int, told: int, limit: int | None, chat: bool
) -> None:
    endpoint = Endpoint.CHAT if chat else Endpoint.COMPLETIONS
    body: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    left = tokens_left(endpoint, body, prompt, told, 100)
    alone = min(100 - prompt, limit if limit is not None else 100 if chat else 16)
    assert told + left == alone
    ids = array("I", [1] * (prompt + told))
    asked = rest_body(endpoint, ASKED, ids, told, left)
    assert asked["min_tokens"] == max(4 - told, 0) and asked["temperature"] == 0.7
    assert asked["max_completion_tokens" if chat else "max_tokens"] == left
    assert "stop" not in asked and asked["prompt"] == ("x" if chat else ids)


def chunk(text: str, reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return DATA + orjson.dumps({"id": "a", "model": "m", "choices": [choice | more]}) + END_OF_EVENT


def told_by(story: StreamTranscript, raw: bytes) -> bytes:
    return b"".join(story.rewrite(event, 5, 3, may_stop=True) for event in events(raw) if event)


@settings(deadline=None)
@given(st.text(max_size=30), st.data())
def test_a_story_and_its_rest_read_as_one_answer(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    first, second = pieces[:2], pieces[2:]
    told = b"".join(map(chunk, first))
    story = StreamTranscript.of(Endpoint.COMPLETIONS, told)
    for number, piece in enumerate(second):
        reason = "stop" if number == len(second) - 1 else None
        (event,) = events(chunk(piece, reason, stop_reason="#" if reason else None))
        assert event is not None
        told += story.rewrite(event | {"id": "b", "model": "other"}, 5, 3, may_stop=True)
    heard = [event for event in events(told) if event]
    assert "".join(event["choices"][0]["text"] for event in heard) == text
    assert {(event["id"], event["model"]) for event in heard} == {("a", "m")}
    assert heard[-1]["choices"][0]["finish_reason"] == "stop" and story.finish_reason == "stop"
    assert heard[-1]["choices"][0]["stop_reason"] == "#"


def test_the_rest_begins_no_answer() -> None:
    head = {"id": "a", "created": 1, "model": "m"}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    said = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [1]}

    def event(*choices: Any, **more: Any) -> bytes:
        return DATA + orjson.dumps(head | {"choices": choices} | more) + END_OF_EVENT

    story = StreamTranscript.of(Endpoint.CHAT, event(role) + event(said))
    usage = {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
    thought = {"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None}
    rest = event(role, prompt_token_ids=[1]) + event(thought) + event(usage=usage)
    heard = list(events(told_by(story, rest.replace(b'"id":"a"', b'"id":"b"'))))
    assert heard == [
        head | {"choices": [thought]},
        head | {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}},
    ]


def test_log_probabilities_count_their_places_on() -> None:
    def told(*offsets: int) -> bytes:
        return chunk("ab", logprobs={"tokens": ["a", "bcd"], "text_offset": offsets})

    story = StreamTranscript.of(Endpoint.COMPLETIONS, told(7, 8))
    heard = events(told_by(story, told(0, 1) + told(4, 5)))
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in heard if e] == [[11, 12], [15, 16]]


@pytest.mark.parametrize(
    "told",
    [
        b"",
        LAST_EVENT,
        chunk("a", index=1),
        DATA + b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}\n\n',
        DATA + b'{"choices": [{"index": 0, "text": 5}]}\n\n',
        chunk("a") + DATA + b'{"error": {"code": 400}}\n\n',
        chunk("a") + DATA + b"not JSON\n\n",
    ],
)
def test_more_than_one_answer_has_no_transcript(told: bytes) -> None:
    with pytest.raises(NotPlainError):
        StreamTranscript.of(Endpoint.CHAT, told)


def test_the_end_of_a_story_is_told_once() -> None:
    story = StreamTranscript.of(Endpoint.COMPLETIONS, chunk("ab"))
    rest = list(story.closing_events(3, 2, usage=True))
    assert len(rest) == 3 and rest[2] == LAST_EVENT
    assert orjson.loads(rest[1][len(DATA) :])["usage"]["total_tokens"] == 5
    told = chunk("ab") + b"".join(rest)
    assert list(StreamTranscript.of(Endpoint.COMPLETIONS, told).closing_events(3, 2, usage=True)) == []
    assert list(
        StreamTranscript.of(Endpoint.COMPLETIONS, chunk("ab", "stop")).closing_events(3, 2, usage=False)
    ) == [LAST_EVENT]


def test_the_last_words_are_those_of_the_last_tokens() -> None:
    assert last_said(chunk("a", token_ids=[1]) + chunk("b", token_ids=[2]) + chunk("", token_ids=[])) == "b"
    call = DATA + b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"token_ids":[3]}]}\n\n'
    assert last_said(chunk("a", token_ids=[1]) + call) is None


def seam(directory: Path, ids: list[int], text: str, first: int, held: int = 0) -> tuple[int, str] | None:
    return asyncio.run(AnswerText(directory).seam([70, 71], ids, text, first, held))


def test_the_seam_is_behind_the_last_whole_character(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("so naïve 数字").ids
    whole = [count for count in range(1, len(ids) + 1) if "\ufffd" not in tokenizer.decode(ids[:count])]
    for count in range(1, len(ids) + 1):
        # Tokens that came in one event, of which a client reads whole characters alone.
        reached = max(each for each in whole if each <= count)
        shown = tokenizer.decode(ids[:reached])
        assert seam(directory, ids[:count], shown, 0) == (reached, shown)
    # What a parser has not made anything of comes behind what was read, and is asked for again.
    special = tokenizer.token_to_id("<|im_end|>")
    assert seam(directory, [*tokenizer.encode("ab").ids, special], "b", 1) == (2, "ab")
    # Something else was read than the tokens say.
    assert seam(directory, ids, "other", 0) is None and seam(directory, ids, "", 0) is None
    # Held back for a stop string.
    assert seam(directory, tokenizer.encode("abcdef").ids, "d", 5, 2) == (6, "abcdef")
    # Without a tokenizer what has come is believed.
    assert seam(tmp_path / "nothing", ids, "x", 0) == (len(ids), "")
    assert seam(tmp_path / "nothing", ids, "x", 0, 1) is None


def by_one_engine(
    pieces: list[str], stops: list[str], least: int, *, includes: bool
) -> tuple[list[str], str | None]:
    """The text of each event by vLLM's rules, a token an event."""
    text, shown, told = "", 0, []
    lag = 0 if includes else max(map(len, stops)) - 1
    for number, piece in enumerate(pieces):
        text += piece
        is_last, stop = number == len(pieces) - 1, None
        if number + 1 > least and piece:
            looked = ((text.find(s, max(len(text) - len(piece) - len(s) + 1, 0)), s) for s in stops)
            found = next(((at, s) for at, s in looked if at >= 0), None)
            if found is not None:
                stop = found[1]
                text = text[: found[0] + len(stop) * includes]
        end = len(text) if is_last or stop else len(text) - lag
        told.append(text[shown : max(end, shown)])
        shown = max(end, shown)
        if stop:
            return told, stop
    return told, None


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.text("ab", max_size=3), min_size=4, max_size=12),
    # With the letter that is in no text, it is never found.
    st.lists(st.text("abc", min_size=2, max_size=5), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 4),
)
def test_a_stop_string_is_found_as_one_engine_would(
    pieces: list[str], stops: list[str], least: int, includes: bool, seam_at: int
) -> None:
    told, stop = by_one_engine(pieces, stops, least, includes=includes)
    if seam_at >= len(told) or (stop and seam_at == len(told) - 1):
        return
    before = pieces[: seam_at + 1]
    lag = 0 if includes else max(map(len, stops)) - 1
    account = StopAccount(stops, includes=includes, text="".join(before), held_chars=lag)
    for number in range(seam_at + 1, len(told)):
        piece = account.take(
            pieces[number], is_last=number == len(pieces) - 1, is_looked_at=number + 1 > least
        )
        assert piece == told[number]
    if len(told) > seam_at + 1:
        assert account.stop == stop
