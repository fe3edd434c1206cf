"""The work of each resource of a two-cluster deployment per request, as a function of the threshold."""

from dataclasses import dataclass, field

from prfaas.core.arrays import FloatArray, NDArray, OfLength, np
from prfaas.core.planner.operating_point import ServiceModel
from prfaas.core.planner.problem import Path, PdCluster, PlanProblem, PrfaasCluster
from prfaas.core.planner.ttft import PrefillPoolLoad, StageWork, link_time
from prfaas.core.units import BITS_PER_BYTE
from prfaas.core.workload.lengths import EDGE, Bins


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Work per request of the whole system, one entry per threshold."""

    offloaded: FloatArray
    """p: the part of the requests that is offloaded."""
    prfaas_s: FloatArray
    """Seconds of prefill in the PrfaaS cluster."""
    pd_s: FloatArray
    """Seconds of prefill in the PD cluster."""
    link_bits: "dict[str, FloatArray]"
    """Bits by link name."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two paths, which a threshold divides the requests between."""

    problem: PlanProblem
    prfaas: PrfaasCluster | None
    pd: PdCluster
    remote: Path | None
    """Of requests longer than the threshold; None where nothing can be offloaded."""
    local: Path
    """Of the other requests."""
    service: ServiceModel
    _beyond: dict[tuple[OfLength, float], OfLength] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def own_share(self) -> float:
        """Uncached tokens, which the threshold is compared with, per token of the prompt (section 3.4.3)."""
        if self.local.policy == "own":
            return 1 - self.problem.hit_ratio(self.pd)
        best = max(self.problem.hit_ratio(cluster) for cluster in self.problem.clusters)
        return 1 - best

    def loads(self, lengths: FloatArray) -> Loads:
        """The loads if prompts of more than `lengths` tokens (ascending, cached ones counted) are offloaded."""
        above, below = self._parts(lengths)
        zero = np.zeros(len(lengths))
        links = {link.name: zero for link in self.problem.links}
        prfaas_s = zero
        if self.remote is not None and self.prfaas is not None:
            prfaas_s = self.away_s(above, self.prfaas, self.remote)
            for transfer in self.remote.transfers:
                bits = above.total(self.problem.kv_bytes_over(transfer.link), transfer.share) * BITS_PER_BYTE
                links[transfer.link] = links[transfer.link] + bits
        for transfer in self.local.transfers:
            bits = below.total(self.problem.kv_bytes_over(transfer.link), transfer.share) * BITS_PER_BYTE
            links[transfer.link] = links[transfer.link] + bits
        return Loads(above.mass, prfaas_s, below.total(self.pd.prefill_s, self.local.share), links)

    def away_s(self, above: "Part", prfaas: PrfaasCluster, remote: Path) -> FloatArray:
        """Seconds of prefill in the PrfaaS cluster per request of the whole system."""
        return above.total(prfaas.prefill_s, remote.share)

    def beyond(self, f: OfLength, share: float) -> OfLength:
        """E[f(share × L); beyond t] for any thresholds t; `f` is asked once."""
        if (f, share) not in self._beyond:
            self._beyond[f, share] = self.problem.workload.lengths.expect_beyond(
                lambda tokens: f(share * tokens)
            )
        return self._beyond[f, share]

    def _parts(self, lengths: FloatArray) -> "tuple[Part, Part]":
        """The prompts above each length, and the others."""
        law = self.problem.workload.lengths
        mass, tokens = law.beyond(lengths)
        others = 1.0 - mass
        if self.service == "by length":
            return _ByLength(mass, self, lengths, above=True), _ByLength(others, self, lengths, above=False)
        # Rounding must not put the mean of a tiny part outside of it: curves end where lengths do.
        low, high = law.low, law.high
        least, most = (np.clip(lengths * (1 + side * EDGE / 2), low, high) for side in (-1, 1))
        return _mean_length(mass, tokens, least, high), _mean_length(others, law.mean() - tokens, low, most)


@dataclass(frozen=True, slots=True)
class Helper:
    """What another cluster prefills for a PD cluster, over its link."""

    prefill_s: OfLength
    instances: float
    bandwidth_bits_per_s: float
    kv_bytes: OfLength

    def link_s(self, tokens: FloatArray) -> FloatArray:
        """Seconds on the link alone."""
        return self.kv_bytes(tokens) * BITS_PER_BYTE / self.bandwidth_bits_per_s


