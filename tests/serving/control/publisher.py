"""An engine's KV event publisher and replay endpoint, in this process, in vLLM's format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from prfaas.core.deployment import EventsEndpoint

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Binds at `endpoint`. Replays are answered by `serve`, when a test wants it."""

    def __init__(self, endpoint: EventsEndpoint, *, process: int = 0) -> None:
        self._context = zmq.Context()
        # A test that fails must not wait for what nobody will receive.
        self._context.linger = 0
        self._publish = self._context.socket(zmq.PUB)
        Path(endpoint.publish.removeprefix("ipc://")).parent.mkdir(0o700, parents=True, exist_ok=True)
        self._publish.bind(endpoint.publish)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(endpoint.replay)
        self._process = process
        self.kept: list[tuple[int, bytes]] = []
        self._next = 0

    def step(self, *events: dict[str, Any], lost: bool = False) -> None:
        """One engine step; `lost`: subscribers never get it, but it can be replayed."""
        payload = msgspec.msgpack.encode([1000.0 * self._process + self._next, list(events), 0])
        if not lost:
            self._publish.send_multipart([b"kv", self._next.to_bytes(8, "big"), payload])
        self.kept.append((self._next, payload))
        self._next += 1

    def serve(self) -> int:
        """Answer the replay requests that have come; returns how many."""
        served = 0
        while self._replay.poll(0):
            client, _, start = self._replay.recv_multipart()
            for sequence, payload in self.kept:
                if sequence >= int.from_bytes(start, "big"):
                    self._replay.send_multipart([client, b"", b"kv", sequence.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, b"", b"", END, b""])
            served += 1
        return served

    def close(self) -> None:
        self._context.destroy(linger=0)


def stored(
    token_ids: Sequence[int], hashes: Sequence[int], *, parent: int | None = None, block: int = 16
) -> dict[str, Any]:
    """Blocks of a full-attention group, as vLLM 0.32 tells them."""
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "token_ids": list(token_ids),
        "block_size": block,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event if parent is None else event | {"parent_block_hash": parent}
