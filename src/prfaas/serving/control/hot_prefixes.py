"""Which prefixes would be worth copying to another cluster. Decisions only: they are logged, counted and shown."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from prfaas.core.prefix import PrefixHit, PromptChains
from prfaas.core.scheduling import Decision
from prfaas.core.scheduling.rebalancing import Copy, Rebalancer
from prfaas.serving.control.cluster_state import Clock, ClusterState

logger = logging.getLogger(__name__)

_HISTORY = 20


class HotPrefixes:
    """Notes, per request, what the cluster that computes lacks and another one holds."""

    def __init__(
        self,
        board: ClusterState,
        *,
        clock: Clock,
        on_copy: Callable[[Copy], None],
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """`on_copy` is told of every copy that is decided."""
        self._board = board
        self._clock = clock
        self._on_copy = on_copy
        self._rebalancer = rebalancer or Rebalancer()
        self.decided = 0
        self._recent: deque[tuple[float, Copy]] = deque(maxlen=_HISTORY)

    def observe(self, decision: Decision, chains: PromptChains, held: Mapping[str, PrefixHit]) -> None:
        """One routed request."""
        target = self._board.instance(decision.prefill).cluster
        longest: dict[str, int] = {}
        for name, what in held.items():
            cluster = self._board.instance(name).cluster
            longest[cluster] = max(longest.get(cluster, 0), what.reusable_tokens)
        here = longest.get(target, 0)
        most = max(longest.values(), default=0)
        key = _key(chains, most)
        if most <= here or key is None:
            return
        self._rebalancer.observe(
            key,
            most - here,
            self._board.view.kv.prefix_bytes_to_move(most, here),
            target,
            [cluster for cluster, tokens in longest.items() if tokens == most],
            self._clock(),
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._rebalancer.period_s)
            self.decide()

    def decide(self) -> None:
        """One look at what is missing where, and at what the links have to spare."""
        now_s, view = self._clock(), self._board.view
        fresh = [link for link in view.links.values() if now_s - link.seen_s <= view.stale_after_s]
        for copy in self._rebalancer.decide(fresh, now_s):
            self.decided += 1
            self._recent.append((now_s, copy))
            self._on_copy(copy)
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


def _key(chains: PromptChains, tokens: int) -> int | None:
    """The hash of the prefix of `tokens` tokens, None if it ends on no block's boundary."""
    for block_tokens, hashes in chains.by_block_tokens.items():
        blocks, rest = divmod(tokens, block_tokens)
        if rest == 0 and 0 < blocks <= len(hashes):
            return hashes[blocks - 1]
    return None
