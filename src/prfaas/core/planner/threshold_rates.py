"""Throughput over the threshold with given roles: the best threshold, and the rate with any other."""

import math
from dataclasses import dataclass

from prfaas.core.arrays import FloatArray
from prfaas.core.planner.loads import Split
from prfaas.core.planner.operating_point import ServiceModel
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.planner.two_clusters import (
    best_of,
    candidate_lengths,
    highest,
    merits,
    own_split,
    rate_at,
    settled,
)


@dataclass(frozen=True, slots=True, eq=False)
class ThresholdRates:
    """Λ_max over the thresholds (uncached tokens) of a two-cluster problem with some roles, own caches.

    Where lengths have atoms, all thresholds between two of them route alike, so one search knows the rates with all.
    """

    split: Split
    n_prefill: int
    service: ServiceModel
    best_length: float
    """The best threshold in tokens of the whole prompt, an atom where lengths have some."""
    steps: "FloatArray | None"
    """Ascending lengths of whole prompts that thresholds may be; None: lengths have no atoms."""
    rates: "FloatArray | None"
    """Λ_max with each of `steps`."""

    @classmethod
    def of(cls, problem: PlanProblem, n_prefill: int, service: ServiceModel) -> "ThresholdRates":
        """Search the thresholds of a problem."""
        split = own_split(problem, service)
        candidates = candidate_lengths(split)
        loads = split.loads(candidates)
        if problem.workload.lengths.atoms() is None:
            length = best_of(split, [n_prefill], candidates, loads)[1]
            return cls(split, n_prefill, service, settled(problem, length), None, None)
        rates, limits = merits(split, loads, [n_prefill])
        (place,) = highest(rates, limits)
        length = settled(problem, float(candidates[place]), float(loads.offloaded[place]))
        return cls(split, n_prefill, service, length, candidates, rates[0])

    def best_tokens(self) -> float | None:
        """The threshold of the highest Λ_max; None where nothing can be offloaded."""
        return self.best_length * self.split.own_share if self.split.remote is not None else None

    def best_threshold(self) -> float:
        """The threshold of the highest Λ_max; infinite where nothing should be, or nothing can be, offloaded.

        Where lengths have atoms it is half way (in proportion) to the next one: both ends route what is known alike.
        """
        found, share = self.best_tokens(), self.split.own_share
        lengths = self.split.problem.workload.lengths
        if found is None or found >= lengths.high * share:
            return math.inf
        atoms = lengths.atoms()
        if found <= 0 or atoms is None:
            return found
        above = (atoms * share).searchsorted(found * (1 + 1e-12), side="right")
        return math.sqrt(found * float(atoms[above]) * share)

    def rate(self, threshold: float) -> float:
        """Λ_max with a threshold."""
        problem = self.split.problem
        if self.steps is None or self.rates is None:
            return rate_at(problem, threshold, self.n_prefill, self.service)
        length = settled(problem, threshold / self.split.own_share)
        return float(self.rates[max(int(self.steps.searchsorted(length, side="right")) - 1, 0)])
