"""One decode instance: all requests in its batch get one token per step, whose time may grow with their contexts."""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from prfaas.lab.simulator.events import Callback, Events

# A request this close to its end has reached it: clocks are floating-point numbers.
_SLACK_S = 1e-9
_SLACK = 1e-15


class TokenClock:
    """Requests in `slots` slots, first come, first served, each at 1 token per `step_s(batch)` seconds.

    Steps are a fluid: a token of a batch that changes halfway is half of the one step and half of the other. All
    members move at the same rate, so one number, the tokens that a member from the start would have, gives the
    progress of all, and only joining and leaving are events.

    Args:
        events: The simulated clock.
        step_s: Seconds of a decode step over the batch; called once for each of 1..slots.
        slots: Requests that decode together.
        started: Called with a request's argument when it has its slot; may join others.
        done: Called with a request's argument when its tokens are out; may join others.

    Raises:
        ValueError: no slot, or a step that takes no time or for ever.
    """

    def __init__(
        self,
        events: Events,
        step_s: Callable[[int], float],
        slots: int,
        started: Callable[[Any], None],
        done: Callable[[Any], None],
    ) -> None:
        if slots < 1:
            raise ValueError(f"A decode instance has at least one slot, not {slots}.")
        self._events = events
        self._slots = slots
        self._started = started
        self._done = done
        self._steps_s = [math.inf]  # over the batch
        for batch in range(1, slots + 1):
            seconds = float(step_s(batch))
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(
                    f"A decode step takes more than 0 s and not for ever: {seconds:g} s at {batch}."
                )
            self._steps_s.append(seconds)
        self._chunk_s = 0.0
        self.batch = 0
        self._tokens = 0.0  # what a member from the start would have at _at_s
        self._at_s = events.now_s
        self._busy_slot_s = 0.0
        self._members: list[tuple[float, int, Any]] = []  # heap of (_tokens at its end, number, argument)
        self._queue: deque[tuple[int, float, Any]] = deque()
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

    def join(self, tokens: float, argument: Any = None) -> None:
        """Give a request of so many tokens a slot now, or after those who wait."""
        self._number = number = self._number + 1
        if self.batch >= self._slots or self._queue:
            self._queue.append((number, tokens, argument))
        else:
            self._enter(number, tokens, argument)

    def lengthen(self, chunk_s: float) -> None:
        """Every step takes so much longer from now on, for what else is computed in it. What is done stays done."""
        self._advance()
        self._chunk_s = chunk_s
        if self.batch:
            self._arm()

    def drop_all(self) -> list[tuple[Any, float]]:
        """Take out all requests, because the instance is gone; none is called back.

        Returns:
            Their arguments in their order, each with the tokens that it still lacks.
        """
        self._advance()
        members = sorted(self._members, key=lambda member: member[1])
        here = [(argument, max(end - self._tokens, 0.0)) for end, _, argument in members]
        here += [(argument, tokens) for _, tokens, argument in self._queue]
        self._members.clear()
        self._queue.clear()
        self.batch = 0
        self._tokens = 0.0
        self._armed_s = math.inf
        return here

    def _enter(self, number: int, tokens: float, argument: Any) -> None:
        if tokens <= 0:
            self._started(argument)
            self._done(argument)
            return
        now_s = self._events.now_s
        batch = self.batch
        if batch:
            passed_s = now_s - self._at_s
            self._busy_slot_s += batch * passed_s
            self._tokens += passed_s * self._tokens_per_s(batch)
        else:
            self._tokens = 0.0
        self._at_s = now_s
        self.batch = batch = batch + 1
        members = self._members
        end = self._tokens + tokens
        heappush(members, (end, number, argument))
        # Others only get slower, and are looked at when their event comes; a new first one comes before them.
        if members[0][1] == number:
            end_s = now_s + tokens / self._tokens_per_s(batch)
            if end_s < self._armed_s:
                self._armed_s = end_s
                self._events.at(end_s, self._when_due, end_s)
        self._started(argument)

    def _wake(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return  # another event was put before this one
        self._armed_s = math.inf
        self._advance()
        members = self._members
        reached = self._tokens + (_SLACK_S + armed_s * _SLACK) * self._tokens_per_s(self.batch)
        finished = []
        while members and members[0][0] <= reached:
            _, number, argument = heappop(members)
            self._leave(number)
            finished.append(argument)
        if finished:
            if not self.batch:
                self._tokens = 0.0
            for argument in finished:
                self._done(argument)
            if self._queue:
                self._admit()
        if self.batch:
            self._arm()

    def _leave(self, _number: int) -> None:
        """A member has all its tokens."""
        self.batch -= 1

    def _admit(self) -> None:
        queue = self._queue
        while queue and self.batch < self._slots:
            self._enter(*queue.popleft())

    def _arm(self) -> None:
        members = self._members
        if members:
            end_s = self._at_s + (members[0][0] - self._tokens) / self._tokens_per_s(self.batch)
            if end_s < self._armed_s:
                self._armed_s = end_s = max(end_s, self._at_s)
                self._events.at(end_s, self._when_due, end_s)

    def _tokens_per_s(self, batch: int) -> float:
        return 1 / (self._steps_s[batch] + self._chunk_s)

    def _advance(self) -> None:
        now_s = self._events.now_s
        passed_s = now_s - self._at_s
        self._busy_slot_s += self.batch * passed_s
        self._tokens += passed_s * self._tokens_per_s(self.batch)
        self._at_s = now_s


class ContextClock(TokenClock):
    """A `TokenClock` with a step of `step_s(batch) + context_s · (Σ contexts − batch · measured_tokens)` seconds.

    A context is what a request has in the KV cache: its prompt, and the tokens of its answer so far. While nobody joins
    or leaves, contexts grow by one token a step. With n members, s the seconds of a step now and k `context_s`,
    t tokens of each take t · s + k · n · t² / 2 seconds; the inverse is 2 x / (s + √(s² + 2 k n x)) tokens in
    x seconds. So an event is still needed only where somebody joins or leaves.

    Args:
        events: The simulated clock.
        step_s: Seconds of a decode step over the batch, with contexts of `measured_tokens` each.
        slots: Requests that decode together.
        started: Called with a request's argument when it has its slot; may join others.
        done: Called with a request's argument when its tokens are out; may join others.
        context_of: Tokens of a request's context when it joins, from its argument.
        context_s: Seconds that a step takes longer per token of context in the batch.
        measured_tokens: The context per request at which `step_s` was measured.

    Raises:
        ValueError: as `TokenClock`; or contexts of `measured_tokens` would take longer than a whole step.
    """

    def __init__(
        self,
        events: Events,
        step_s: Callable[[int], float],
        slots: int,
        started: Callable[[Any], None],
        done: Callable[[Any], None],
        *,
        context_of: Callable[[Any], float],
        context_s: float,
        measured_tokens: float,
    ) -> None:
        super().__init__(events, step_s, slots, started, done)
        self._context_of = context_of
        self._context_s = context_s
        self._bare_s = [0.0]  # seconds of a step over the batch without any context
        for batch in range(1, slots + 1):
            seconds = step_s(batch) - context_s * batch * measured_tokens
            if not seconds > 0:
                raise ValueError(
                    f"A decode step of {batch} takes {step_s(batch):g} s; contexts of {measured_tokens:g} tokens "
                    f"can't take {context_s * batch * measured_tokens:g} s of it."
                )
            self._bare_s.append(seconds)
        self._contexts = 0.0  # tokens of all members, as of _at_s
        self._origins: dict[int, float] = {}  # by number: a context less _tokens, which stays as it is

    def drop_all(self) -> list[tuple[Any, float]]:
        """Take out all requests, because the instance is gone; none is called back."""
        dropped = super().drop_all()
        self._origins.clear()
        self._contexts = 0.0
        return dropped

    def _enter(self, number: int, tokens: float, argument: Any) -> None:
        if tokens <= 0:
            self._started(argument)
            self._done(argument)
            return
        if self.batch:
            self._advance()
        else:
            self._at_s = self._events.now_s
            self._tokens = self._contexts = 0.0
        self.batch += 1
        context = self._context_of(argument)
        self._contexts += context
        self._origins[number] = context - self._tokens
        heappush(self._members, (self._tokens + tokens, number, argument))
        self._arm()
        self._started(argument)

    def _leave(self, number: int) -> None:
        self._contexts = max(self._contexts - self._origins.pop(number) - self._tokens, 0.0)
        self.batch -= 1

    def _tokens_per_s(self, _batch: int) -> float:
        return 1 / self._now_s

    def _arm(self) -> None:
        members = self._members
        if members:
            left = max(members[0][0] - self._tokens, 0.0)
            end_s = self._at_s + left * (self._now_s + self._context_s * self.batch * left / 2)
            if end_s < self._armed_s:
                self._armed_s = end_s
                self._events.at(end_s, self._when_due, end_s)

    def _advance(self) -> None:
        now_s, batch = self._events.now_s, self.batch
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if not batch:
            return
        self._busy_slot_s += batch * passed_s
        step_s = self._now_s
        grows = 2 * self._context_s * batch * passed_s
        tokens = 2 * passed_s / (step_s + math.sqrt(step_s * step_s + grows))
        self._tokens += tokens
        self._contexts += batch * tokens

    @property
    def _now_s(self) -> float:
        """Seconds of a step of the batch as of `_at_s`."""
        return self._bare_s[self.batch] + self._context_s * self._contexts + self._chunk_s
