"""An engine's KV events on their way out of its machine: received, digested, and told to those that follow it."""

import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from prfaas.core.deployment import EventsEndpoint
from prfaas.core.prefix.events import (
    Apply,
    Ask,
    Drop,
    EventBatch,
    MalformedEventsError,
    Step,
    Subscription,
    decode_batch,
)
from prfaas.serving.transport.protocol.event_log import EventLog
from prfaas.serving.transport.protocol.requests import FollowOrder, PeerRequest

logger = logging.getLogger(__name__)

_AT_ONCE = 128
_QUEUE_BATCHES = 10_000
# A batch is one step of an engine: four million tokens, or half a million blocks that went.
_LARGEST_BYTES = 16 << 20
_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 100


class EventSource:
    """The sockets to an engine's KV events. Belongs to the thread of the relay.

    A SUB socket receives the live events. Each replay has a DEALER socket of its own, so that a late answer to an old
    question can't be taken for one to a new question.
    """

    def __init__(
        self,
        name: str,
        endpoint: EventsEndpoint,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        on_step: Callable[[Apply | Drop], None],
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
        self._connection = self._live.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        poller.register(self._connection, zmq.POLLIN)
        self._live.connect(endpoint.publish)

    def start(self, now_s: float) -> None:
        self._carry_out(self.subscription.start(now_s))

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
        for frames in _received(self._connection) if self._connection in ready else ():
            if int.from_bytes(frames[0][:2], sys.byteorder) == zmq.EVENT_DISCONNECTED:
                # Only now, after all that it had sent. The numbers of the next process may go on where the old ended.
                self._carry_out(self.subscription.restarted(now_s, "disconnected"))
            elif self.subscription.sequence is None:
                # What it told before it was heard is not told again by itself, and earlier questions were too early.
                self._carry_out(self.subscription.start(now_s))
        self._carry_out(self.subscription.tick(now_s))
        if not self.subscription.is_replaying:
            self._close_dealer()

    def close(self) -> None:
        self._close_dealer()
        self._poller.unregister(self._connection)
        self._live.disable_monitor()
        self._poller.unregister(self._live)
        self._live.close(linger=0)

    def _replayed(self, frames: list[bytes], now_s: float) -> None:
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        if frames[-2] == _END:
            self._carry_out(self.subscription.replay_ended(now_s))
        elif (batch := self._decoded(frames[-1])) is not None:
            self._carry_out(self.subscription.replayed(int.from_bytes(frames[-2], "big"), batch, now_s))

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
                self._on_step(step)

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


class EventRelay:
    """Follows an engine that publishes on this machine, and answers those that follow it over its KV port.

    One thread receives, digests and answers.
    """

    def __init__(self, name: str, endpoint: EventsEndpoint, seed: int) -> None:
        """`seed`: of the deployment's block hashes."""
        self._name = name
        self._endpoint = endpoint
        self._log = EventLog(seed, partial(secrets.token_hex, 8))
        self._requests: deque[PeerRequest] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"prfaas-events-{name}", daemon=True)
        self._source: EventSource | None = None
        self._errors = 0

    def start(self) -> None:
        """Begin to follow the engine, which need not publish yet."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; who waits is not answered any more. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            if self._thread.ident is not None:
                os.eventfd_write(self._wake, 1)
                self._thread.join()
            os.close(self._wake)

    def take(self, request: PeerRequest) -> None:
        """Answer a FOLLOW, now or when there is more; thread-safe. Others are refused: an engine is no pool."""
        if not isinstance(request.order, FollowOrder):
            request.refuse("refused: there is no pool here")
        elif not self._stop.is_set():
            self._requests.append(request)
            os.eventfd_write(self._wake, 1)

    def state(self) -> dict[str, Any]:
        """Counters, as a part of STATS; in any thread."""
        source = self._source
        if source is None:
            return {}
        subscription = source.subscription
        return self._log.state() | {
            "gaps": subscription.gaps,
            "replays": subscription.replays,
            "malformed": source.malformed,
            "errors": self._errors,
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._relay(zmq.Context())
            except Exception:
                self._errors += 1
                logger.exception("KV events of %s can't be received; starting again", self._name)
                self._log.begin("error")
                self._stop.wait(1.0)

    def _relay(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        source = self._source = EventSource(self._name, self._endpoint, context, poller, self._take_step)
        try:
            source.start(time.monotonic())
            while not self._stop.is_set():
                ready = dict(poller.poll(_POLL_MS))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                source.read(ready, time.monotonic())
                while self._requests:
                    self._log.answer(self._requests.popleft())
        finally:
            source.close()
            context.destroy(linger=0)

    def _take_step(self, step: Apply | Drop) -> None:
        if isinstance(step, Drop):
            self._log.begin(step.reason)
        else:
            self._log.add(step.batch.events)
