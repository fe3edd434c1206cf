"""A stream as the client has it so far, and another engine's stream rewritten as the rest of it."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from prfaas.core.sse import SseParser
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.prompts.prompt import Endpoint

# Enough of what comes before to see whether the text's first token would have been written another way there.
_CONTEXT_TOKENS = 16


class AnswerText:
    """Token ids of generated text, for another engine to continue from.

    The model's tokenizer is read when it is first needed: when a decode engine has failed.
    """

    def __init__(self, model_dir: Path) -> None:
        self._file = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._special_ids: frozenset[int] = frozenset()
        self._reading = asyncio.Lock()

    async def ids_after(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        """Ids that decode to exactly `text` after `prompt_ids`; None if that can't be had with certainty.

        The model may have sampled others: many sequences of tokens decode to the same text.
        """
        if not text:
            return []
        async with self._reading:
            return await asyncio.to_thread(self._ids_after, prompt_ids, text)

    def _ids_after(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        tokenizer = self._read()
        # U+FFFD stands for bytes that are no character yet. Which bytes can't be known.
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
    """What the client has of a streamed answer."""

    endpoint: Endpoint
    event: Json
    """The latest event with a choice. Later events take its form."""
    choice: Json
    """The choice of that event."""
    text: str = ""
    """All of the answer's text so far."""
    finish_reason: str | None = None
    """Why the answer ended; None: the client has not been told yet."""
    stop_reason: Any = None
    """The stop string or token that ended it."""
    usage: Json | None = None
    """The latest usage; None: the client has none yet."""
    ended: bool = False
    """Whether the client has the mark at the stream's end."""

    @classmethod
    def of(cls, endpoint: Endpoint, written: bytes) -> "StreamTranscript":
        """The transcript of whole events. Raises NotPlainError."""
        transcript: StreamTranscript | None = None
        for event in events(written):
            if event is None:
                if transcript is None:
                    raise NotPlainError("nothing but an end")
                transcript.ended = True
                continue
            choice = _only_choice(event)
            if transcript is None:
                if choice is None:
                    raise NotPlainError("no choice at the beginning")
                transcript = cls(endpoint, event, choice)
            elif choice is not None:
                transcript.event, transcript.choice = event, choice
            transcript.text += transcript._note(event, choice)
        if transcript is None:
            raise NotPlainError("no events")
        return transcript

    def rewrite(self, event: Json, prompt_tokens: int, sent_tokens: int) -> bytes:
        """An event of a completion that continues this answer, in this stream's form.

        Args:
            prompt_tokens: tokens of this request's prompt.
            sent_tokens: tokens of the answer that the completion's prompt had besides.

        Raises:
            NotPlainError: the event holds more than text.
        """
        choice = _only_choice(event)
        text = self._note(event, choice)
        usage = event.get("usage")
        if usage is not None:
            answered = sent_tokens + int(usage.get("completion_tokens", 0))
            self.usage = usage = usage_of(prompt_tokens, answered, usage.get("prompt_tokens_details"))
        if choice is None:
            return self._event([], usage)
        self.text += text
        return self._event(
            [self._choice(text, choice.get("finish_reason"), choice.get("stop_reason"))], usage
        )

    def closing_events(
        self, prompt_tokens: int, sent_tokens: int, *, usage: bool, details: Json | None = None
    ) -> Iterator[bytes]:
        """The events that are missing at the end of a complete text.

        `usage`: whether it was asked for. `details`: its `prompt_tokens_details`, where they are known.
        """
        if self.finish_reason is None:
            self.finish_reason = "length"
            yield self._event([self._choice("", "length", None)], None)
        if usage and self.usage is None:
            self.usage = usage_of(prompt_tokens, sent_tokens, details)
            yield self._event([], self.usage)
        if not self.ended:
            yield LAST_EVENT

    def _note(self, event: Json, choice: Json | None) -> str:
        if event.get("usage") is not None:
            self.usage = event["usage"]
        if choice is None:
            return ""
        if choice.get("finish_reason") is not None:
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        return _text(choice)

    def _choice(self, text: str, finish_reason: str | None, stop_reason: Any) -> Json:
        choice: Json = {**self.choice, "finish_reason": finish_reason}
        # As in vLLM, whose chats tell it at the end alone.
        if "stop_reason" in choice or finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if self.endpoint is Endpoint.CHAT:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        return choice

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        event: Json = {**self.event, "choices": choices}
        event.pop("usage", None)
        if usage is not None or "usage" in self.event:
            event["usage"] = usage
        return DATA + orjson.dumps(event) + END_OF_EVENT


def events(written: bytes) -> Iterator[Json | None]:
    """The JSON objects of whole events, None for the mark at the end. Raises NotPlainError."""
    parser = SseParser()
    for data in parser.feed(written):
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise NotPlainError(f"an event that is not JSON: {error}") from None
        if not isinstance(event, dict) or "error" in event:
            raise NotPlainError("an event that is no piece of an answer")
        yield event
    if parser.ended:
        yield None


def whole_text(answer: Any) -> str:
    """The text of an answer in one piece. Raises NotPlainError where it is more than the text of one choice."""
    if not isinstance(answer, dict):
        raise NotPlainError("no answer")
    choice = _only_choice({"choices": [_without_message(each) for each in answer.get("choices") or ()]})
    if choice is None:
        raise NotPlainError("no choice")
    return _text(choice)


def _without_message(choice: Any) -> Any:
    """A whole chat choice in the form of a stream's."""
    if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
        choice = {**choice, "delta": choice["message"]}
        del choice["message"]
    return choice


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


def usage_of(prompt_tokens: int, answer_tokens: int, details: Json | None = None) -> Json:
    """An answer's usage. `details`: its `prompt_tokens_details`; None: there are none."""
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
    }
    return usage if details is None else {**usage, "prompt_tokens_details": details}
