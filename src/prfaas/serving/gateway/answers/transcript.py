"""A stream as the client has it so far, and another engine's stream rewritten as the rest of it."""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from prfaas.core.sse import SseParser
from prfaas.serving.gateway.answers.answer_bytes import TakenIds
from prfaas.serving.gateway.answers.streams import ResponseWriter
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT, LAST_EVENT
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt

# Enough of what comes before to see whether the text's first token would have been written another way there.
_CONTEXT_TOKENS = 16


class AnswerText:
    """Text of an answer's tokens, to find where another engine can go on.

    The model's tokenizer is read when it is first needed: when a decode engine has failed.
    """

    def __init__(self, model_dir: Path) -> None:
        self._file = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._reading = asyncio.Lock()

    async def seam(
        self, prompt_ids: Sequence[int], ids: Sequence[int], read: str, first_id: int, held_chars: int
    ) -> tuple[int, str] | None:
        """How many of an answer's `ids` stand for what the client has, and the end of their text.

        Args:
            prompt_ids: of the prompt.
            ids: of the answer.
            read: what the client read last.
            first_id: how many of `ids` came before those of this text.
            held_chars: how many characters of the text so far its engine holds back, since a stop string may begin in
                them.

        Returns:
            None if that can't be said: a parser has made something else of them, or holds a part of them back.
        """
        async with self._reading:
            return await asyncio.to_thread(self._seam, prompt_ids, ids, read, first_id, held_chars)

    def _seam(
        self, prompt_ids: Sequence[int], ids: Sequence[int], read: str, first_id: int, held_chars: int
    ) -> tuple[int, str] | None:
        if not read:
            return None
        if self._tokenizer is None and self._file.is_file():
            self._tokenizer = Tokenizer.from_file(str(self._file))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        tokenizer = self._tokenizer
        if tokenizer is None:
            # What came in one event is all there, for all that can be known.
            return None if held_chars else (len(ids), "")
        first = max(first_id - _CONTEXT_TOKENS - held_chars - len(read), 0)
        context = list(prompt_ids[-_CONTEXT_TOKENS:]) if not first else []
        # Special tokens are in the text where a parser reads it.
        for skips in (False, True):
            before = tokenizer.decode(context, skip_special_tokens=skips)
            for count in range(len(ids), first_id, -1):
                text = tokenizer.decode([*context, *ids[first:count]], skip_special_tokens=skips)[
                    len(before) :
                ]
                if text[: len(text) - held_chars].endswith(read):
                    return count, text
        return None


class CannotResumeError(Exception):
    """The stream can't be resumed."""

    def __init__(self, outcome: str) -> None:
        """`outcome`: why, in one word."""
        super().__init__(outcome)
        self.outcome = outcome


class NotPlainError(ValueError):
    """The stream holds more than one answer, or than its text."""


@contextmanager
def plain() -> Iterator[None]:
    """For reading an engine's stream: raises NotPlainError in whatever way it is of another form."""
    try:
        yield
    except (ValueError, OverflowError, TypeError, AttributeError, LookupError, StopIteration) as error:
        raise NotPlainError(f"{type(error).__name__} in reading it") from None


class StopAccount:
    """Stop strings of an answer that a second engine continues: what of the text may leave, and where it ends.

    A stop string may have begun before the seam, where the second engine sees a prompt. So it is asked without any, and
    the gateway looks for them as vLLM 0.32 does: as many characters as a stop string may lack are held back.
    """

    def __init__(self, stops: Sequence[str], *, includes: bool, text: str, held_chars: int) -> None:
        """
        Args:
            stops: in the order in which they are looked for.
            includes: whether the client is to have the one that ends the answer.
            text: the end of the answer's text so far.
            held_chars: how much of it the client has not got.
        """
        self._stops = stops
        self._includes = includes
        self._longest = max(map(len, stops))
        self._text = text
        self._held_chars = min(held_chars, len(text))
        self.stop: str | None = None
        """The string that has ended the answer."""

    def take(self, piece: str, *, is_last: bool, is_looked_at: bool) -> str:
        """What may leave now that `piece` has come, perhaps the last one.

        `is_looked_at`: False while the answer has too few tokens to end.
        """
        text = self._text + piece
        sent = len(self._text) - self._held_chars
        end = len(text) if is_last or self._includes else max(len(text) - self._longest + 1, sent)
        for stop in self._stops if is_looked_at and piece else ():
            found = text.find(stop, max(len(text) - len(piece) - len(stop) + 1, 0))
            if found >= 0:
                self.stop = stop
                end = max(found + len(stop) * self._includes, sent)
                break
        self._text = text[-self._longest - (len(text) - end) :]
        self._held_chars = len(text) - end
        return text[sent:end]


