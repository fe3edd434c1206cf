"""The worth of the tiers of a prefix-cache pool: which of them are fast enough."""

from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.core.arrays import OfLength, np
from prfaas.core.planner.equations import kv_throughput_bits_per_s
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.units import BITS_PER_BYTE

_LENGTHS = 128


@dataclass(frozen=True, slots=True)
class TierWorth:
    """One tier of the pools of a cluster's machines."""

    cluster: str
    tier: str
    bandwidth_bits_per_s: float
    """For one instance: the machine's, divided by the instances that may load at once."""
    tokens: float
    """A length of the workload: the mean of its prompts."""
    kv_bits_per_s: float
    """Φ_kv there: the rate that loading must exceed to be faster than computing."""
    pays_from_tokens: float | None
    """The shortest prefix within the profile's range that is sooner loaded than computed, and all longer ones are;
    None: there is none."""

    @property
    def pays(self) -> bool:
        """True if loading is faster than computing at that length."""
        return self.bandwidth_bits_per_s > self.kv_bits_per_s


def tier_worths(
    problem: PlanProblem,
    bandwidths_bits_per_s: Mapping[str, Mapping[str, float]],
    range_tokens: tuple[float, float],
) -> tuple[TierWorth, ...]:
    """The worth of each tier: it pays where its bandwidth exceeds Φ_kv (Eq. 1), so that loading beats computing.

    Args:
        problem: Its clusters' curves, KV sizes and lengths.
        bandwidths_bits_per_s: By cluster and tier, for one instance.
        range_tokens: The lengths that the profiles cover.
    """
    tokens = min(max(problem.workload.lengths.mean(), range_tokens[0]), range_tokens[1])
    found = []
    for cluster in problem.clusters:
        for tier, bits_per_s in bandwidths_bits_per_s.get(cluster.name, {}).items():
            kv_bits_per_s = kv_throughput_bits_per_s(
                _at(problem.kv_bytes, tokens), _at(cluster.prefill_s, tokens)
            )
            pays_from = _pays_from(problem.kv_bytes, cluster.prefill_s, bits_per_s, range_tokens)
            found.append(
                TierWorth(cluster.name, tier, bits_per_s, tokens, kv_bits_per_s, pays_from_tokens=pays_from)
            )
    return tuple(found)


def _pays_from(
    kv_bytes: OfLength, prefill_s: OfLength, bits_per_s: float, range_tokens: tuple[float, float]
) -> float | None:
    lengths = np.geomspace(*range_tokens, _LENGTHS)
    pays = BITS_PER_BYTE * kv_bytes(lengths) / bits_per_s < prefill_s(lengths)
    # The end of the profile counts: with longer prompts computing gets slower faster than loading.
    if not pays[-1]:
        return None
    never = np.flatnonzero(~pays)
    return float(lengths[never[-1] + 1] if len(never) else lengths[0])


def _at(curve: OfLength, tokens: float) -> float:
    return float(curve(np.array([tokens]))[0])
