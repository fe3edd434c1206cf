"""The threshold, searched again on what is observed (section 3.4.3), and moved only when that is worth it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prfaas.planner import PlanProblem, ServiceModel
from prfaas.planner.fixed_roles import best_thresholds, even_spread, prefill_rate
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

    Rates are requests per second that prefill and links can carry, with the thresholds before (None: there were
    none) and after, by the lengths that were observed.
    """

    tokens: Mapping[str, float]
    reason: Reason
    rate_before: float | None
    rate_after: float


@dataclass(frozen=True, slots=True)
class ThresholdOptimiser:
    """The best thresholds for the roles as they are, with hysteresis.

    New thresholds are adopted if the prefill side can carry more requests with them, by the observed lengths, than
    with the present ones: by more than `margin` in proportion. When searched periodically they must also move the
    balance of Eq. 7 (work offloaded to work kept) further than two samples of the same traffic differ by chance:
    `noise_sds` standard deviations, which follow from the number of lengths and the spread of their work.
    Where no link leads to a PD cluster its threshold is infinite at once.
    Costs 1 ms for two clusters, about 0.1 s for more: run it beside an event loop, not in it.
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
        reached = {link.target for link in problem.links}
        spread = spread if spread is not None else even_spread(problem, prefill)
        best = best_thresholds(problem, prefill, spread, self.service)
        best = {name: tokens if name in reached else math.inf for name, tokens in best.items()}
        after = prefill_rate(problem, prefill, best, spread, self.service)
        if any(name not in current_tokens for name in best):
            return ThresholdChange(best, reason, None, after)
        now = {name: current_tokens[name] if name in reached else math.inf for name in best}
        before = prefill_rate(problem, prefill, now, spread, self.service)
        if after > before * (1 + self.margin) and (
            reason != "periodic" or moved_sds(problem, now, best, sample_count) > self.noise_sds
        ):
            return ThresholdChange(best, reason, before, after)
        if any(now[name] != current_tokens[name] for name in now):
            return ThresholdChange(now, reason, before, before)
        return None


def moved_sds(
    problem: PlanProblem, before: Mapping[str, float], after: Mapping[str, float], sample_count: int
) -> float:
    """How far thresholds move the balance of Eq. 7, in standard deviations of what two samples differ by.

    The balance is log(work offloaded / work kept), which at the best threshold is what the instances' numbers allow. Of
    the PD clusters it is that which moves most, and of PrfaaS clusters and links what moves least.
    """
    bins = problem.workload.lengths.fine_bins()
    most = 0.0
    for pd in problem.pd:
        sources = {link.source for link in problem.links if link.target == pd.name}
        remote = [cluster.prefill_s for cluster in problem.clusters if cluster.name in sources]
        if remote and before[pd.name] != after[pd.name]:
            stays = pd.prefill_s(bins.lengths)
            goes = (work(bins.lengths) for work in (*remote, problem.kv_bytes))
            moves = (
                _moved(bins, stays, offloaded, before[pd.name], after[pd.name], sample_count)
                for offloaded in goes
                if offloaded.any()
            )
            most = max(most, min(moves))
    return most


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
