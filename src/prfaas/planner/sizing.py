"""Eq. 2: the egress that a prefill cluster of N GPUs needs to keep its GPUs busy (section 2.1)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.planner.errors import PlanError
from prfaas.planner.throughput import kv_throughput_bits_per_s
from prfaas.units import BITS_PER_BYTE
from prfaas.workload import LengthDistribution

if TYPE_CHECKING:
    from prfaas.planner.plan_problem import OfLength


@dataclass(frozen=True, slots=True)
class Egress:
    """Bits per second of `instances` busy instances.

    `by_length` is (N / P) · E[S_kv] / E[T_prefill], `at_mean` the paper's shortcut (N / P) · Φ_kv(L_avg).
    """

    instances: float
    mean_tokens: float
    by_length_bits_per_s: float
    at_mean_bits_per_s: float


def egress(
    gpus: int,
    gpus_per_instance: int,
    kv_bytes: "OfLength",
    prefill_s: "OfLength",
    lengths: LengthDistribution,
) -> Egress:
    """The egress of `gpus` GPUs that prefill requests of these (uncached) lengths without a pause.

    Raises:
        PlanError: fewer GPUs than one instance has.
    """
    import numpy as np

    if gpus_per_instance < 1 or gpus < gpus_per_instance:
        raise PlanError(f"{gpus} GPUs are less than one instance of {gpus_per_instance}")
    instances = gpus / gpus_per_instance
    mean = lengths.mean()
    at_mean = kv_throughput_bits_per_s(
        float(kv_bytes(np.array([mean]))[0]), float(prefill_s(np.array([mean]))[0])
    )
    by_length = lengths.expect(kv_bytes) * BITS_PER_BYTE / lengths.expect(prefill_s)
    return Egress(instances, mean, instances * by_length, instances * at_mean)
