"""What one engine or pool holds, told to those that follow it: digested events, numbered, the last ones kept."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prfaas.core.prefix.digests import EventDigests, encode_events
from prfaas.core.prefix.events import Event
from prfaas.serving.transport.protocol.requests import (
    MAX_FOLLOWED_BATCHES,
    FollowedEvents,
    FollowOrder,
    PeerRequest,
)

KEPT_BATCHES = 10_000
KEPT_BYTES = 32 << 20
_ANSWER_BYTES = 1 << 20
_MOST_WAITING = 256
_MOST_SESSIONS = 16
# So that what replaces lost batches has room for numbers before those that come next.
_FIRST = 1 << 40


class EventLog:
    """Answers FOLLOW requests. All of it belongs to one thread.

    A session lasts as long as what was told holds. Who asks for another one, or for batches that are no longer kept,
    gets all that are: then what was told before is void.
    """

    def __init__(self, seed: int, new_session: Callable[[], str]) -> None:
        """`seed`: of the deployment's block hashes. `new_session`: a random name that was never given before."""
        self._seed = seed
        self._new_session = new_session
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._most_batches, self._most_bytes = KEPT_BATCHES, KEPT_BYTES
        self._waiting: dict[Callable[[bytes], None], PeerRequest] = {}
        self.batches = self.answers = 0
        self.begin("start")

    def begin(self, reason: str) -> None:
        """A new session: what was told before is void."""
        self._session, self._reason = self._new_session(), reason
        # Each with the first number that goes on in it: a snapshot begins a session, and ends none.
        self._sessions = {self._session: _FIRST}
        self._digests = EventDigests(self._seed)
        self._first = _FIRST
        self._kept.clear()
        self._kept_bytes = 0
        self._most_batches, self._most_bytes = KEPT_BATCHES, KEPT_BYTES
        self._answer_waiting()

    def add(self, events: Sequence[Event]) -> None:
        """The next batch."""
        payload = encode_events(self._digests.of(events))
        self.batches += 1
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > 1 and (
            self._kept_bytes > self._most_bytes or len(self._kept) > self._most_batches
        ):
            self._kept_bytes -= len(self._kept.popleft())
            self._first += 1
        self._answer_waiting()

    def replace(self, snapshot: Iterable[Sequence[Event]]) -> None:
        """Batches that tell all that is held now, in place of those that are kept."""
        end, digests = self._first + len(self._kept), EventDigests(self._seed)
        self._kept = deque(encode_events(digests.of(events)) for events in snapshot)
        self._first = end - len(self._kept)
        self._kept_bytes = sum(map(len, self._kept))
        self._session, self._reason = self._new_session(), "gap"
        lasting = list(self._sessions)[-_MOST_SESSIONS:]
        self._sessions = dict.fromkeys(lasting, end) | {self._session: self._first}
        # Who follows needs time to take it.
        self._most_batches = max(KEPT_BATCHES, 2 * len(self._kept))
        self._most_bytes = max(KEPT_BYTES, 2 * self._kept_bytes)

    def is_behind(self, order: FollowOrder) -> bool:
        """True if who asks gets all that is kept, and batches before that are not."""
        return self._first > _FIRST and not self._follows(order)

    def _follows(self, order: FollowOrder) -> bool:
        least = max(self._sessions.get(order.session, 1 << 60), self._first)
        return least <= order.first <= self._first + len(self._kept)

    def answer(self, request: PeerRequest) -> None:
        """Tell what comes next, now or as soon as there is something."""
        order = request.order
        assert isinstance(order, FollowOrder)
        if not self._follows(order):
            self._send(request, self._session, 0)
        elif order.first < self._first + len(self._kept):
            self._send(request, order.session, order.first - self._first)
        else:
            if len(self._waiting) >= _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[request.post] = request

    def state(self) -> dict[str, int]:
        """Counters."""
        return {"batches": self.batches, "answers": self.answers}

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self.answer(request)

    def _send(self, request: PeerRequest, session: str, at: int) -> None:
        batches: list[bytes] = []
        left_bytes = _ANSWER_BYTES
        for place in range(at, min(at + MAX_FOLLOWED_BATCHES, len(self._kept))):
            left_bytes -= len(self._kept[place])
            if batches and left_bytes < 0:
                break
            batches.append(self._kept[place])
        self.answers += 1
        request.answer(FollowedEvents(session, self._first + at, batches, self._reason))
