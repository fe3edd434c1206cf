"""One decode instance: all requests in its batch get one token per step, whose time may grow with their contexts."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from prfaas.lab.simulator.events import Callback, Events

# A request this close to its end has reached it: clocks are floating-point numbers.
_SLACK_S = 1e-9
_SLACK = 1e-15


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """How a decode step grows with what its requests have in the KV cache: prompts, and answers so far."""

    token_s: float = 0.0
    """Seconds that a step takes longer per token of context in the batch."""
    measured_tokens: float = 0.0
    """The context per request at which steps were measured."""


class TokenClock:
    """Requests in `slots` slots, first come, first served, each at 1 token per step.

    Steps are a fluid: a token of a batch that changes halfway is half of the one step and half of the other. All
    members move at the same rate, so one number, the tokens that a member from the start would have, gives the
    progress of all, and only joining and leaving are events.

    While nobody joins or leaves, contexts grow by one token a step. With n members, r steps per second now and k
    `growth.token_s`, t tokens of each take t / r + k · n · t² / 2 seconds; the inverse is
    2 x r / (1 + √(1 + 2 k n x r²)) tokens in x seconds.

    Args:
        events: The simulated clock.
        step_s: Seconds of a decode step over the batch; called once for each of 1..slots.
        slots: Requests that decode together.
        started: Called with a request's argument when it has its slot; may join others.
        done: Called with a request's argument when its tokens are out; may join others.
        growth: Of steps, with contexts.

    Raises:
        ValueError: no slot, a step that takes no time or for ever, or one that takes less than its contexts do.
    """

    def __init__(
        self,
        events: Events,
        step_s: Callable[[int], float],
        slots: int,
        started: Callable[[Any], None],
        done: Callable[[Any], None],
        growth: StepGrowth = StepGrowth(),
    ) -> None:
        if slots < 1:
            raise ValueError(f"A decode instance has at least one slot, not {slots}.")
        self._events = events
        self._slots = slots
        self._started = started
        self._done = done
        self._context_s = growth.token_s
        self._bare_s = [math.inf]  # a step over the batch, without any context
        for batch in range(1, slots + 1):
            seconds = float(step_s(batch))
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(
                    f"A decode step takes more than 0 s and not for ever: {seconds:g} s at {batch}."
                )
            contexts_s = growth.token_s * batch * growth.measured_tokens
            if not seconds > contexts_s:
                raise ValueError(
                    f"A decode step of {batch} takes {seconds:g} s; contexts of {growth.measured_tokens:g} tokens "
                    f"can't take {contexts_s:g} s of it."
                )
            self._bare_s.append(seconds - contexts_s)
        self._chunk_s = 0.0
        self.batch = 0
        self._tokens = 0.0  # what a member from the start would have at _at_s
        self._contexts = 0.0  # tokens of all members at _at_s
        self._at_s = events.now_s
        self._busy_slot_s = 0.0
        # Heap of _tokens at its end, number, its context less _tokens, which stays as it is, and argument.
        self._members: list[tuple[float, int, float, Any]] = []
        self._queue: deque[tuple[int, float, float, Any]] = deque()
        self._number = 0
        self._armed_s = math.inf
        # Bound once: every event would make another.
        self._when_due: Callback = self._wake

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    @property
    def busy_slot_s(self) -> float:
        """Slot-seconds used so far: the batch, integrated over time."""
        return self._busy_slot_s + self.batch * (self._events.now_s - self._at_s)

    def join(self, tokens: float, argument: Any = None, context: float = 0.0) -> None:
        """Give a request of so many tokens, behind a context, a slot now, or after those who wait."""
        self._number = number = self._number + 1
        if self.batch >= self._slots or self._queue:
            self._queue.append((number, tokens, context, argument))
        else:
            self._enter(number, tokens, context, argument)

    def lengthen(self, chunk_s: float) -> None:
        """Every step takes so much longer from now on, for what else is computed in it. What is done stays done."""
        self._advance()
        self._chunk_s = chunk_s
        self._arm()

    def drop_all(self) -> list[tuple[Any, float]]:
        """Take out all requests, because the instance is gone; none is called back.

        Returns:
            Their arguments in their order, each with the tokens that it still lacks.
        """
        self._advance()
        members = sorted(self._members, key=lambda member: member[1])
        here = [(argument, max(end - self._tokens, 0.0)) for end, _, _, argument in members]
        here += [(argument, tokens) for _, tokens, _, argument in self._queue]
        self._members.clear()
        self._queue.clear()
        self.batch = 0
        self._armed_s = math.inf
        return here

    def _enter(self, number: int, tokens: float, context: float, argument: Any) -> None:
        if tokens <= 0:
            self._started(argument)
            self._done(argument)
            return
        self._advance()
        self.batch += 1
        self._contexts += context
        members = self._members
        heappush(members, (self._tokens + tokens, number, context - self._tokens, argument))
        # Others only get slower, and are looked at when their event comes; a new first one comes before them.
        if members[0][1] == number:
            self._arm_for(tokens)
        self._started(argument)

    def _wake(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return  # another event was put before this one
        self._armed_s = math.inf
        self._advance()
        members = self._members
        reached = self._tokens + (_SLACK_S + armed_s * _SLACK) * self._tokens_per_s()
        finished = []
        while members and members[0][0] <= reached:
            _, _, origin, argument = heappop(members)
            self._contexts -= origin + self._tokens
            self.batch -= 1
            finished.append(argument)
        for argument in finished:
            self._done(argument)
        queue = self._queue
        while finished and queue and self.batch < self._slots:
            self._enter(*queue.popleft())
        self._arm()

    def _arm(self) -> None:
        """Put an event for the first that will have all its tokens."""
        if self._members:
            self._arm_for(max(self._members[0][0] - self._tokens, 0.0))

    def _arm_for(self, tokens: float) -> None:
        grown_s = self._context_s * self.batch * tokens * tokens / 2
        end_s = self._at_s + (tokens / self._tokens_per_s() + grown_s)
        if end_s < self._armed_s:
            self._armed_s = end_s
            self._events.at(end_s, self._when_due, end_s)

    def _tokens_per_s(self) -> float:
        """Of each member, as of `_at_s`."""
        return 1 / (self._bare_s[self.batch] + self._context_s * self._contexts + self._chunk_s)

    def _advance(self) -> None:
        now_s, batch = self._events.now_s, self.batch
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if not batch:
            # Nothing is left of what was rounded.
            self._tokens = self._contexts = 0.0
            return
        self._busy_slot_s += batch * passed_s
        rate = self._tokens_per_s()
        tokens = passed_s * rate
        if self._context_s:
            tokens *= 2 / (1 + math.sqrt(1 + 2 * self._context_s * batch * tokens * rate))
        self._tokens += tokens
        self._contexts += batch * tokens
