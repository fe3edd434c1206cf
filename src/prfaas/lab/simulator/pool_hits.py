"""Prompts one after the other through the pools of several machines: what they hit, without any time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prfaas.core.workload import TracedRequest
from prfaas.lab.simulator.machine_pool import MachinePool

# A machine that holds a prompt's beginning gets it until it has computed so much more than the mean.
_MORE_SHARE, _MORE_TOKENS = 0.1, 200_000


@dataclass(frozen=True, slots=True)
class PoolReuse:
    """What one prompt found."""

    input_tokens: int
    reused_tokens: int
    ssd_tokens: int
    """Of those, what lay on SSD."""


def replayed(requests: Iterable[TracedRequest], pools: Sequence[MachinePool]) -> Iterator[PoolReuse]:
    """Every prompt in its order.

    A prompt goes to the machine that holds the longest reusable beginning, and among equals to the one that has
    computed least; but to none that has computed a tenth and 200,000 tokens more than the mean.
    """
    computed = [0] * len(pools)
    for request in requests:
        blocks = request.block_ids
        # The last token is always computed.
        hits = [pool.hit(blocks, request.input_tokens - 1) for pool in pools]
        usable = [0 if hit is None else hit.every_tier.reusable_tokens for hit in hits]
        most = (1 + _MORE_SHARE) * sum(computed) / len(pools) + _MORE_TOKENS
        worth = [held if done < most else -1 for held, done in zip(usable, computed, strict=True)]
        chosen = min(range(len(pools)), key=lambda each: (-worth[each], computed[each]))
        reused = usable[chosen]
        ssd_tokens = pools[chosen].load(blocks, 0, reused).ssd_tokens if reused else 0
        pools[chosen].store(blocks, request.input_tokens, reused)
        computed[chosen] += request.input_tokens - reused
        yield PoolReuse(request.input_tokens, reused, ssd_tokens)
