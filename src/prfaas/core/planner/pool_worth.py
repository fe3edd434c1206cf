"""The worth of a prefix-cache pool: the work that its hits spare, and tiers that are fast enough."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.core.arrays import OfLength, np
from prfaas.core.planner.equations import kv_throughput_bits_per_s
from prfaas.core.planner.operating_point import OperatingPoint
from prfaas.core.planner.plan import best_operation
from prfaas.core.planner.problem import PdCluster, PlanProblem, PrfaasCluster
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


@dataclass(frozen=True, slots=True)
class PoolWorth:
    """A deployment with and without the hits of its pools."""

    hit_ratio: float
    """Part of all prompt tokens that the pools spare."""
    without: OperatingPoint
    with_hits: OperatingPoint
    spared_instances: Mapping[str, int]
    """By cluster, how many instances the hits spare at the rate without them; each cluster on its own. Those that can
    be spared without any hit don't count."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts."""
        return {
            "hit_ratio": self.hit_ratio,
            "lambda_max_without": self.without.lambda_max,
            "lambda_max_with": self.with_hits.lambda_max,
            "ttft_mean_without_s": self.without.ttft_mean_s,
            "ttft_mean_with_s": self.with_hits.ttft_mean_s,
            "spared_instances": dict(self.spared_instances),
        }


def pool_worth(plain: PlanProblem, cached: PlanProblem, hit_ratio: float) -> PoolWorth:
    """Compare the best operation of two problems that differ in what is cached.

    Args:
        plain: Without the pools' hits.
        cached: With them: its prompts are as long as what is left to compute, or it has a prefix hit ratio.
        hit_ratio: Part of all prompt tokens that the pools spare, for the record.

    Raises:
        PlanError: as `best_operation`.
    """
    without, with_hits = best_operation(plain), best_operation(cached)
    rate = without.lambda_max
    return PoolWorth(
        hit_ratio,
        without,
        with_hits,
        {each.name: max(_idle(cached, each, rate) - _idle(plain, each, rate), 0) for each in plain.clusters},
    )


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


def _idle(problem: PlanProblem, cluster: PrfaasCluster | PdCluster, rate: float) -> int:
    """The most instances of a cluster that can go, the last one not, while the rest carries the rate."""
    low, high = 0, cluster.instances
    while high - low > 1:
        middle = (low + high) // 2
        if best_operation(_without(problem, cluster.name, middle)).lambda_max >= rate:
            low = middle
        else:
            high = middle
    return low


def _without(problem: PlanProblem, name: str, count: int) -> PlanProblem:
    return replace(
        problem,
        prfaas=tuple(
            replace(each, instances=each.instances - count) if each.name == name else each
            for each in problem.prfaas
        ),
        pd=tuple(
            replace(each, instances=each.instances - count) if each.name == name else each
            for each in problem.pd
        ),
    )


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
