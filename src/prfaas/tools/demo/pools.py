"""The demo's view of the pools: emptied at its beginning, waited for in between, and asked what they gave."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.serving.pool.client import PoolClient

_SETTLED_S = 1.0
_POLL_S = 0.1


class PoolWatch:
    """A tool's session with each pool of a deployment."""

    def __init__(self, clients: list[PoolClient]) -> None:
        self._clients = clients

    def empty(self) -> None:
        """Drop what earlier runs left."""
        for client in self._clients:
            client.clear()

    def hit_tokens(self) -> int:
        """Tokens that engines have got from the pools so far."""
        return sum(
            int(stats.get("hit_memory_tokens", 0)) + int(stats.get("hit_ssd_tokens", 0))
            for stats in self._stats()
        )

    def settle(self, timeout_s: float) -> None:
        """Wait until no page has been added for a second: engines store in the background."""
        deadline = time.monotonic() + timeout_s
        before, since = self._stored_pages(), time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < _SETTLED_S:
            time.sleep(_POLL_S)
            now = self._stored_pages()
            if now != before:
                before, since = now, time.monotonic()

    def _stored_pages(self) -> int:
        return sum(int(stats.get("stored_pages", 0)) for stats in self._stats())

    def _stats(self) -> list[dict[str, Any]]:
        return [client.stats() or {} for client in self._clients]


@contextmanager
def watched_pools(deployment: Deployment) -> Iterator[PoolWatch]:
    """The pools of a deployment, which run."""
    clients = [
        PoolClient(deployment.pool_socket(node), "tool", None, timeout_s=deployment.pool.timeout_s)
        for node in deployment.pools
    ]
    try:
        for client in clients:
            client.connect()
        yield PoolWatch(clients)
    finally:
        for client in clients:
            client.close()
