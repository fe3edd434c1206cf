"""The threshold, searched again on what is observed (section 3.4.3), and moved only when that is worth it.

`LengthWindow` remembers the observed lengths in constant memory; `problem_now` makes a planning problem of them and of
what a running deployment knows of itself; `ThresholdOptimiser` searches it.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PdCluster, PlanError, PlanLink, PlanProblem, PrfaasCluster, ServiceModel
from prfaas.core.planner.fixed_roles import PrefillSide, even_spread, prefill_sides
from prfaas.core.planner.threshold_rates import ThresholdRates
from prfaas.core.scheduling.view import ClusterKind, InstanceView
from prfaas.core.workload import Empirical, LengthDistribution, Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]


_BINS_PER_OCTAVE = 64
_OCTAVES = 22
_BINS = _BINS_PER_OCTAVE * _OCTAVES
# Rates over less than this would be those of single requests.
_LEAST_SPAN_S = 1.0
_NEVER = -(1 << 62)
_EMPTY = array("d", bytes(8 * _BINS))


class _Slot:
    """The histogram of one part of the window: how many lengths fell into each bin, and their sum in tokens."""

    __slots__ = ("counts", "number", "tokens", "total")

    def __init__(self, counts: "memoryview[float]", tokens: "memoryview[float]") -> None:
        # Counts are whole numbers, but floating-point ones are summed in a fraction of the time.
        self.counts, self.tokens = counts, tokens
        self.number, self.total = _NEVER, 0

    def restart(self, number: int) -> None:
        self.number, self.total = number, 0
        self.counts[:] = self.tokens[:] = _EMPTY


class LengthWindow:
    """Uncached lengths of the last `window_s` seconds.

    The window is a ring of `slots` histograms, and the oldest goes as a whole: what is answered covers between
    (slots − 1) / slots and all of `window_s`. Bins are geometric, 64 to an octave from 1 to 4 million tokens: a
    length is known to 1.1 %, the mean of each bin, and so that of all, exactly. Memory: 22 KB per slot, whatever
    comes. Below `min_count` lengths there is no distribution.
    Times are seconds of any one clock and may come a little out of order.
    """

    def __init__(self, window_s: float, *, slots: int = 12, min_count: int = 50) -> None:
        if not (window_s > 0 and slots > 0):
            raise ValueError(f"a window needs a time above 0 and slots, not {window_s!r} s and {slots!r}")
        self.window_s = window_s
        self.min_count = max(min_count, 1)
        self._slot_s = window_s / slots
        # All slots in one piece, each its counts and then its tokens, so that they are summed at once.
        self._histograms = array("d", bytes(2 * 8 * _BINS * slots))
        parts: memoryview[float] = memoryview(self._histograms).cast("B").cast("d")
        self._ring = [
            _Slot(parts[start : start + _BINS], parts[start + _BINS : start + 2 * _BINS])
            for start in range(0, 2 * _BINS * slots, 2 * _BINS)
        ]
        self._first_s = math.inf
        # The histograms that the last distribution was of, and this one; together, since threads may ask.
        self._known: tuple[list[tuple[int, int, int]], Empirical] | None = None

    def add(self, tokens: float, now_s: float) -> None:
        """One request of `tokens` uncached tokens; less than 1 counts as 1. About 0.6 µs."""
        number = int(now_s // self._slot_s)
        slot = self._ring[number % len(self._ring)]
        if slot.number != number:
            if slot.number > number:
                return  # older than the window
            slot.restart(number)
            self._first_s = min(self._first_s, now_s)
        length = float(tokens) if tokens > 1 else 1.0
        bin_ = int(math.log2(length) * _BINS_PER_OCTAVE)
        if bin_ >= _BINS:
            bin_ = _BINS - 1
        slot.counts[bin_] += 1
        slot.tokens[bin_] += length
        slot.total += 1

    def count(self, now_s: float) -> int:
        """Requests in the window."""
        return sum(self._ring[row].total for row in self._live(now_s))

    def rate_per_s(self, now_s: float) -> float:
        """Requests per second in the window, or since the first one if that is less; 0 without any."""
        count = self.count(now_s)
        if count == 0:
            return 0.0
        oldest = (int(now_s // self._slot_s) - len(self._ring) + 1) * self._slot_s
        return count / max(now_s - max(oldest, self._first_s), _LEAST_SPAN_S)

    def histogram(self, now_s: float) -> list[int]:
        """How many lengths of the window lie in each half octave: from 1, from √2, from 2 tokens on, and so on."""
        counts, _ = self._sums(self._live(now_s))
        halves = counts.reshape(-1, _BINS_PER_OCTAVE // 2).sum(axis=1)
        return [int(count) for count in halves]

    def lengths(self, now_s: float) -> Empirical | None:
        """The distribution of the window's lengths, one atom per bin at its mean; None below `min_count`."""
        live = self._live(now_s)
        # Histograms only grow until they begin anew, so these say what is in them.
        held = [(row, self._ring[row].number, self._ring[row].total) for row in live]
        if sum(total for _, _, total in held) < self.min_count:
            return None
        known = self._known
        if known is not None and known[0] == held:
            return known[1]
        sums = self._sums(live)
        counts, tokens = sums.take(sums[0].nonzero()[0], axis=1)
        found = Empirical.counted(tokens / counts, counts)
        self._known = (held, found)
        return found

    def _sums(self, live: list[int]) -> "FloatArray":
        """Two rows, over the window's histograms: lengths in each bin, and their tokens."""
        import numpy as np

        histograms = np.frombuffer(self._histograms).reshape(-1, 2, _BINS)
        if len(live) < len(self._ring):
            histograms = histograms[live]
        sums: FloatArray = histograms.sum(axis=0)
        return sums

    def _live(self, now_s: float) -> list[int]:
        """The places in the ring of the window's histograms."""
        oldest = int(now_s // self._slot_s) - len(self._ring)
        return [row for row, slot in enumerate(self._ring) if slot.total and oldest < slot.number]


SETTLE_S = 0.3
"""Events come in bunches: a link's fall is followed by its capacity's. So long a search waits for the rest."""

Reason = Literal["start", "periodic", "roles", "policy", "link"]
"""Why thresholds are searched. All but "periodic" are events: what they change is not noise of the sample."""


@dataclass(frozen=True, slots=True)
class ThresholdChange:
    """New thresholds.

    Rates are requests per second of the whole deployment that prefill and links can carry, by the lengths that were
    observed: until the first PD cluster is full.
    """

    tokens: Mapping[str, float]
    """The threshold of every PD cluster of the problem in uncached tokens; infinite: never offload."""
    reason: Reason
    rate_before: float | None
    """With the thresholds before; None: some cluster had none."""
    rate_after: float
    """With the new thresholds."""


@dataclass(frozen=True, slots=True)
class ThresholdOptimiser:
    """The best thresholds for the roles as they are, with hysteresis.

    A PD cluster's new threshold is adopted if its prefill side (own instances, and what it is granted of others) can
    carry more of its requests with it, by the observed lengths, than with the present one: by more than `margin` in
    proportion. When searched periodically it must also move the balance of Eq. 7 (work offloaded to work kept) further
    than two samples of the same traffic differ by chance: `noise_sds` standard deviations, which follow from the
    number of lengths and the spread of their work. Where no link leads to a PD cluster its threshold is infinite at
    once.
    Costs 1 ms for two clusters, some tenths of a second for more: run it beside an event loop, not in it.
    """

    margin: float = 0.02
    noise_sds: float = 3.5
    service: ServiceModel = "mean length"

    def propose(
        self,
        problem: PlanProblem,
        prefill: Mapping[str, int],
        current_tokens: Mapping[str, float],
        *,
        sample_count: int,
        reason: Reason = "periodic",
        spread: Mapping[str, float] | None = None,
    ) -> ThresholdChange | None:
        """The thresholds to go to, None to stay.

        `prefill`: prefill instances by PD cluster. `current_tokens` by PD cluster; one that is missing has none yet.
        `sample_count`: how many requests the problem's lengths were taken from. `spread`: the part of all requests
        that each PD cluster decodes (None: as their decode capacities; with two clusters it doesn't matter).
        """
        spread = spread if spread is not None else even_spread(problem, prefill)
        sides = prefill_sides(problem, prefill, spread, self.service)
        rates = {name: side.threshold_rates() for name, side in sides.items()}
        tokens: dict[str, float] = {}
        for name, side in sides.items():
            now = current_tokens.get(name)
            best = rates[name].best_threshold()
            if now is not None and not self._is_better(side, rates[name], now, best, sample_count, reason):
                best = now
            tokens[name] = best
        if all(tokens[name] == current_tokens.get(name) for name in tokens):
            return None
        known = [
            rates[name].rate(current_tokens[name]) / side.part
            for name, side in sides.items()
            if name in current_tokens
        ]
        after = min(rates[name].rate(tokens[name]) / side.part for name, side in sides.items())
        return ThresholdChange(tokens, reason, min(known) if len(known) == len(sides) else None, after)

    def _is_better(
        self,
        side: PrefillSide,
        rates: ThresholdRates,
        now: float,
        best: float,
        sample_count: int,
        reason: Reason,
    ) -> bool:
        if not side.is_reached:
            return True  # infinite
        if rates.rate(best) <= rates.rate(now) * (1 + self.margin):
            return False
        return reason != "periodic" or is_more_than_noise(
            side.problem, now, best, sample_count, self.noise_sds
        )


def is_more_than_noise(
    problem: PlanProblem, before: float, after: float, sample_count: int, sds: float
) -> bool:
    """Whether the balance of Eq. 7 moves by more than `sds` standard deviations of what two samples differ by.

    The balance is log(work offloaded / work kept), which at the best threshold is what the instances' numbers allow.
    The work of the PrfaaS cluster and of the link must both have moved so far.
    """
    bins = problem.workload.lengths.fine_bins()
    stays = problem.pd[0].prefill_s(bins.lengths)
    are_long = [bins.lengths > threshold for threshold in (before, after)]
    kept = [moments(stays * ~is_long, bins.weights) for is_long in are_long]
    for work in (problem.prfaas[0].prefill_s, problem.kv_bytes):
        goes = work(bins.lengths)
        if not goes.any():
            continue
        offloaded = [moments(goes * is_long, bins.weights) for is_long in are_long]
        then, now = (balance(one, other) for one, other in zip(offloaded, kept, strict=True))
        # Mostly the first kind of work has not moved, and the second need not be looked at.
        if _moved(then, now, sample_count) <= sds:
            return False
    return True


def _moved(then: tuple[float, float], now: tuple[float, float], sample_count: int) -> float:
    """From one balance to the other, in standard deviations."""
    if not (math.isfinite(then[0]) and math.isfinite(now[0])):
        return math.inf
    # Both samples err: the one that the present threshold is from, and this one.
    error = math.sqrt(2 * then[1] / max(sample_count, 1))
    return abs(now[0] - then[0]) / error


def moments(work: "FloatArray", weights: "FloatArray") -> tuple[float, float]:
    """E[X] of the work X of a request, and E[X²] / E[X]²."""
    mean = float((work * weights).sum())
    return mean, float((work**2 * weights).sum()) / mean**2 if mean > 0 else math.inf


def balance(offloaded: tuple[float, float], kept: tuple[float, float]) -> tuple[float, float]:
    """log(work offloaded / work kept), and n times its variance in a sample of n lengths; given the moments of both.

    By the delta method: with X the work of a request if it is offloaded (else 0) and Y if it stays (else 0) the
    variance is (E[X²] / E[X]² + E[Y²] / E[Y]²) / n. Infinite where one side has nothing.
    """
    if offloaded[0] <= 0 or kept[0] <= 0:
        return (math.inf if offloaded[0] > 0 else -math.inf), math.inf
    return math.log(offloaded[0] / kept[0]), offloaded[1] + kept[1]


if TYPE_CHECKING:
    from prfaas.core.planner.problem import OfLength


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster as it is now."""

    name: str
    kind: ClusterKind
    instances: int
    """Healthy ones, whatever their role."""
    curve: ServiceCurve
    decode_batch: float = 0.0
    """Requests that decode together on one instance of a PD cluster: BS_max of Eq. 5. PrfaaS clusters have none."""
    decode_step_s: float = 1.0
    """Seconds of one decode step: T_decode of Eq. 5."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a directed link can carry now."""

    source: str
    target: str
    bandwidth_bits_per_s: float
    """0 when it is down."""
    kv_bytes: "OfLength | None" = None
    """S_kv on it, where that is other than the deployment's."""


def prefill_instances(instances: Iterable[InstanceView]) -> int:
    """Available ones that prefill; those that drain count for the role that they will have."""
    return sum(each.prefills != each.draining and each.available for each in instances)


def problem_now(
    clusters: Iterable[ClusterFacts],
    links: Iterable[LinkFacts],
    lengths: LengthDistribution,
    output_tokens: float,
    kv_bytes: "OfLength",
) -> PlanProblem:
    """The problem that the present instances, links and traffic pose.

    `lengths` are uncached lengths, so nothing of them is found in a cache (hit ratio 0); `kv_bytes` is S_kv for
    arrays of tokens. Clusters without a healthy instance and links that carry nothing, or lead nowhere, are left out.
    Curves are taken as they are now: the problem may be solved in another thread.

    Raises:
        PlanError: no PD cluster has a healthy instance.
        WorkloadError: `output_tokens` is not above 0.
    """
    there = [cluster for cluster in clusters if cluster.instances > 0]
    names = {cluster.name for cluster in there}
    decoders = [cluster for cluster in there if cluster.kind == "pd"]
    if not decoders:
        raise PlanError("no PD cluster has a healthy instance")
    return PlanProblem(
        name="now",
        prfaas=tuple(
            PrfaasCluster(cluster.name, cluster.name, cluster.instances, 1, cluster.curve.at_rest())
            for cluster in there
            if cluster.kind == "prfaas"
        ),
        pd=tuple(
            PdCluster(
                cluster.name,
                cluster.name,
                cluster.instances,
                1,
                cluster.curve.at_rest(),
                decode_batch=cluster.decode_batch,
                decode_step_s=cluster.decode_step_s,
            )
            for cluster in decoders
        ),
        links=tuple(
            PlanLink(link.source, link.target, link.bandwidth_bits_per_s, kv_bytes=link.kv_bytes)
            for link in links
            if link.bandwidth_bits_per_s > 0 and {link.source, link.target} <= names
        ),
        workload=Workload(lengths, output_tokens),
        kv_bytes=kv_bytes,
    )
