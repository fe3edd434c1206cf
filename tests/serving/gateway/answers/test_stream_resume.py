"""Which answers may be continued, what the second engine is asked, and how its words become the first one's."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from prfaas.serving.gateway.answers.transcript import AnswerText, NotPlainError, StreamTranscript, events
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.prompts.continuing import can_resume, resume_body, tokens_left
from prfaas.serving.gateway.prompts.prompt import Endpoint

from ..stand_in import write_tokenizer

PLAIN: dict[str, Any] = {
    "model": "m",
    "prompt": "x",
    "stream": True,
    "max_tokens": 10,
    "temperature": 0.7,
    "top_p": 1,
    "top_k": 5,
    "min_p": 0.1,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 4,
    "user": "me",
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": None,
    "tools": None,
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
}


def test_what_is_known_to_be_harmless_may_be_there() -> None:
    assert can_resume(Endpoint.COMPLETIONS, PLAIN)
    assert can_resume(Endpoint.COMPLETIONS, PLAIN | {"seed": 1, "temperature": 0})


@pytest.mark.parametrize(
    "field",
    [
        {"stream": False},
        {"stream": None},
        {"n": 2},
        {"seed": 1},
        {"seed": 1, "temperature": None},
        {"logprobs": 0},
        {"top_logprobs": 1},
        {"echo": True},
        {"best_of": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"1": 1}},
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"prompt_logprobs": 0},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stop_token_ids": ["1"]},
        {"skip_special_tokens": False},
        {"vllm_xargs": {"a": 1}},
        {"include_reasoning": True},
        {"min_tokens": "4"},
    ],
    ids=str,
)
def test_anything_else_may_not(field: dict[str, Any]) -> None:
    assert not can_resume(Endpoint.COMPLETIONS, PLAIN | field)


def test_streams_of_other_apis_are_not_resumed() -> None:
    body = {"model": "m", "messages": [], "max_tokens": 5, "stream": True}
    assert can_resume(Endpoint.CHAT, body)
    assert not can_resume(Endpoint.MESSAGES, body) and not can_resume(Endpoint.RESPONSES, body)


@given(st.text(min_size=1), st.one_of(st.booleans(), st.integers(), st.text(), st.lists(st.integers())))
def test_an_unknown_field_with_a_value_may_not(name: str, value: Any) -> None:
    body = {"stream": True, "prompt": "x"}
    known = set(PLAIN) | {"messages", "seed", "echo", "max_completion_tokens"}
    if name not in known | {"add_special_tokens", "add_generation_prompt"}:
        assert can_resume(Endpoint.COMPLETIONS, body) and not can_resume(
            Endpoint.COMPLETIONS, body | {name: value}
        )


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
    asked = resume_body(PLAIN, "m", [1] * (prompt + told), told, left)
    assert asked["min_tokens"] == max(4 - told, 0) and asked["max_tokens"] == left
    assert asked["temperature"] == 0.7 and "response_format" not in asked and "n" not in asked


def chunk(text: str, reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return DATA + orjson.dumps({"id": "a", "model": "m", "choices": [choice | more]}) + END_OF_EVENT


@settings(deadline=None)
@given(st.text(max_size=30), st.data())
def test_a_story_and_its_rest_read_as_one_answer(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    first, second = pieces[:2], pieces[2:]
    story = StreamTranscript.of(Endpoint.COMPLETIONS, b"".join(map(chunk, first)))
    told = b"".join(map(chunk, first))
    for number, piece in enumerate(second):
        reason = "stop" if number == len(second) - 1 else None
        (event,) = events(chunk(piece, reason, stop_reason="#" if reason else None))
        assert event is not None
        told += story.rewrite(event | {"id": "b", "model": "other"}, 5, 3)
    heard = [event for event in events(told) if event]
    assert "".join(event["choices"][0]["text"] for event in heard) == text == story.text
    assert {(event["id"], event["model"]) for event in heard} == {("a", "m")}
    assert heard[-1]["choices"][0]["finish_reason"] == "stop" and story.finish_reason == "stop"
    assert heard[-1]["choices"][0]["stop_reason"] == "#"


@pytest.mark.parametrize(
    "told",
    [
        b"",
        LAST_EVENT,
        chunk("a", logprobs={"tokens": ["a"]}),
        chunk("a", index=1),
        chunk("a", token_ids=[1]),
        DATA + b'{"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}\n\n',
        DATA + b'{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}\n\n',
        DATA + b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}\n\n',
        chunk("a") + DATA + b'{"error": {"code": 400}}\n\n',
        chunk("a") + DATA + b"not JSON\n\n",
    ],
)
def test_more_than_the_text_of_one_answer_is_not_plain(told: bytes) -> None:
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


async def ids_after(directory: Path, prompt: list[int], text: str) -> list[int] | None:
    return await AnswerText(directory).ids_after(prompt, text)


def test_ids_stand_for_exactly_the_text(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in ("hello", " naïve 数字\n\n", ""):
        ids = asyncio.run(ids_after(directory, [70, 71], text))
        assert ids is not None and tokenizer.decode(ids) == text
    # Bytes that are no character yet, and a special token's name.
    for text in ("caf\ufffd", "<|im_end|>"):
        assert asyncio.run(ids_after(directory, [70], text)) is None
    assert asyncio.run(ids_after(tmp_path / "nothing", [70], "hello")) is None


def test_a_tokenizer_that_puts_a_blank_before_texts_is_not_fooled(tmp_path: Path) -> None:
    vocabulary = {"▁": 0, "a": 1, "b": 2, "▁a": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"
    # "ab" by itself comes back as it was, but after "b" it would stand for " ab".
    assert asyncio.run(ids_after(tmp_path, [2], "ab")) is None
    assert asyncio.run(ids_after(tmp_path, [2], " ab")) is not None
