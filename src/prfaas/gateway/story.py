"""What a client has been told so far in a stream, and how another engine's stream is told as the rest of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from prfaas.gateway.bodies import Json
from prfaas.gateway.events import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.gateway.prompts import Endpoint

_CHOICE_FIELDS = {"index", "text", "delta", "finish_reason", "stop_reason"}
_DELTA_FIELDS = {"role", "content"}


class NotPlainError(ValueError):
    """The stream holds more than the text of one answer."""


@dataclass(slots=True)
class Story:
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
    def of(cls, endpoint: Endpoint, passed: bytes) -> "Story":
        """The story told by whole events. Raises NotPlainError."""
        told: Story | None = None
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
