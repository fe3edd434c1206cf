"""Simulated time, and connections that carry frames in order: with a rate, a delay, stalls, cuts and damage."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

USER_TIMEOUT_S = 3.0


class Events:
    """What is to happen, by its time; at the same time in the order in which it was planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.happened = 0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (max(when_s, self.now_s), next(self._numbers), happen))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, happen)

    def step(self, until_s: float) -> bool:
        """Let the next event happen; False: there is none before `until_s`."""
        if not self._planned or self._planned[0][0] > until_s:
            self.now_s = until_s
            return False
        self.now_s, _, happen = heapq.heappop(self._planned)
        self.happened += 1
        happen()
        return True


class Process:
    """A machine's program, which may be stopped for a while: what is due meanwhile happens when it goes on."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.stopped_until_s = 0.0

    def when_running(self, happen: Callable[[], None]) -> None:
        if self.events.now_s < self.stopped_until_s:
            self.events.at(self.stopped_until_s, lambda: self.when_running(happen))
        else:
            happen()


@dataclass(eq=False)
class Direction:
    """One way of a connection: messages arrive whole, in order, at a rate and after a delay."""

    events: Events
    bytes_per_s: float
    delay_s: float
    sent_bytes: int = 0
    arrived_bytes: int = 0
    frozen_until_s: float = 0.0
    is_over: bool = False
    _taken_at_s: float = 0.0
    _under_way: deque[tuple[float, int, Callable[[], None]]] = field(default_factory=deque)
    _is_planned: bool = False

    def send(self, nbytes: int, arrive: Callable[[], None]) -> float:
        """Returns when the sending machine's kernel has taken it all; a stall may make it later."""
        self.sent_bytes += nbytes
        if self.is_over:
            return self.events.now_s
        self._taken_at_s = max(self._taken_at_s, self.events.now_s) + nbytes / self.bytes_per_s
        self._under_way.append((self._taken_at_s + self.delay_s, nbytes, arrive))
        self._plan()
        return self._taken_at_s

    @property
    def in_flight(self) -> int:
        """1 while something is not acknowledged."""
        return int(self.sent_bytes > self.arrived_bytes)

    def end(self) -> None:
        """What is under way is lost."""
        self.is_over = True
        self._under_way.clear()

    def _plan(self) -> None:
        if self._under_way and not self._is_planned:
            self._is_planned = True
            self.events.at(max(self._under_way[0][0], self.frozen_until_s), self._arrive)

    def _arrive(self) -> None:
        self._is_planned = False
        while self._under_way and max(self._under_way[0][0], self.frozen_until_s) <= self.events.now_s:
            _, nbytes, arrive = self._under_way.popleft()
            self.arrived_bytes += nbytes
            arrive()
        self._plan()


class Connection:
    """A TCP connection. Each end's callback is called once, when that end learns of the end."""

    def __init__(self, events: Events, bytes_per_s: float, delay_s: float) -> None:
        self._events = events
        self.to_server = Direction(events, bytes_per_s, delay_s)
        self.to_client = Direction(events, bytes_per_s, delay_s)
        self.client_ended: Callable[[], None] = lambda: None
        self.server_ended: Callable[[], None] = lambda: None
        self._open = {"client", "server"}

    @property
    def is_open(self) -> bool:
        """Neither end has learned of an end."""
        return len(self._open) == 2

    def freeze(self, seconds: float) -> None:
        """Nothing arrives for a while. An end learns of it if what it has sent stays unacknowledged for long."""
        for way in (self.to_server, self.to_client):
            way.frozen_until_s = max(way.frozen_until_s, self._events.now_s + seconds)
        self._await_acknowledgements({"client": 0, "server": 0})

    def _await_acknowledgements(self, looks: dict[str, int]) -> None:
        """As TCP_USER_TIMEOUT does."""
        if self._events.now_s >= self.to_server.frozen_until_s or not self._open:
            return
        for side, way in (("client", self.to_server), ("server", self.to_client)):
            looks[side] = looks[side] + 1 if way.in_flight else 0
            if looks[side] > USER_TIMEOUT_S:
                self._end(side)
        self._events.after(1.0, lambda: self._await_acknowledgements(looks))

    def shut(self, *, by_client: bool) -> None:
        """One end closes: what it has sent still arrives, then the other learns of it, if the path lives."""
        (self.to_client if by_client else self.to_server).end()
        way, other = (self.to_server, "server") if by_client else (self.to_client, "client")
        way.send(0, lambda: self._end(other))
        self._end("client" if by_client else "server")

    def reset(self) -> None:
        """Both ends learn at once that it is lost, with what was under way."""
        self.to_server.end()
        self.to_client.end()
        self._end("client")
        self._end("server")

    def _end(self, side: str) -> None:
        if side in self._open:
            self._open.remove(side)
            self._events.after(0.0, self.client_ended if side == "client" else self.server_ended)
