"""The work of the stages of two clusters per request, with some roles and the best threshold for them."""

import math
from collections.abc import Sequence

from prfaas.core.planner.loads import work_of
from prfaas.core.planner.problem import PlanProblem
from prfaas.core.planner.ttft import PrefillPoolLoad, ServiceTimes, StageWork
from prfaas.core.planner.two_clusters import candidate_lengths, highest, merits, own_split, settled


def work_with_prefill(problem: PlanProblem, n_prefill: int) -> StageWork:
    """The stages' work at `best_threshold`. What links add to requests' time (`LinkTime`) may be left out."""
    return works_with_prefill(problem, [n_prefill])[n_prefill]


def works_with_prefill(problem: PlanProblem, counts: Sequence[int]) -> dict[int, StageWork]:
    """`work_with_prefill` by number of prefill instances; what these have in common is worked out once."""
    split = own_split(problem, "mean length")
    if split.remote is None or split.prfaas is None:
        return {count: work_of(split, settled(problem, math.inf), count) for count in counts}
    law, candidates = problem.workload.lengths, candidate_lengths(split)
    bins, is_smooth, loads = law.fine_bins(), law.atoms() is None, split.loads(candidates)
    # What service times each bin has is known before, whatever the threshold.
    stays = ServiceTimes.of(split.pd.prefill_s(split.local.share * bins.lengths), bins.weights)
    goes = ServiceTimes.of(split.prfaas.prefill_s(split.remote.share * bins.lengths), bins.weights)
    works, far = {}, split.prfaas
    for count, place in zip(counts, highest(*merits(split, loads, counts)), strict=True):
        threshold = settled(problem, float(candidates[place]), float(loads.offloaded[place]))
        beyond = law.parts_beyond(bins, threshold)
        pools = []
        if beyond[0] < 1:
            pools.append(PrefillPoolLoad(split.pd.name, count, stays.parts(1 - beyond), is_smooth))
        if beyond[-1] > 0:
            pools.append(PrefillPoolLoad(far.name, far.instances, goes.parts(beyond), is_smooth))
        link_rates = {
            link.name: link.bandwidth_bits_per_s / bits
            for link in problem.links
            if (bits := float(loads.link_bits[link.name][place])) > 0
        }
        works[count] = StageWork(tuple(pools), link_rates, {split.pd.name: 1.0})
    return works
