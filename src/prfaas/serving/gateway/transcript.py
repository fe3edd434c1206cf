"""What a client has been told so far in a stream, and how another engine's stream is told as the rest of it.

Token ids of text that a model has generated, for another engine to go on from.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.prompts import Endpoint
from prfaas.serving.gateway.stream import DATA, END_OF_EVENT, LAST_EVENT

# Enough of what comes before to see whether the text's first token would have been written another way there.
_CONTEXT_TOKENS = 16


class AnswerText:
    """Reads the model's tokenizer when it is first needed, which is hardly ever: when an engine dies."""

    def __init__(self, model_dir: Path) -> None:
        self._file = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._special_ids: frozenset[int] = frozenset()
        self._reading = asyncio.Lock()

    async def ids_after(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        """Ids that, after `prompt_ids`, stand for exactly `text`; None if there are none that certainly do.

        The model may have sampled others for the same text: there are many ways to cut it into tokens.
        """
        if not text:
            return []
        async with self._reading:
            return await asyncio.to_thread(self._ids_after, prompt_ids, text)

    def _ids_after(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        tokenizer = self._read()
        # U+FFFD stands for bytes that are no character (yet): which ones, nobody can tell.
        if tokenizer is None or "\ufffd" in text:
            return None
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        # What looks like a special token was generated in pieces, or it would not have become text.
        if not self._special_ids.isdisjoint(ids):
            return None
        context = list(prompt_ids[-_CONTEXT_TOKENS:])
        before = tokenizer.decode(context, skip_special_tokens=False)
        after = tokenizer.decode(context + ids, skip_special_tokens=False)
        return ids if after == before + text else None

    def _read(self) -> Tokenizer | None:
        if self._tokenizer is None and self._file.is_file():
            tokenizer = Tokenizer.from_file(str(self._file))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self._tokenizer = tokenizer
            added = tokenizer.get_added_tokens_decoder()
            self._special_ids = frozenset(number for number, token in added.items() if token.special)
        return self._tokenizer


_CHOICE_FIELDS = {"index", "text", "delta", "finish_reason", "stop_reason"}
_DELTA_FIELDS = {"role", "content"}


class NotPlainError(ValueError):
    """The stream holds more than the text of one answer."""


@dataclass(slots=True)
class StreamTranscript:
    """`event` and `choice`: told last, the form of what is to come. `text`: all of the answer's so far.

    `finished`: the reason of its end has been told. `counted`: so has its usage. `ended`: so has everything.
    """

    endpoint: Endpoint
    event: Json
    choice: Json
    text: str = ""
    finished: bool = False
    counted: bool = False
    ended: bool = False

    @classmethod
    def of(cls, endpoint: Endpoint, passed: bytes) -> "StreamTranscript":
        """The story told by whole events. Raises NotPlainError."""
        told: StreamTranscript | None = None
        for event in events(passed):
            if event is None:
                if told is None:
                    raise NotPlainError("nothing but an end")
                told.ended = True
                continue
            choice = _only_choice(event)
            if told is None:
                if choice is None:
                    raise NotPlainError("no choice at the beginning")
                told = cls(endpoint, event, choice)
            elif choice is not None:
                told.event, told.choice = event, choice
            told.text += told._hear(event, choice)
        if told is None:
            raise NotPlainError("no events")
        return told

    def retell(self, event: Json, prompt_tokens: int, told_tokens: int) -> bytes:
        """An event of a completion that goes on from here, in this story's form.

        The completion's prompt was this one's, of `prompt_tokens` tokens, and `told_tokens` of its answer.
        Raises NotPlainError.
        """
        choice = _only_choice(event)
        text = self._hear(event, choice)
        usage = event.get("usage")
        if usage is not None:
            answered = told_tokens + int(usage.get("completion_tokens", 0))
            usage = _usage(prompt_tokens, answered)
        if choice is None:
            return self._event([], usage)
        self.text += text
        return self._event(
            [self._choice(text, choice.get("finish_reason"), choice.get("stop_reason"))], usage
        )

    def rest(self, prompt_tokens: int, told_tokens: int, *, usage: bool) -> Iterator[bytes]:
        """The events that end a story to whose text nothing is to be added; `usage`: whether it was asked for."""
        if not self.finished:
            yield self._event([self._choice("", "length", None)], None)
        if usage and not self.counted:
            yield self._event([], _usage(prompt_tokens, told_tokens))
        if not self.ended:
            yield LAST_EVENT

    def _hear(self, event: Json, choice: Json | None) -> str:
        if event.get("usage") is not None:
            self.counted = True
        if choice is None:
            return ""
        if choice.get("finish_reason") is not None:
            self.finished = True
        return _text(choice)

    def _choice(self, text: str, finish_reason: str | None, stop_reason: Any) -> Json:
        told: Json = {**self.choice, "finish_reason": finish_reason}
        if "stop_reason" in told or stop_reason is not None:
            told["stop_reason"] = stop_reason
        if self.endpoint is Endpoint.CHAT:
            told["delta"] = {"content": text}
        else:
            told["text"] = text
        return told

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        told: Json = {**self.event, "choices": choices}
        told.pop("usage", None)
        if usage is not None or "usage" in self.event:
            told["usage"] = usage
        return DATA + orjson.dumps(told) + END_OF_EVENT


def events(passed: bytes) -> Iterator[Json | None]:
    """The JSON objects of whole events, None for the mark at the end. Raises NotPlainError."""
    for part in passed.split(END_OF_EVENT):
        line = part.strip()
        if not line or line.startswith(b":"):
            continue
        if line == LAST_EVENT.strip():
            yield None
            continue
        try:
            event = orjson.loads(line.removeprefix(DATA.strip()))
        except orjson.JSONDecodeError as error:
            raise NotPlainError(f"an event that is not JSON: {error}") from None
        if not isinstance(event, dict) or "error" in event:
            raise NotPlainError("an event that is no piece of an answer")
        yield event


def _only_choice(event: Json) -> Json | None:
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise NotPlainError("not one choice")
    if not choices:
        return None
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("index", 0) != 0 or not _is_plain(choice, _CHOICE_FIELDS):
        raise NotPlainError("a choice of more than text")
    return choice


def _text(choice: Json) -> str:
    if "delta" in choice:
        delta = choice["delta"]
        if not isinstance(delta, dict) or not _is_plain(delta, _DELTA_FIELDS):
            raise NotPlainError("a delta of more than text")
        text = delta.get("content") or ""
    else:
        text = choice.get("text") or ""
    if not isinstance(text, str):
        raise NotPlainError("a text that is none")
    return text


def _is_plain(fields: Json, known: set[str]) -> bool:
    return all(value is None or value == [] for name, value in fields.items() if name not in known)


def _usage(prompt_tokens: int, answer_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
    }
