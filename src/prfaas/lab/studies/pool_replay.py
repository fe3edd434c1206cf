"""A run of a study that has pools and prompts, but no time."""

import time
from dataclasses import dataclass

import numpy as np

from prfaas.core.kv import KvModel
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.workload.requests import BLOCK_TOKENS
from prfaas.core.workload.traffic import Traffic, take
from prfaas.lab.simulator import PoolOptions
from prfaas.lab.simulator.machine_pool import MachinePool
from prfaas.lab.simulator.pool_hits import replayed
from prfaas.lab.studies.study import Key, StudyOutcome


@dataclass(frozen=True, slots=True)
class PoolReplay:
    """A `StudyRun`: see `pool_hits.replayed`."""

    key: Key
    traffic: Traffic
    """Of blocks of the usual size."""
    requests: int
    """At most."""
    seed: int
    machines: int
    options: PoolOptions
    """Of each machine."""
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
        between_s = ServiceCurve.of_profile(self.profile).between_s
        pools = [MachinePool(self.options, self.model, BLOCK_TOKENS, between_s) for _ in range(self.machines)]
        requests = take(self.traffic.chunks(np.random.default_rng(self.seed)), limit=self.requests)
        tokens = reused = on_ssd = 0
        for each in replayed(requests, pools):
            tokens += each.input_tokens
            reused += each.reused_tokens
            on_ssd += each.ssd_tokens
        numbers = {
            "hit_ratio": reused / tokens,
            "hit_ratio_ssd": on_ssd / tokens,
            "memory_bytes": sum(pool.memory_bytes for pool in pools),
            "ssd_bytes": sum(pool.ssd_bytes for pool in pools),
        }
        return StudyOutcome(numbers, {}, time.perf_counter() - started_s)
