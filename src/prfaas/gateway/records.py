"""What became of each of the latest requests, for `prfaas explain`. No prompt, no answer, no secret."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from prfaas.gateway.transfers import Moved
from prfaas.scheduling import Decision


@dataclass(slots=True)
class Attempt:
    """One way that the request was sent. `outcome`: "under way", "done", or why it failed, in one word.

    `prompt_tokens`: of the prompt that was sent, which for the rest of an answer has its beginning at the end.
    `moved`: what came to the decode instance.
    """

    decision: Decision
    prompt_tokens: int
    outcome: str = "under way"
    moved: Moved | None = None


@dataclass(slots=True)
class Record:
    """One request. `began_s` is `time.perf_counter`, `at_s` Unix time; `steps_s` are durations by the step's name.

    `direct_reason`: why its decode engine got it without a look at the prompt. `prefix_*`: the cache transfer
    before the prefill. `notes`: what went wrong, with the seconds since the request's arrival. `broken`: its
    stream ended with an error.
    """

    request_id: str
    endpoint: str
    at_s: float
    began_s: float
    model: str = ""
    streamed: bool = False
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    direct_reason: str | None = None
    attempts: list[Attempt] = field(default_factory=list)
    route_header: str | None = None
    route: str = "none"
    prefix_moved: Moved | None = None
    prefix_outcome: str | None = None
    steps_s: dict[str, float] = field(default_factory=dict)
    notes: list[tuple[float, str]] = field(default_factory=list)
    broken: bool = False
    status: int | None = None
    outcome: str = "under way"

    def went(self, decision: Decision, prompt_tokens: int) -> Attempt:
        """The request goes the way of `decision` now."""
        attempt = Attempt(decision, prompt_tokens)
        self.attempts.append(attempt)
        return attempt

    def note(self, sentence: str) -> None:
        """Something that explains the request's way has happened."""
        self.notes.append((time.perf_counter() - self.began_s, sentence))

    def took(self, step: str, taken_s: float) -> None:
        """A step is over; more than one of a kind add up."""
        self.steps_s[step] = self.steps_s.get(step, 0.0) + taken_s

    def since(self, step: str, begun_s: float) -> float:
        """A step that began at `begun_s` is over. Gives the time, at which the next one begins."""
        now_s = time.perf_counter()
        self.took(step, now_s - begun_s)
        return now_s


class Records:
    """The latest requests by id; the oldest make room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        self._records[record.request_id] = record
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)

    def find(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def __len__(self) -> int:
        return len(self._records)
