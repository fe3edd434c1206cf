"""KV events of all engines and pools: received and decoded in one thread, applied in the event loop in small slices.

The sockets to one engine's KV events, and what comes over them. Belongs to the thread of the event_feed.
"""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress

import zmq

from prfaas.core.deployment import Deployment, EventsEndpoint, Instance, PoolNode
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
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part

logger = logging.getLogger(__name__)

_AT_ONCE = 128
_QUEUE_BATCHES = 10_000
# A batch is one step of an engine: four million tokens, or half a million blocks that went.
_LARGEST_BYTES = 16 << 20
_END = (-1).to_bytes(8, "big", signed=True)


class EventSource:
    """The sockets to one engine's KV events. Belongs to the thread of the feed.

    A SUB socket receives the live events. Each replay has a DEALER socket of its own, so that a late answer to an old
    question can't be taken for one to a new question.
    """

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
        self._connection = self._live.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        poller.register(self._connection, zmq.POLLIN)
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


SLICE_S = 0.001
_POLL_MS = 100
# With so many batches waiting for the loop, sockets are left alone: their queues fill, and gaps are replayed.
_MOST_WAITING = 2000


class EventFeed(Part):
    """Calls `apply(instance, batch)` and `drop(instance, reason)` in the event loop, in each engine's order.

    After every millisecond of applying, other tasks of the loop run; one batch (an engine's step) is not divided.
    """

    def __init__(
        self,
        endpoints: dict[str, EventsEndpoint],
        *,
        apply: Callable[[str, EventBatch], None],
        drop: Callable[[str, str], None],
        endpoint_of: Callable[[Instance], EventsEndpoint | None] = lambda _: None,
    ) -> None:
        """`endpoints` by the name of the instance or pool: kept up to date here, by `endpoint_of` who joins."""
        self._endpoints = endpoints
        self._endpoint_of = endpoint_of
        self._apply = apply
        self._drop = drop
        self._sources: dict[str, EventSource] = {}
        self._resets: deque[tuple[str, str]] = deque()
        self._waiting: deque[tuple[str, Apply | Drop]] = deque()
        self._stop = threading.Event()
        self._thread_errors = 0
        self.refused_batches = 0

    def join(self, instance: Instance) -> None:
        """Subscribe to an instance, where it can be."""
        endpoint = self._endpoint_of(instance)
        if endpoint is not None:
            self._endpoints[instance.name] = endpoint

    def leave(self, name: str) -> None:
        """Subscribe to it no longer."""
        self._endpoints.pop(name, None)

    def lost(self, name: str, reason: str = "died") -> None:
        """An engine has lost its cache: forget all at once, and ask it what it holds."""
        self._drop(name, reason)
        self.reset(name, reason)

    def reset(self, name: str, reason: str) -> None:
        """An engine lost its cache: drop what is known of it, and ask it what it holds."""
        if name in self._endpoints:
            self._resets.append((name, reason))

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        self._stop.clear()
        thread = threading.Thread(
            target=self._receive,
            args=(lambda: loop.call_soon_threadsafe(wake.set),),
            name="prfaas-kv-events",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                await wake.wait()
                wake.clear()
                while self._waiting:
                    self._apply_slice()
                    await asyncio.sleep(0)
        finally:
            self._stop.set()
            await asyncio.shield(loop.run_in_executor(None, thread.join))

    def state(self, _now_s: float) -> Json:
        """Waiting batches, and failures, of all sources."""
        return {
            "index": {
                "pending_batches": self.waiting_batches,
                "refused_batches": self.refused_batches,
                "feed_errors": self._thread_errors,
            }
        }

    def state_of(self, name: str, _now_s: float) -> Json:
        """The last sequence applied, and what was missed, replayed, given up and started again."""
        source = self._sources.get(name)
        if source is None:
            return {"events": None}
        subscription = source.subscription
        return {
            "events": {
                "sequence": subscription.sequence,
                "replaying": subscription.is_replaying,
                "gaps": subscription.gaps,
                "replays": subscription.replays,
                "resyncs": subscription.resyncs,
                "restarts": subscription.restarts,
                "malformed": source.malformed,
            }
        }

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Write the gauges of subscriptions."""
        for name, source in list(self._sources.items()):
            metrics.feed_gaps.labels(name).set(source.subscription.gaps)
            metrics.feed_replays.labels(name).set(source.subscription.replays)
            metrics.feed_resyncs.labels(name).set(source.subscription.resyncs)

    @property
    def waiting_batches(self) -> int:
        """Received and not applied yet."""
        return len(self._waiting)

    @property
    def thread_errors(self) -> int:
        """Unexpected failures to receive so far; every source was started again after each."""
        return self._thread_errors

    def _apply_slice(self) -> None:
        end_s = time.perf_counter() + SLICE_S
        while self._waiting and time.perf_counter() < end_s:
            name, step = self._waiting.popleft()
            if name not in self._endpoints:
                continue
            if isinstance(step, Drop):
                self._drop(name, step.reason)
            else:
                self._apply_batch(name, step.batch)

    def _apply_batch(self, name: str, batch: EventBatch) -> None:
        try:
            self._apply(name, batch)
        except Exception:
            # A mistake of one engine must not stop the others or the gateway.
            self.refused_batches += 1
            logger.exception("%s publishes events that can't be applied", name)
            self._drop(name, "unreadable")

    def _receive(self, wake: Callable[[], object]) -> None:
        while not self._stop.is_set():
            try:
                self._receive_with(zmq.Context(), wake)
            except Exception:
                self._thread_errors += 1
                logger.exception("KV events can't be received; starting again")
                self._stop.wait(1.0)

    def _receive_with(self, context: "zmq.Context[zmq.Socket[bytes]]", wake: Callable[[], object]) -> None:
        poller = zmq.Poller()

        def on_step(name: str, step: Apply | Drop) -> None:
            self._waiting.append((name, step))

        try:
            while not self._stop.is_set():
                # A copy: the event loop may change it meanwhile.
                self._follow(
                    dict(self._endpoints), lambda name, at: EventSource(name, at, context, poller, on_step)
                )
                if len(self._waiting) > _MOST_WAITING:
                    self._stop.wait(0.01)
                    continue
                if not self._sources:
                    # A poller without sockets returns at once, whatever the time it is given.
                    self._stop.wait(_POLL_MS / 1000)
                    continue
                ready = dict(poller.poll(_POLL_MS))
                now_s = time.monotonic()
                while self._resets:
                    name, reason = self._resets.popleft()
                    if name in self._sources:
                        self._sources[name].reset(now_s, reason)
                for source in self._sources.values():
                    source.read(ready, now_s)
                if self._waiting:
                    # The loop may be closed already.
                    with suppress(RuntimeError):
                        wake()
        finally:
            for source in self._sources.values():
                source.close()
            self._sources = {}
            context.destroy(linger=0)

    def _follow(
        self,
        endpoints: Mapping[str, EventsEndpoint],
        subscribed: Callable[[str, EventsEndpoint], EventSource],
    ) -> None:
        """Subscribe to who is new among `endpoints`, and leave who is not among them any more."""
        if endpoints.keys() == self._sources.keys():
            return
        sources = dict(self._sources)
        for name in sources.keys() - endpoints.keys():
            sources.pop(name).close()
        for name in endpoints.keys() - sources.keys():
            sources[name] = subscribed(name, endpoints[name])
            sources[name].start(time.monotonic())
        self._sources = sources


def events_endpoints(
    deployment: Deployment, holders: Sequence[Instance | PoolNode]
) -> dict[str, EventsEndpoint]:
    """Endpoints at which these publish their events, by name; without those that nobody could subscribe to."""
    return {
        holder.name: endpoint
        for holder in holders
        if (endpoint := deployment.events_endpoint(holder)) is not None
    }
