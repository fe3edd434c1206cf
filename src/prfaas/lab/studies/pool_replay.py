"""Prompts one after the other through the pools of a few machines: what they hit, without any time."""

import time
from dataclasses import dataclass

import numpy as np

from prfaas.core.kv import KvModel
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.workload.traffic import Traffic, take
from prfaas.lab.simulator import PoolOptions
from prfaas.lab.simulator.machine_pool import MachinePool
from prfaas.lab.studies.study import Key, StudyOutcome

# A machine that holds a prompt's beginning gets it until it has computed so much more than the mean.
_MORE_SHARE, _MORE_TOKENS = 0.1, 200_000


@dataclass(frozen=True, slots=True)
class PoolReplay:
    """One run; a `StudyRun`.

    A prompt goes to the machine that holds the longest reusable beginning, and among equals to the one that has
    computed least; but to none that has computed a tenth and 200,000 tokens more than the mean.
    """

    key: Key
    traffic: Traffic
    requests: int
    seed: int
    machines: int
    options: PoolOptions
    """Of each."""
    model: KvModel
    profile: LatencyProfile
    """What computing takes, for the policy "cost"."""

    @property
    def expected_requests(self) -> float:
        """See `StudyRun`."""
        return self.requests

    def outcome(self) -> StudyOutcome:
        """See `StudyRun`."""
        started_s = time.perf_counter()
        seconds = ServiceCurve.of_profile(self.profile).seconds
        pools: list[MachinePool] = []
        computed = [0] * self.machines
        hit_tokens = ssd_tokens = tokens = 0
        for request in take(self.traffic.chunks(np.random.default_rng(self.seed)), limit=self.requests):
            if not pools:
                pools = [
                    MachinePool(
                        self.options,
                        self.model,
                        request.block_tokens,
                        lambda start, end: seconds(end) - seconds(start),
                    )
                    for _ in range(self.machines)
                ]
            blocks = request.block_ids
            hits = [pool.hit(blocks, request.input_tokens - 1) for pool in pools]
            usable = [0 if hit is None else hit.every_tier.reusable_tokens for hit in hits]
            most = (1 + _MORE_SHARE) * sum(computed) / self.machines + _MORE_TOKENS
            # Not `usable` alone: one with too much work comes after all others.
            worth = [held if done < most else -1 for held, done in zip(usable, computed, strict=True)]
            chosen = min(range(self.machines), key=lambda each: (-worth[each], computed[each]))
            reused = usable[chosen]
            if reused:
                ssd_tokens += pools[chosen].load(blocks, 0, reused).ssd_tokens
            pools[chosen].store(blocks, request.input_tokens, reused)
            computed[chosen] += request.input_tokens - reused
            hit_tokens += reused
            tokens += request.input_tokens
        numbers = {
            "hit_ratio": hit_tokens / tokens,
            "ssd_hit_ratio": ssd_tokens / tokens,
            "memory_bytes": sum(pool.memory_bytes for pool in pools),
            "ssd_bytes": sum(pool.ssd_bytes for pool in pools),
        }
        return StudyOutcome(numbers, {}, time.perf_counter() - started_s)
