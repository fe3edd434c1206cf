"""Copies of prefixes that the pools of one cluster often lack and those of another hold, from pool to pool."""

import asyncio
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prfaas.core.prefix.hashing import PromptChains, PromptTokens
from prfaas.core.prefix.index import PoolHit
from prfaas.core.scheduling.rebalancing import Copy, MissedPrefix, Rebalancer, missed_prefix
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.pool.copier import PoolCopier
from prfaas.serving.transport.protocol.requests import CopyResult
from prfaas.serving.transport.protocol.ticket import TransferClass

logger = logging.getLogger(__name__)

_HISTORY = 20
# What clients have sent stays in memory for this: 4 bytes each.
_MOST_TOKENS_KEPT = 1 << 23
_COPIES_AT_ONCE = 2
# Copies are in the background: they may wait long for a link that is in use.
_GRACE_S = 300.0

_Place: TypeAlias = tuple[Hashable, str]
"""The key of a prefix, and the cluster that it is to go to."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What it takes to copy a prefix that was missed."""

    prefix: PromptTokens
    target: str
    """The pool of the machine that missed it last."""
    sources: Mapping[str, str]
    """Cluster → its pool that holds all of it."""


@dataclass(slots=True)
class _Recent:
    """What became of a decision."""

    at_s: float
    copy: Copy
    outcome: str


class HotPrefixes(Part):
    """Counts what clusters lack and others hold, decides copies by what links have to spare, and has them made."""

    def __init__(
        self,
        cluster_state: ClusterState,
        copier: PoolCopier,
        *,
        metrics: ControlMetrics,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """`copier`: has the copies made."""
        self._cluster_state = cluster_state
        self._clock = cluster_state.clock
        self._metrics = metrics
        self._copier = copier
        # An empty one is false.
        self._rebalancer = Rebalancer() if rebalancer is None else rebalancer
        self._recent: deque[_Recent] = deque(maxlen=_HISTORY)
        self._wanted: OrderedDict[_Place, _Wanted] = OrderedDict()
        self._wanted_tokens = 0
        self._due: asyncio.Queue[tuple[_Wanted, _Recent]] = asyncio.Queue()
        self.decided = 0
        self.copied = 0
        self.copied_bytes = 0
        self.copied_tokens = 0

    def note(self, prefill: str, chains: PromptChains, pools: Mapping[str, PoolHit]) -> None:
        """Count what one routed request misses.

        Args:
            prefill: the instance that prefills it.
            chains: of its prompt.
            pools: what each pool holds of it, by name.
        """
        missed = missed_prefix(pools, prefill, self._cluster_state.view)
        key = chains.key_of(missed.tokens) if missed is not None else None
        if missed is None or key is None:
            return
        cluster, new_tokens = missed.target.cluster, missed.tokens - missed.held_tokens
        self._rebalancer.observe(key, new_tokens, missed.num_bytes, cluster, missed.sources, self._clock())
        if chains.prompt is not None and self._rebalancer.is_often(key, cluster):
            self._keep((key, cluster), chains.prompt, missed)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_COPIES_AT_ONCE):
                group.create_task(self._make_copies())
            while True:
                await asyncio.sleep(self._rebalancer.period_s)
                self.decide()

    def decide(self) -> None:
        """Decide copies by what is missing where, and by what the links have to spare."""
        now_s, view = self._clock(), self._cluster_state.view
        fresh = [link for link in view.links.values() if now_s - link.seen_s <= view.stale_after_s]
        for copy in self._rebalancer.decide(fresh, now_s):
            self.decided += 1
            self._metrics.copies.inc()
            logger.info(
                "worth copying: %d tokens from %s to %s, missed %.1f times",
                copy.tokens,
                copy.source,
                copy.target,
                copy.misses,
            )
            recent = _Recent(now_s, copy, "decided")
            self._recent.append(recent)
            wanted = self._forget((copy.key, copy.target))
            if wanted is None or copy.source not in wanted.sources:
                self._end(recent, "forgotten", CopyResult(0, 0, ""))
            else:
                self._due.put_nowait((wanted, recent))

    async def close(self) -> None:
        """End what is being given up."""
        await self._copier.close()

    def state(self, now_s: float) -> Json:
        """Numbers of copies decided and made, and the last of them."""
        told = {
            "decided": self.decided,
            "remembered": len(self._rebalancer),
            "copied": self.copied,
            "copied_bytes": self.copied_bytes,
            "copied_tokens": self.copied_tokens,
            "recent": [
                {
                    "age_s": round(now_s - each.at_s, 3),
                    "source": each.copy.source,
                    "target": each.copy.target,
                    "tokens": each.copy.tokens,
                    "bytes": each.copy.num_bytes,
                    "misses": round(each.copy.misses, 2),
                    "outcome": each.outcome,
                }
                for each in self._recent
            ],
        }
        return {"rebalancing": told}

    def _keep(self, place: _Place, prompt: PromptTokens, missed: MissedPrefix) -> None:
        """Remember a prefix itself, which a copy needs; the longest unseen ones go for it."""
        self._forget(place)
        prefix = PromptTokens(array("I", prompt.token_ids[: missed.tokens]), prompt.salt, prompt.adapter)
        self._wanted[place] = _Wanted(prefix, missed.target.name, missed.sources)
        self._wanted_tokens += missed.tokens
        while self._wanted_tokens > _MOST_TOKENS_KEPT:
            self._forget(next(iter(self._wanted)))

    def _forget(self, place: _Place) -> _Wanted | None:
        wanted = self._wanted.pop(place, None)
        if wanted is not None:
            self._wanted_tokens -= len(wanted.prefix.token_ids)
        return wanted

    async def _make_copies(self) -> None:
        while True:
            wanted, recent = await self._due.get()
            copy, prefix = recent.copy, wanted.prefix
            recent.outcome = "under way"
            result = await self._copier.copy(
                wanted.sources[copy.source],
                wanted.target,
                prefix.token_ids,
                prefix.salt,
                prefix.adapter,
                TransferClass(background=True),
                kv_bytes=copy.num_bytes,
                grace_s=_GRACE_S,
            )
            self._end(recent, result.outcome, result)

    def _end(self, recent: _Recent, outcome: str, result: CopyResult) -> None:
        recent.outcome = outcome
        tokens = recent.copy.tokens if outcome == "done" else 0
        self.copied += outcome == "done"
        self.copied_bytes += result.copied_bytes
        self.copied_tokens += tokens
        self._metrics.copies_ended.labels(outcome).inc()
        self._metrics.copied_bytes.inc(result.copied_bytes)
        self._metrics.copied_tokens.inc(tokens)
