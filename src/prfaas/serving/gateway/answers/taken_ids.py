"""Token ids in an answer's stream: kept, in case another engine must go on, and not shown unless they were asked for.

An engine that is asked for ids also writes events that say nothing else, and all ids of the prompt in the first one.
A client that did not ask gets the bytes that vLLM 0.32 would have sent without.
"""

from array import array

from prfaas.serving.gateway.dialects import DATA, END_OF_EVENT
from prfaas.serving.gateway.prompts.prompt import Endpoint

# In generated text the quotes would be escaped.
_IDS = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
# What stands right before the ids of an event that shows nothing: vLLM would not have sent the first of these.
_SAYS_NOTHING = b'"delta":{},"logprobs":null,"finish_reason":null,'
_NO_CONTENT = b'"delta":{"content":""},"logprobs":null,"finish_reason":null,'
_NO_TEXT = b'"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
_HIDDEN = {Endpoint.CHAT: (_SAYS_NOTHING, _NO_CONTENT), Endpoint.COMPLETIONS: (_NO_TEXT,)}
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

    __slots__ = ("_hidden", "_is_asked", "ids", "latest", "shown", "shown_before")

    def __init__(self, endpoint: Endpoint, *, is_asked: bool) -> None:
        """`is_asked`: by the client, who is to get all of it."""
        self._hidden = () if is_asked else _HIDDEN[endpoint]
        self._is_asked = is_asked
        self.ids = array("I")
        """All that have come."""
        self.shown = 0
        """How many of them there were with the latest event that showed something."""
        self.shown_before = 0
        """How many there were before it."""
        self.latest = b""
        """The events as they came, of which one is the latest that showed something."""

    def take(self, events: bytes) -> bytes:
        """Whole events as the client is to have them."""
        before, mark, after = events.partition(_IDS)
        if not mark:
            return events
        told: list[bytes] = []
        while mark:
            ids, _, after = after.partition(b"]")
            come = len(self.ids)
            if b"," in ids:
                self.ids.extend(map(int, ids.split(b",")))
            elif ids:
                self.ids.append(int(ids))
            if before.endswith(self._hidden) and before.endswith(_SAYS_NOTHING):
                begin = before.rfind(END_OF_EVENT)
                told.append(before[: begin + len(END_OF_EVENT)] if begin >= 0 else b"")
                after = after[after.find(END_OF_EVENT) + len(END_OF_EVENT) :]
            else:
                if not before.endswith(self._hidden):
                    self.shown_before, self.shown, self.latest = come, len(self.ids), events
                told += (before, b'"token_ids":null')
            before, mark, after = after.partition(_IDS)
        if self._is_asked:
            return events
        told.append(before)
        return b"".join(told)


def taken_of_whole(answer: bytes) -> tuple[bytes, "array[int]"]:
    """An answer in one piece as if no ids had been asked for, and the ids of its only choice."""
    taken = TakenIds(Endpoint.COMPLETIONS, is_asked=False)
    if _PROMPT_IDS in answer:
        answer = PromptCut().take(answer)
    return taken.take(answer), taken.ids