@dataclass(slots=True)
class StreamTranscript:
    """What the client has of a streamed answer."""

    endpoint: Endpoint
    event: Json
    """The latest event with a choice. Later events take its form."""
    choice: Json
    """The choice of that event."""
    finish_reason: str | None = None
    """Why the answer ended; None: the client has not been told yet."""
    usage: Json | None = None
    """The latest usage; None: the client has none yet."""
    ended: bool = False
    """Whether the client has the mark at the stream's end."""
    stops: StopAccount | None = None
    """Looks for stop strings in an engine's place; None: there are none, or the engine does it."""

    @classmethod
    def of(cls, endpoint: Endpoint, written: bytes) -> "StreamTranscript":
        """The transcript of whole events, of which one at least has a choice. Raises NotPlainError."""
        transcript = cls(endpoint, {}, {})
        for event in events(written):
            if event is None:
                transcript.ended = True
            else:
                transcript._note(event, _choice_of(event))
        if not transcript.event:
            raise NotPlainError("no choice")
        return transcript

    def rewrite(self, event: Json, prompt_tokens: int, sent_tokens: int, *, may_stop: bool) -> bytes:
        """An event of the answer's rest in this stream's form; nothing where it only begins. Raises NotPlainError.

        Args:
            event: of the second engine.
            prompt_tokens: tokens of this request's prompt.
            sent_tokens: tokens of the answer that the second engine had as its prompt besides.
            may_stop: whether the answer has tokens enough for a stop string.
        """
        choice = _choice_of(event)
        usage = event.get("usage")
        if usage is not None:
            answered = sent_tokens + int(usage.get("completion_tokens", 0))
            usage = usage_of(prompt_tokens, answered, usage.get("prompt_tokens_details"))
        if choice is None:
            self.usage = usage or self.usage
            return self._event(event, [], usage)
        choice = self._continued(choice)
        if choice.get("delta") == {} and choice.get("finish_reason") is None and not choice.get("token_ids"):
            return b""
        if self.stops is not None:
            self._stopped(choice, self.stops, may_stop)
        piece = self._event(event, [choice], usage)
        self._note({**self.event, "usage": usage}, choice)
        return piece

    def closing_events(
        self, prompt_tokens: int, sent_tokens: int, *, usage: bool, details: Json | None = None
    ) -> Iterator[bytes]:
        """The events that are missing at the end of a complete text.

        `usage`: whether it was asked for. `details`: its `prompt_tokens_details`, where they are known.
        """
        if self.finish_reason is None:
            self.finish_reason = "length"
            said: Json = {"delta": {"content": ""}} if self.endpoint is Endpoint.CHAT else {"text": ""}
            last = {**self.choice, **said, "finish_reason": "length", "stop_reason": None}
            yield self._event(self.event, [last], None)
        if usage and self.usage is None:
            self.usage = usage_of(prompt_tokens, sent_tokens, details)
            yield self._event(self.event, [], self.usage)
        if not self.ended:
            yield LAST_EVENT

    def _note(self, event: Json, choice: Json | None) -> None:
        if event.get("usage") is not None:
            self.usage = event["usage"]
        if choice is None:
            # Only the usage comes when all has been said.
            self.finish_reason = self.finish_reason or "stop"
            return
        self.event, self.choice = event, choice
        # Raises for what is none.
        said_in(choice)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _continued(self, choice: Json) -> Json:
        """A choice of the rest as one of this stream: it begins no answer."""
        choice = {name: None if name == "prompt_token_ids" else value for name, value in choice.items()}
        if isinstance(choice.get("delta"), dict) and "role" in choice["delta"]:
            choice["delta"] = {
                name: said for name, said in choice["delta"].items() if name != "role" and said != ""
            }
        told, before = choice.get("logprobs"), self.choice.get("logprobs")
        # Those of completions say where in the answer's text each token begins.
        if isinstance(told, dict) and isinstance(before, dict) and before.get("text_offset"):
            shift = before["text_offset"][-1] + len(before["tokens"][-1])
            offsets = [offset - told["text_offset"][0] + shift for offset in told["text_offset"]]
            choice["logprobs"] = {**told, "text_offset": offsets}
        return choice

    def _stopped(self, choice: Json, stops: StopAccount, may_stop: bool) -> None:
        """Hold back of a choice what may be a stop string's beginning, and end it where one is whole."""
        said, name = _text_place(choice)
        text = said.get(name)
        reason = choice.get("finish_reason")
        leaves = stops.take(text or "", is_last=reason is not None, is_looked_at=may_stop)
        if text is not None or leaves:
            said[name] = leaves
        if stops.stop is not None:
            choice |= {"finish_reason": "stop", "stop_reason": stops.stop}

    def _event(self, event: Json, choices: list[Json], usage: Json | None) -> bytes:
        own: Json = {name: self.event[name] for name in ("id", "created", "model") if name in self.event}
        told: Json = {**event, **own, "choices": choices}
        told.pop("usage", None)
        told.pop("prompt_token_ids", None)
        if usage is not None or "usage" in event:
            told["usage"] = usage
        return DATA + orjson.dumps(told) + END_OF_EVENT


