"""What is read in an engine's answer, and taken out of it, as the bytes that it came in.

Usage: a client that is told no details gets none of what engines held before its request, which would tell it which
prompts others have sent.

Token ids: kept, in case another engine must go on, and not shown unless they were asked for. An engine that is asked
for ids also writes events that say nothing else, and all ids of the prompt in the first one. A client that did not ask
gets the bytes that vLLM 0.32 would have sent without.
"""

import re
from array import array
from collections.abc import Sequence

import orjson

from prfaas.serving.gateway.bodies import USAGE_BYTES
from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.request_log import RequestRecord

# In generated text the quotes would be escaped. The usage stands at the end.
_ANSWER_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s?(\d{1,9})\b')
# Fixed words: in "stop_reason" vLLM quotes the client's own stop string.
_REASONS = rb"stop|length|tool_calls|function_call|content_filter|abort|error|repetition"
_FINISH_REASON = re.compile(rb'"finish_reason":\s?"(' + _REASONS + rb')"')
_STOP_REASON = re.compile(
    rb'"stop_reason":\s?"(end_turn|max_tokens|stop_sequence|tool_use|pause_turn|refusal)"'
)
_MOST_REASONS = 16


def note_answer_tokens(record: RequestRecord, piece: bytes) -> None:
    """Record how many tokens were generated, if the last piece of an answer says so; and why it ended, for a trace."""
    found = _ANSWER_TOKENS.findall(piece, max(len(piece) - USAGE_BYTES, 0))
    if found:
        record.answer_tokens = int(found[-1])
    if record.trace.is_kept:
        record.finish_reasons = finish_reasons(piece) or record.finish_reasons


def finish_reasons(tail: bytes) -> list[str]:
    """Why the answers of a request ended, from the end of what was written. In generated text quotes are escaped."""
    found = _FINISH_REASON.findall(tail) or _STOP_REASON.findall(tail)
    return [reason.decode("ascii") for reason in found[-_MOST_REASONS:]]


