"""Equations 1 and 2 of the paper (section 2.1), and S_kv for lengths that aren't whole numbers."""

from dataclasses import dataclass, field

from prfaas.core.arrays import FloatArray, OfLength, np
from prfaas.core.kv.layers import SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.planner.problem import PlanError
from prfaas.core.units import BITS_PER_BYTE
from prfaas.core.workload.lengths import LengthDistribution


def kv_throughput_bits_per_s(kv_bytes: float, prefill_s: float) -> float:
    """Eq. 1: Φ_kv(l) = S_kv(l) / T_prefill(l), in bits per second."""
    return kv_bytes * BITS_PER_BYTE / prefill_s


@dataclass(frozen=True, slots=True)
class Egress:
    """Eq. 2: bits per second that leave a prefill cluster whose instances are always busy."""

    instances: float
    """N / P; not a whole number where GPUs are left over."""
    mean_tokens: float
    """The mean uncached length."""
    by_length_bits_per_s: float
    """(N / P) · E[S_kv] / E[T_prefill]."""
    at_mean_bits_per_s: float
    """The paper's shortcut (N / P) · Φ_kv(L_avg)."""


def egress(
    gpus: int,
    gpus_per_instance: int,
    kv_bytes: OfLength,
    prefill_s: OfLength,
    lengths: LengthDistribution,
) -> Egress:
    """Eq. 2: the egress of GPUs that prefill without a pause (section 2.1).

    Args:
        gpus: N of the paper, all GPUs of the cluster.
        gpus_per_instance: P of the paper.
        kv_bytes: S_kv: bytes for arrays of tokens.
        prefill_s: T_prefill: seconds for arrays of tokens.
        lengths: Uncached lengths of the requests.

    Raises:
        PlanError: fewer GPUs than one instance has.
    """
    if gpus_per_instance < 1 or gpus < gpus_per_instance:
        raise PlanError(f"{gpus} GPUs are less than one instance of {gpus_per_instance}")
    instances = gpus / gpus_per_instance
    mean = lengths.mean()
    at_mean = kv_throughput_bits_per_s(
        float(kv_bytes(np.array([mean]))[0]), float(prefill_s(np.array([mean]))[0])
    )
    by_length = lengths.expect(kv_bytes) * BITS_PER_BYTE / lengths.expect(prefill_s)
    return Egress(instances, mean, instances * by_length, instances * at_mean)


_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class KvSize:
    """S_kv: bytes of a request's KVCache for arrays of tokens.

    A model's size is a straight line between the lengths at which a window is full, so interpolation is exact.
    """

    model: KvModel
    _tokens: FloatArray = field(init=False, repr=False)
    _bytes: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        windows = [group for group in self.model.groups if isinstance(group, SlidingWindow)]
        knots = {1, _MOST_TOKENS, *(group.window_tokens for group in windows)}
        tokens = sorted(knots)
        object.__setattr__(self, "_tokens", np.array(tokens, dtype=np.float64))
        sizes = [self.model.kv_bytes(count) for count in tokens]
        object.__setattr__(self, "_bytes", np.array(sizes, dtype=np.float64))

    def __call__(self, tokens: FloatArray) -> FloatArray:
        """Bytes at `tokens` (1 to 16 million; below 1 it counts as 1)."""
        return np.interp(tokens, self._tokens, self._bytes)
