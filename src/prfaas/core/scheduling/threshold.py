"""The threshold, searched again on what is observed (section 3.4.3), and moved only when that is worth it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prfaas.core.arrays import FloatArray
from prfaas.core.planner import PlanProblem
from prfaas.core.planner.fixed_roles import PrefillSide, even_spread, prefill_sides
from prfaas.core.scheduling.known_problem import KnownProblem

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
    proportion; after a link has changed by more than `link_margin`, since one that fluctuates soon comes back. When
    searched periodically it must also move the balance of Eq. 7 (work offloaded to work kept) further than two samples
    of the same traffic differ by chance: `noise_sds` standard deviations, which follow from the number of lengths and
    the spread of their work. Where no link leads to a PD cluster its threshold is infinite at once.
    Costs 1 ms for two clusters, some tenths of a second for more: run it beside an event loop, not in it. For more, a
    periodic search that has nothing new to look at ends at once.
    """

    margin: float = 0.02
    link_margin: float = 0.2
    noise_sds: float = 3.5
    _known: KnownProblem = field(default_factory=KnownProblem, init=False, compare=False)

    def propose(
        self,
        problem: PlanProblem,
        prefill: Mapping[str, int],
        current_tokens: Mapping[str, float],
        *,
        sample_count: int,
        reason: Reason = "periodic",
    ) -> ThresholdChange | None:
        """The thresholds to go to, None to stay.

        `prefill`: prefill instances by PD cluster. `current_tokens` by PD cluster; one that is missing has none yet.
        `sample_count`: how many requests the problem's lengths were taken from. Each PD cluster is
        taken to decode the part of all requests that its decode capacity is of all.
        """
        key = (tuple(prefill.items()), tuple(current_tokens.items()))
        if not self._known.is_new(problem, key, sample_count) and reason == "periodic":
            return None
        sides = prefill_sides(problem, prefill, even_spread(problem, prefill))
        found = {
            name: self._chosen(side, current_tokens.get(name), sample_count, reason)
            for name, side in sides.items()
        }
        tokens = {name: chosen for name, (chosen, _, _) in found.items()}
        if all(chosen == current_tokens.get(name) for name, chosen in tokens.items()):
            return None
        before = [rate / sides[name].part for name, (_, rate, _) in found.items() if rate is not None]
        after = min(rate / sides[name].part for name, (_, _, rate) in found.items())
        return ThresholdChange(tokens, reason, min(before) if len(before) == len(found) else None, after)

    def _chosen(
        self, side: PrefillSide, now: float | None, sample_count: int, reason: Reason
    ) -> tuple[float, float | None, float]:
        """The threshold of one cluster, and its rates with the present one and with it."""
        margin = self.link_margin if reason == "link" else self.margin
        best, after, before = side.best_beside(now, margin)
        # Where it is not reached, the best one is infinite.
        if now is None or before is None or not side.is_reached:
            return best, before, after
        is_more = after > before * (1 + margin)
        if is_more and reason == "periodic":
            is_more = is_more_than_noise(side.problem, now, best, sample_count, self.noise_sds)
        return (best, before, after) if is_more else (now, before, before)


def is_more_than_noise(
    problem: PlanProblem, before: float, after: float, sample_count: int, sds: float
) -> bool:
    """Whether the balance of Eq. 7 moves by more than `sds` standard deviations of what two samples differ by.

    The balance is log(work offloaded / work kept), which at the best threshold is what the instances' numbers allow.
    The work of the PrfaaS cluster and of the link must both have moved so far.
    """
    lengths = problem.workload.lengths
    bins = lengths.fine_bins()
    stays = problem.pd[0].prefill_s(bins.lengths)
    long = [lengths.parts_beyond(bins, threshold) for threshold in (before, after)]
    kept = [moments(stays, bins.weights * (1 - part)) for part in long]
    for work in (problem.prfaas[0].prefill_s, problem.kv_bytes):
        goes = work(bins.lengths)
        if not goes.any():
            continue
        offloaded = [moments(goes, bins.weights * part) for part in long]
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


def moments(work: FloatArray, weights: FloatArray) -> tuple[float, float]:
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
