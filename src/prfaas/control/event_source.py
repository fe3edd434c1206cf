"""The sockets to one engine's KV events, and what comes over them. Belongs to the thread of the feed."""

import logging
from collections.abc import Callable, Container, Iterator
from contextlib import suppress

import zmq

from prfaas.cache.events import EventBatch, MalformedEventsError, decode_batch
from prfaas.control.subscription import Apply, Ask, Drop, Step, Subscription
from prfaas.deployment import EventsEndpoint

logger = logging.getLogger(__name__)

_AT_ONCE = 128
_QUEUE_BATCHES = 10_000
_LARGEST_BYTES = 64 << 20
_END = (-1).to_bytes(8, "big", signed=True)


class EventSource:
    """A SUB socket for the live events and a DEALER for each replay, which is closed with its question: a late
    answer to an old one can't be mistaken for an answer to a new one."""

    def __init__(
        self,
        name: str,
        endpoint: EventsEndpoint,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        on_step: Callable[[str, Apply | Drop], None],
    ) -> None:
        self.name = name
        self.subscription = Subscription()
        self.malformed = 0
        self._endpoint = endpoint
        self._context = context
        self._poller = poller
        self._on_step = on_step
        self._dealer: zmq.Socket[bytes] | None = None
        self._live = self._socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._lost = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller.register(self._lost, zmq.POLLIN)
        self._live.connect(endpoint.publish)

    def start(self, now_s: float) -> None:
        self._carry_out(self.subscription.start(now_s))

    def reset(self, now_s: float, reason: str) -> None:
        """The engine lost its cache: whatever it still holds is in what it replays."""
        self._carry_out(self.subscription.restarted(now_s, reason))

    def read(self, ready: "Container[zmq.Socket[bytes]]", now_s: float) -> None:
        """Take what has come to the sockets that are ready, at most some hundred batches."""
        dealer = self._dealer
        if dealer is not None and dealer in ready:
            for frames in _received(dealer):
                self._replayed(frames, now_s)
                if self._dealer is not dealer:
                    break
        for frames in _received(self._live) if self._live in ready else ():
            if len(frames) == 3 and len(frames[1]) == 8 and (batch := self._decoded(frames[2])) is not None:
                sequence = int.from_bytes(frames[1], "big")
                self._carry_out(self.subscription.live(sequence, batch, now_s))
        if self._lost in ready and list(_received(self._lost)):
            # After what it had sent. Another process may listen there next, whose numbers go on where the old ended.
            self._carry_out(self.subscription.restarted(now_s, "disconnected"))
        self._carry_out(self.subscription.tick(now_s))
        if not self.subscription.is_replaying:
            self._close_dealer()

    def close(self) -> None:
        self._close_dealer()
        self._poller.unregister(self._lost)
        self._live.disable_monitor()
        self._poller.unregister(self._live)
        self._live.close(linger=0)

    def _replayed(self, frames: list[bytes], now_s: float) -> None:
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        if frames[-2] == _END:
            self._carry_out(self.subscription.replay_ended(now_s))
        elif (batch := self._decoded(frames[-1])) is not None:
            self._carry_out(self.subscription.replayed(int.from_bytes(frames[-2], "big"), batch))

    def _decoded(self, payload: bytes) -> EventBatch | None:
        """None for what can't be read: that batch is then missing like one that was lost."""
        try:
            return decode_batch(payload)
        except MalformedEventsError as error:
            self.malformed += 1
            if self.malformed == 1:
                logger.warning("%s publishes events that can't be read: %s", self.name, error)
            return None

    def _carry_out(self, steps: Iterator[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                self._ask(step.sequence)
            else:
                self._on_step(self.name, step)

    def _ask(self, sequence: int) -> None:
        self._close_dealer()
        self._dealer = self._socket(zmq.DEALER)
        self._dealer.connect(self._endpoint.replay)
        self._dealer.send_multipart([b"", sequence.to_bytes(8, "big")], zmq.NOBLOCK)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._poller.unregister(self._dealer)
            self._dealer.close(linger=0)
            self._dealer = None


def _received(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    with suppress(zmq.Again):
        for _ in range(_AT_ONCE):
            yield socket.recv_multipart(zmq.NOBLOCK)
