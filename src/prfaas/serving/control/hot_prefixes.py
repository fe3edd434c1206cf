"""Which prefixes would be worth copying to another cluster. No bytes move: decisions are logged and counted."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from prfaas.core.scheduling.rebalancing import Copy, Rebalancer
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.prefix_knowledge import MissedPrefix

logger = logging.getLogger(__name__)

_HISTORY = 20


class HotPrefixes:
    """Counts what clusters lack and others hold, and decides what would be worth copying."""

    def __init__(
        self,
        cluster_state: ClusterState,
        *,
        clock: Clock,
        on_copy: Callable[[], None],
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """`on_copy` is called at every copy that is decided."""
        self._cluster_state = cluster_state
        self._clock = clock
        self._on_copy = on_copy
        self._rebalancer = rebalancer or Rebalancer()
        self.decided = 0
        self._recent: deque[tuple[float, Copy]] = deque(maxlen=_HISTORY)

    def note(self, missed: MissedPrefix) -> None:
        """One routed request whose prefix another cluster holds."""
        self._rebalancer.observe(
            missed.key,
            missed.num_tokens - missed.held_tokens,
            self._cluster_state.view.kv.prefix_bytes_to_move(missed.num_tokens, missed.held_tokens),
            missed.cluster,
            missed.held_in,
            self._clock(),
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._rebalancer.period_s)
            self.decide()

    def decide(self) -> None:
        """Decide copies by what is missing where, and by what the links have to spare."""
        now_s, view = self._clock(), self._cluster_state.view
        fresh = [link for link in view.links.values() if now_s - link.seen_s <= view.stale_after_s]
        for copy in self._rebalancer.decide(fresh, now_s):
            self.decided += 1
            self._recent.append((now_s, copy))
            self._on_copy()
            logger.info(
                "worth copying: %d tokens from %s to %s, missed %.1f times",
                copy.tokens,
                copy.source,
                copy.target,
                copy.misses,
            )

    def state(self, now_s: float) -> dict[str, Any]:
        """How many copies were decided, and the last of them."""
        return {
            "decided": self.decided,
            "remembered": len(self._rebalancer),
            "recent": [
                {
                    "age_s": round(now_s - at_s, 3),
                    "source": copy.source,
                    "target": copy.target,
                    "tokens": copy.tokens,
                    "bytes": copy.num_bytes,
                    "misses": round(copy.misses, 2),
                }
                for at_s, copy in self._recent
            ],
        }
