"""Copies of hot prefixes from pool to pool, by the live system's own rule."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from prfaas.core.scheduling.rebalancing import Rebalancer
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.world import World

# So many prefixes that were missed are known by their blocks.
_MOST_WANTED = 4096

_Place = tuple[int, str]
"""The last block of a prefix, and the cluster that lacks it."""


@dataclass(slots=True)
class _Wanted:
    blocks: tuple[int, ...]
    target: str
    """The pool of the machine that missed it last."""


class HotCopies:
    """Copies between the clusters of a world with pools, in the background of their links.

    Args:
        world: Which must have pools.
        block_tokens: Of the traffic's prefix blocks.
    """

    def __init__(self, world: World, block_tokens: int) -> None:
        assert world.pools is not None
        self._world = world
        self._pools = world.pools
        self._block_tokens = block_tokens
        self._rebalancer = Rebalancer()
        self._wanted: OrderedDict[_Place, _Wanted] = OrderedDict()
        self._reports: list[dict[str, Any]] = []
        world.pools.on_place = self._note
        world.events.at(self._rebalancer.period_s, self._decide)

    def changes(self) -> dict[str, Any]:
        """The copies that were begun."""
        return {"prefix_copies": self._reports}

    def _note(self, job: Job) -> None:
        """A request was routed: note the prefix that its cluster lacks."""
        pools, here = job.decision.pools, self._pools.name_at(job.engine.name)
        if not pools or here is None:
            return
        cluster = job.engine.cluster.name
        longest: dict[str, int] = {}
        for name, hit in pools.items():
            place = self._world.view.pools[name].cluster
            longest[place] = max(longest.get(place, 0), hit.every_tier.reusable_tokens)
        held_tokens = longest.pop(cluster, 0)
        most = max(longest.values(), default=0)
        if most <= held_tokens:
            return
        blocks = tuple(job.blocks[: most // self._block_tokens])
        wanted = blocks[-1], cluster
        self._wanted[wanted] = _Wanted(blocks, here)
        self._wanted.move_to_end(wanted)
        if len(self._wanted) > _MOST_WANTED:
            self._wanted.popitem(last=False)
        self._rebalancer.observe(
            blocks[-1],
            most - held_tokens,
            self._world.view.kv_of_pools(cluster).prefix_bytes_to_move(most, held_tokens),
            cluster,
            [place for place, tokens in longest.items() if tokens == most],
            self._world.events.now_s,
        )

    def _decide(self, _argument: object) -> None:
        world = self._world
        now_s = world.events.now_s
        world.events.at(now_s + self._rebalancer.period_s, self._decide)
        for copy in self._rebalancer.decide(world.view.links.values(), now_s):
            wanted = self._wanted.pop((copy.key, copy.target), None)  # type: ignore[arg-type]
            if wanted is None:
                continue
            self._reports.append(
                {
                    "at_s": now_s,
                    "source": copy.source,
                    "target": copy.target,
                    "tokens": copy.tokens,
                    "bytes": copy.num_bytes,
                }
            )
            link = world.links[copy.source, copy.target]
            route = copy.source, wanted.target
            link.fluid.send(route, copy.num_bytes, self._arrived, wanted, background=True)

    def _arrived(self, wanted: _Wanted) -> None:
        self._pools.keep(wanted.target, wanted.blocks, len(wanted.blocks) * self._block_tokens)
