"""The work of the stages of two clusters per request, with some roles and the best threshold for them."""

import math
from collections.abc import Sequence

from prfaas.core.planner.loads import Split, work_of
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.planner.ttft import PrefillPoolLoad, ServiceTimes, StageWork
from prfaas.core.planner.two_clusters import (
    best_of,
    candidate_lengths,
    highest,
    merits,
    own_split,
    settled,
)


def work_with_prefill(problem: PlanProblem, n_prefill: int) -> StageWork:
    """The stages' work at `best_threshold`. What links add to requests' time (`LinkTime`) may be left out."""
    return works_with_prefill(problem, [n_prefill])[n_prefill]


def works_with_prefill(problem: PlanProblem, counts: Sequence[int]) -> dict[int, StageWork]:
    """`work_with_prefill` by number of prefill instances; what these have in common is worked out once."""
    split = own_split(problem, "mean length")
    if split.remote is None:
        return {count: work_of(split, settled(problem, math.inf), count) for count in counts}
    if problem.workload.lengths.atoms() is not None:
        return _works_at_atoms(split, counts)
    candidates = candidate_lengths(split)
    loads = split.loads(candidates)
    best = {count: best_of(split, [count], candidates, loads)[1] for count in counts}
    return {count: work_of(split, settled(problem, length), count) for count, length in best.items()}


def _works_at_atoms(split: Split, counts: Sequence[int]) -> dict[int, StageWork]:
    """What service times each atom has is known before, whatever the threshold."""
    assert split.remote is not None and split.prfaas is not None  # else nothing is divided
    problem = split.problem
    candidates, bins = candidate_lengths(split), problem.workload.lengths.fine_bins()
    loads = split.loads(candidates)
    stays = ServiceTimes.of(split.pd.prefill_s(split.local.share * bins.lengths), bins.weights)
    goes = ServiceTimes.of(split.prfaas.prefill_s(split.remote.share * bins.lengths), bins.weights)
    works, far = {}, split.prfaas
    for count, place in zip(counts, highest(*merits(split, loads, counts)), strict=True):
        threshold = settled(problem, float(candidates[place]), float(loads.offloaded[place]))
        beyond = problem.workload.lengths.parts_beyond(bins, threshold)
        pools = []
        if beyond[0] < 1:
            pools.append(PrefillPoolLoad(split.pd.name, count, stays.parts(1 - beyond), False))
        if beyond[-1] > 0:
            pools.append(PrefillPoolLoad(far.name, far.instances, goes.parts(beyond), False))
        link_rates = {
            link.name: link.bandwidth_bits_per_s / bits
            for link in problem.links
            if (bits := float(loads.link_bits[link.name][place])) > 0
        }
        works[count] = StageWork(tuple(pools), link_rates, {split.pd.name: 1.0})
    return works
