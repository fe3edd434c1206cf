"""KV-cache events, field for field as vLLM 0.32 writes them, and their publisher.

msgpack without the fields that have their defaults, over ZeroMQ, with replay, as vLLM's `ZmqEventPublisher` does.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prfaas.core.deployment import EventsEndpoint


class _EventStruct(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    pass


class BlockStored(_EventStruct):
    """Blocks of one group that can now be reused. `token_ids` covers more than `block_hashes` where only the last
    boundary was kept (linear state, windows)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_EventStruct):
    """Blocks of one group that were evicted: one copy of each hash."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_EventStruct):
    """Nothing is held any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class PublishedBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Changes of the cache by one engine step."""

    ts: float
    """Unix time."""
    events: list[Event]
    data_parallel_rank: int | None = None


logger = logging.getLogger(__name__)

_BUFFER_BATCHES = 10_000
_BUFFER_BYTES = 8 << 20
_TOPIC = b""
_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """PUB at `endpoint.publish`, ROUTER for replay at `endpoint.replay`; of one event loop.

    The replay buffer holds vLLM's 10,000 batches, but at most 8 MiB of them.
    """

    def __init__(self, endpoint: EventsEndpoint) -> None:
        """Raises zmq.ZMQError when an address is taken."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publish: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._replay = zmq.asyncio.Socket(context, zmq.ROUTER)
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_bytes = 0
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._publish.set_hwm(100_000)
            self._publish.bind(endpoint.publish)
            self._replay.bind(endpoint.replay)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self._task = asyncio.create_task(self._answer_replays(), name="synthetic-replay")

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; never blocks (a subscriber too slow for it loses batches and sees the gap)."""
        payload = self._encoder.encode(PublishedBatch(time.time(), list(events), 0))
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._publish.send_multipart((_TOPIC, sequence.to_bytes(8, "big"), payload))
        self._buffer.append((sequence, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > _BUFFER_BATCHES or self._buffer_bytes > _BUFFER_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft()[1])

    async def close(self) -> None:
        """Close both sockets at once; what was not sent is lost, as when a process dies."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._publish.close(linger=0)
        self._replay.close(linger=0)

    async def _answer_replays(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                logger.warning("a replay request has %d frames, not 3", len(frames))
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    await self._replay.send_multipart(
                        (client, b"", _TOPIC, sequence.to_bytes(8, "big"), payload)
                    )
            await self._replay.send_multipart((client, b"", b"", _END, b""))