@dataclass(frozen=True, slots=True)
class HelpedSplit(Split):
    """The routes of a PD cluster that several others prefill for."""

    helpers: tuple[Helper, ...]

    def away_s(self, above: "Part", _prfaas: PrfaasCluster, remote: Path) -> FloatArray:
        """Seconds per request of all of them together, each with prompts of the same lengths."""
        rate = np.zeros(len(above.mass))
        with np.errstate(divide="ignore"):
            for each in self.helpers:
                prefill_s = above.total(each.prefill_s, remote.share) / each.instances
                rate += 1 / np.maximum(prefill_s, above.total(each.link_s, remote.share))
            return 1 / rate


@dataclass(frozen=True, slots=True, eq=False)
class _MeanLength:
    mass: FloatArray
    means: FloatArray
    """E[L | part] where the part has requests; any possible length elsewhere."""
    some: "NDArray[np.bool_]"
    """Where the part has requests."""

    def total(self, f: OfLength, share: float) -> FloatArray:
        """P(part) × f(share × E[L | part]), 0 for parts of probability zero."""
        # Live lengths are uncached ones, of which nothing is spared.
        means = self.means if share == 1 else share * self.means
        return np.where(self.some, self.mass * f(means), 0.0)


def _mean_length(
    mass: FloatArray, tokens: FloatArray, low: "FloatArray | float", high: "FloatArray | float"
) -> _MeanLength:
    """The part whose lengths are between `low` and `high`."""
    some = mass > 1e-15
    means = np.minimum(np.maximum(tokens / np.where(some, mass, 1.0), low), high)
    return _MeanLength(mass, means, some)


@dataclass(frozen=True, slots=True, eq=False)
class _ByLength:
    mass: FloatArray
    split: Split
    thresholds: FloatArray
    above: bool

    def total(self, f: OfLength, share: float) -> FloatArray:
        """E[f(share × L); part], 0 for parts of (almost) no request."""
        beyond = self.split.beyond(f, share)(np.append(self.thresholds, 0.0))
        part = beyond[:-1] if self.above else beyond[-1] - beyond[:-1]
        return np.where(self.mass > 1e-12, part, 0.0)


Part = _MeanLength | _ByLength
"""The requests that a threshold sends one way."""


def work_of(split: Split, length: float, n_prefill: int) -> StageWork:
    """The stages' work per request if prompts of more than `length` tokens (cached ones counted) are offloaded."""
    loads = split.loads(np.array([length], dtype=np.float64))
    link_rates = {
        link.name: link.bandwidth_bits_per_s / float(loads.link_bits[link.name][0])
        for link in split.problem.links
        if loads.link_bits[link.name][0] > 0
    }
    return StageWork(pools_of(split, length, n_prefill), link_rates, {split.pd.name: 1.0})


def pools_of(split: Split, length: float, n_prefill: int) -> tuple[PrefillPoolLoad, ...]:
    """The prefill pools and their service times, by the exact distribution of lengths."""
    lengths = split.problem.workload.lengths
    return pools_of_parts(split, *lengths.fine_parts(length), n_prefill)


def pools_of_parts(split: Split, short: Bins, long: Bins, n_prefill: int) -> tuple[PrefillPoolLoad, ...]:
    """The prefill pools if prompts of `long` are offloaded and those of `short` stay."""
    smooth = split.problem.workload.lengths.atoms() is None
    pools = []

    def add(cluster: PrfaasCluster | PdCluster, instances: int, path: Path, bins: Bins) -> None:
        load = PrefillPoolLoad(
            cluster.name,
            instances,
            seconds=cluster.prefill_s(path.share * bins.lengths),
            weights=bins.weights,
            smooth=smooth,
            link=link_time(split.problem, path, bins.lengths, bins.weights),
        )
        pools.append(load)

    if len(short.weights):
        add(split.pd, n_prefill, split.local, short)
    if len(long.weights) and split.prfaas is not None and split.remote is not None:
        add(split.prfaas, split.prfaas.instances, split.remote, long)
    return tuple(pools)
