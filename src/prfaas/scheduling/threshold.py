"""The threshold, searched again on what is observed (section 3.4.3), and moved only when that is worth it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prfaas.planner import PlanProblem, ServiceModel
from prfaas.planner.fixed_roles import PrefillSide, even_spread, prefill_sides
from prfaas.workload import Bins

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

Reason = Literal["start", "periodic", "roles", "policy", "link"]
"""Why thresholds are searched. All but "periodic" are events: what they change is not noise of the sample."""


@dataclass(frozen=True, slots=True)
class ThresholdChange:
    """`tokens`: the threshold of every PD cluster of the problem in uncached tokens; infinite: never offload.

    Rates are requests per second of the whole deployment that prefill and links can carry, with the thresholds
    before (None: some cluster had none) and after, by the lengths that were observed: the first PD cluster that is
    full counts.
    """

    tokens: Mapping[str, float]
    reason: Reason
    rate_before: float | None
    rate_after: float


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
        tokens: dict[str, float] = {}
        for name, side in sides.items():
            now = current_tokens.get(name)
            best = side.best_threshold()
            if now is not None and not self._is_better(side, now, best, sample_count, reason):
                best = now
            tokens[name] = best
        if all(tokens[name] == current_tokens.get(name) for name in tokens):
            return None
        known = [
            side.rate(current_tokens[name]) / side.part
            for name, side in sides.items()
            if name in current_tokens
        ]
        after = min(side.rate(tokens[name]) / side.part for name, side in sides.items())
        return ThresholdChange(tokens, reason, min(known) if len(known) == len(sides) else None, after)

    def _is_better(
        self, side: PrefillSide, now: float, best: float, sample_count: int, reason: Reason
    ) -> bool:
        if not side.is_reached:
            return True  # infinite
        if side.rate(best) <= side.rate(now) * (1 + self.margin):
            return False
        return reason != "periodic" or moved_sds(side.problem, now, best, sample_count) > self.noise_sds


def moved_sds(problem: PlanProblem, before: float, after: float, sample_count: int) -> float:
    """How far a threshold moves the balance of Eq. 7, in standard deviations of what two samples differ by.

    The balance is log(work offloaded / work kept), which at the best threshold is what the instances' numbers allow.
    The work of the PrfaaS cluster and of the link are both looked at; what moves less counts.
    """
    bins = problem.workload.lengths.fine_bins()
    stays = problem.pd[0].prefill_s(bins.lengths)
    goes = [work(bins.lengths) for work in (problem.prfaas[0].prefill_s, problem.kv_bytes)]
    return min(
        _moved(bins, stays, offloaded, before, after, sample_count) for offloaded in goes if offloaded.any()
    )


def _moved(
    bins: Bins, stays: "FloatArray", goes: "FloatArray", before: float, after: float, sample_count: int
) -> float:
    balances = [balance(bins, stays, goes, tokens) for tokens in (before, after)]
    if not all(math.isfinite(value) for value, _ in balances):
        return math.inf
    # Both samples err: the one that the present threshold is from, and this one.
    error = math.sqrt(2 * balances[0][1] / max(sample_count, 1))
    return abs(balances[1][0] - balances[0][0]) / error


def balance(bins: Bins, stays: "FloatArray", goes: "FloatArray", threshold: float) -> tuple[float, float]:
    """log(work offloaded / work kept), and n times its variance in a sample of n lengths.

    By the delta method: with X the work of a request if it is offloaded (else 0) and Y if it stays (else 0) the
    variance is (E[X²] / E[X]² + E[Y²] / E[Y]²) / n. Infinite where one side has nothing.
    """
    is_long = bins.lengths > threshold
    x, y = goes * is_long, stays * ~is_long
    mean_x, mean_y = float((x * bins.weights).sum()), float((y * bins.weights).sum())
    if mean_x <= 0 or mean_y <= 0:
        return (math.inf if mean_x > 0 else -math.inf), math.inf
    squares = float((x**2 * bins.weights).sum()) / mean_x**2, float((y**2 * bins.weights).sum()) / mean_y**2
    return math.log(mean_x / mean_y), sum(squares)