@dataclass(slots=True, kw_only=True)
class BegunAnswer:
    """An answer of which the client has the beginning, and which an engine is to continue."""

    request: ServingRequest
    prompt: TokenizedPrompt
    transcript: StreamTranscript
    ids: TakenIds
    writer: ResponseWriter
    failed: list[str]
    """All decode engines that have failed this request."""

    @property
    def includes_stop(self) -> bool:
        """Whether the client is to have the stop string that ends the answer."""
        return self.request.body.get("include_stop_str_in_output") is True


@dataclass(frozen=True, slots=True)
class AnswerRest:
    """What an engine is asked for to continue an answer."""

    request: ServingRequest
    token_ids: "array[int]"
    """The prompt and the answer so far."""
    sent_tokens: int
    """Tokens of the answer so far."""


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


def _choice_of(event: Json) -> Json | None:
    """The only choice of an event; None where it has none. Raises NotPlainError."""
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise NotPlainError("not one choice")
    if not choices:
        return None
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("index", 0) != 0:
        raise NotPlainError("another choice")
    return choice


def last_said(written: bytes) -> str | None:
    """What the last event said that has token ids; None where it is a tool call. Raises NotPlainError."""
    choices = [_choice_of(event) for event in events(written) if event is not None]
    choice = next(choice for choice in reversed(choices) if choice and choice.get("token_ids"))
    return None if (choice.get("delta") or {}).get("tool_calls") else said_in(choice)


def said_in(choice: Json) -> str:
    """What a choice says to the reader: content, or reasoning where there is none."""
    said, name = _text_place(choice)
    text = said.get(name) or ""
    if not isinstance(text, str):
        raise NotPlainError("a text that is none")
    return text


def _text_place(choice: Json) -> tuple[Json, str]:
    """Where a choice has its text: an object, and the name in it."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return choice, "text"
    return delta, "reasoning" if delta.get("reasoning") and not delta.get("content") else "content"


def usage_of(prompt_tokens: int, answer_tokens: int, details: Json | None = None) -> Json:
    """An answer's usage. `details`: its `prompt_tokens_details`; None: there are none."""
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
    }
    return usage if details is None else {**usage, "prompt_tokens_details": details}
