"""The events of one engine in their order: what to apply, what to ask for again, when to give up and start anew."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.core.prefix.events import EventBatch, Gap, SequenceGuard

REPLAY_TIMEOUT_S = 2.0
MOST_HELD = 10_000


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch of events."""

    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Drop:
    """What was known of the engine's holdings is not to be believed any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the replay endpoint for all batches from `sequence` on; forget any earlier question."""

    sequence: int


Step = Apply | Drop | Ask


class Subscription:
    """Turns live and replayed batches into steps: between two drops every batch is applied once, in order.

    A gap in the live batches is asked for again; what comes meanwhile is held. A replay without its beginning (the
    engine keeps the last 10,000 batches), or none within 2 s, ends in a drop, unless nothing was missed. A replay
    with a hole in its midst was cut by a full queue and is asked for again from there. `SequenceGuard` tells a new
    process by its lower numbers; where they are not lower, somebody has to call `restarted`: who reads the
    sockets, when the connection was lost, or who else noticed.
    """

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.gaps = self.replays = self.resyncs = self.restarts = 0
        self._guard = SequenceGuard()
        self._held: deque[tuple[int, EventBatch]] = deque()
        self._asked_s: float | None = None
        self._asked_from = 0
        self._hole: int | None = None

    @property
    def is_replaying(self) -> bool:
        return self._asked_s is not None

    def start(self, now_s: float) -> Iterator[Step]:
        """Just connected: what happened before?"""
        yield self._ask(0, now_s)

    def restarted(self, now_s: float, reason: str) -> Iterator[Step]:
        """Somebody else noticed that the engine is a new process, or lost its cache."""
        self._guard = SequenceGuard()
        self.sequence = None
        self._held.clear()
        yield Drop(reason)
        yield self._ask(0, now_s)

    def live(self, sequence: int, batch: EventBatch, now_s: float) -> Iterator[Step]:
        """A batch from the publisher."""
        self._held.append((sequence, batch))
        if not self.is_replaying:
            yield from self._release(now_s, may_ask=True)
        elif len(self._held) > MOST_HELD:
            yield from self._release(now_s, may_ask=False)

    def replayed(self, sequence: int, batch: EventBatch) -> Iterator[Step]:
        """A batch from the replay endpoint."""
        if not self.is_replaying or self._hole is not None:
            return
        offer = self._guard.offer(sequence, batch.at_s)
        if offer == "restart":
            yield self._restart()
            offer = self._guard.offer(sequence, batch.at_s)
        if isinstance(offer, Gap):
            if offer.first > self._asked_from:
                self._hole = offer.first
                return
            yield self._skip_to(sequence)
            offer = self._guard.offer(sequence, batch.at_s)
        if offer == "apply":
            yield self._apply(sequence, batch)

    def replay_ended(self, now_s: float) -> Iterator[Step]:
        """The replay endpoint has told all it had."""
        if not self.is_replaying:
            return
        self.replays += 1
        if self._hole is not None:
            yield self._ask(self._hole, now_s)
        else:
            yield from self._release(now_s, may_ask=True)

    def tick(self, now_s: float) -> Iterator[Step]:
        """Time passes."""
        if self._asked_s is not None and now_s - self._asked_s >= REPLAY_TIMEOUT_S:
            yield from self._release(now_s, may_ask=False)

    def _ask(self, sequence: int, now_s: float) -> Ask:
        self._asked_s, self._asked_from, self._hole = now_s, sequence, None
        return Ask(sequence)

    def _release(self, now_s: float, *, may_ask: bool) -> Iterator[Step]:
        """Go on with what is held. What is missing is asked for, unless that has just been tried in vain."""
        asked_from = self._asked_from if self.is_replaying else None
        self._asked_s = self._hole = None
        while self._held:
            sequence, batch = self._held[0]
            offer = self._guard.offer(sequence, batch.at_s)
            if offer == "restart":
                yield self._restart()
                asked_from = None
                continue
            if isinstance(offer, Gap):
                if may_ask and offer.first != asked_from:
                    self.gaps += 1
                    yield self._ask(offer.first, now_s)
                    return
                yield self._skip_to(sequence)
                continue
            self._held.popleft()
            if offer == "apply":
                yield self._apply(sequence, batch)

    def _restart(self) -> Drop:
        self.restarts += 1
        return Drop("restart")

    def _skip_to(self, sequence: int) -> Drop:
        self.resyncs += 1
        self._guard.skip_to(sequence)
        return Drop("gap")

    def _apply(self, sequence: int, batch: EventBatch) -> Apply:
        self.sequence = sequence
        return Apply(batch)