# In generated text the quotes would be escaped. Such an object has at most one more level in it.
_DETAILS = re.compile(rb'("(?:prompt|input)_tokens_details":\s?)(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_MESSAGE_USAGE = re.compile(rb'("usage":\s?)(\{[^{}]*\})')
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
_NUMBER = re.compile(rb"\d+")


def without_cached_tokens(answer: bytes) -> bytes:
    """An answer, or whole events of it, as of an engine that does not count cached tokens of prompts."""
    if b'"cache' not in answer:
        return answer
    return _MESSAGE_USAGE.sub(_whole_input, _DETAILS.sub(_nothing_cached, answer))


def _nothing_cached(match: re.Match[bytes]) -> bytes:
    # Responses have these numbers always.
    return match[1] + (_NUMBER.sub(b"0", match[2]) if match[1].startswith(b'"input') else b"null")


def _whole_input(match: re.Match[bytes]) -> bytes:
    """Messages count cached tokens beside the others."""
    if b'"cache_' not in match[2]:
        return match[0]
    try:
        usage = orjson.loads(match[2])
        counts = [usage.get("input_tokens"), *(usage.pop(name, None) for name in _CACHED)]
        usage["input_tokens"] = sum(count for count in counts if type(count) is int)
        return match[1] + orjson.dumps(usage)
    except (ValueError, TypeError):
        # Not an engine's: theirs has no braces in strings, and numbers of tokens.
        return match[0]


# In generated text the quotes would be escaped.
_IDS = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
# What stands right before the ids of an event that shows nothing: vLLM would not have sent the first of these.
_SAYS_NOTHING = b'"delta":{},"logprobs":null,"finish_reason":null,'
_NO_CONTENT = b'"delta":{"content":""},"logprobs":null,"finish_reason":null,'
_NO_TEXT = b'"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
# Of a tool call, its first event alone has its id.
_CALL = b'"tool_calls":['
_CALL_ID = re.compile(rb'"id":"([^"\\]+)","type":"function"')
_HIDDEN = {Endpoint.CHAT: (_SAYS_NOTHING, _NO_CONTENT), Endpoint.COMPLETIONS: (_NO_TEXT,)}
# No model has answers that are longer.
_MOST_IDS = 1 << 24
# What comes before the prompt's ids is shorter.
_LONGEST_HEAD_BYTES = 64 << 10


class PromptCut:
    """Makes the prompt's ids null while they pass, half a megabyte for 100K tokens."""

    __slots__ = ("_head", "_in_ids", "done")

    def __init__(self) -> None:
        self._head = b""
        self._in_ids = False
        self.done = False
        """Whether nothing of them can come any more."""

    def take(self, chunk: bytes) -> bytes:
        """The next piece of a stream, of any length."""
        if not self._in_ids:
            head = self._head + chunk
            begin = head.find(_PROMPT_IDS)
            if begin < 0:
                # They stand in the first event that is no comment.
                first = head if head.startswith(DATA) else head[head.find(b"\n" + DATA) + 1 :]
                self.done = (first.startswith(DATA) and END_OF_EVENT in first) or len(
                    head
                ) > _LONGEST_HEAD_BYTES
                self._head = b"" if self.done else head
                return head if self.done else b""
            self._in_ids = True
            self._head = head[: begin + len(_PROMPT_IDS) - 1] + b"null"
            chunk = head[begin + len(_PROMPT_IDS) :]
        end = chunk.find(b"]")
        if end < 0:
            return b""
        self.done = True
        return self._head + chunk[end + 1 :]


class TakenIds:
    """The ids of one answer, by however many engines."""

    __slots__ = ("_hidden", "calls", "ids", "is_asked", "latest", "shown", "shown_before", "steps")

    def __init__(self, endpoint: Endpoint, *, is_asked: bool) -> None:
        """`is_asked`: by the client, who is to get all of it."""
        self._hidden = () if is_asked else _HIDDEN[endpoint]
        self.is_asked = is_asked
        self.ids = array("I")
        """All that have come."""
        self.steps = array("I")
        """How many came at a time."""
        self.calls: list[str] = []
        """The ids of tool calls that have been shown, in their order."""
        self.shown = 0
        """How many of them there were with the latest event that showed something."""
        self.shown_before = 0
        """How many there were before it."""
        self.latest = b""
        """The events as they came, of which one is the latest that showed something."""

    def keep(self, ids: Sequence[int]) -> None:
        """These have come together."""
        self.ids.extend(ids)
        self.steps.append(len(ids))

    def cut(self, count: int) -> None:
        """Only so many of them are the answer's."""
        over = len(self.ids) - count
        del self.ids[count:]
        while over > 0:
            step = self.steps.pop()
            if step > over:
                self.steps.append(step - over)
            over -= step
        self.shown = count

    def take(self, events: bytes) -> bytes:
        """Whole events as the client is to have them. Raises ValueError and OverflowError for ids that are none."""
        before, mark, after = events.partition(_IDS)
        if not mark:
            return events
        told: list[bytes] = []
        while mark:
            ids, _, after = after.partition(b"]")
            come = len(self.ids)
            if come > _MOST_IDS:
                raise OverflowError(f"an answer of more than {_MOST_IDS} tokens")
            if b"," in ids:
                self.ids.extend(map(int, ids.split(b",")))
            elif ids:
                self.ids.append(int(ids))
            self.steps.append(len(self.ids) - come)
            if before.endswith(self._hidden) and before.endswith(_SAYS_NOTHING):
                begin = before.rfind(END_OF_EVENT)
                told.append(before[: begin + len(END_OF_EVENT)] if begin >= 0 else b"")
                after = after[after.find(END_OF_EVENT) + len(END_OF_EVENT) :]
            else:
                if not before.endswith(self._hidden):
                    self.shown_before, self.shown, self.latest = come, len(self.ids), events
                    if _CALL in before:
                        self.calls += [found.decode() for found in _CALL_ID.findall(before)]
                told += (before, b'"token_ids":null')
            before, mark, after = after.partition(_IDS)
        if self.is_asked:
            return events
        told.append(before)
        return b"".join(told)


def taken_of_whole(answer: bytes) -> tuple[bytes, "array[int]"]:
    """An answer in one piece as if no ids had been asked for, and the ids of its only choice."""
    taken = TakenIds(Endpoint.COMPLETIONS, is_asked=False)
    if _PROMPT_IDS in answer:
        answer = PromptCut().take(answer)
    return taken.take(answer), taken.ids
