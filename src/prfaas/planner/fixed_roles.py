"""The questions of a deployment that runs: what given roles and thresholds can do, and which thresholds are best."""

import math
from collections.abc import Mapping
from dataclasses import replace

from prfaas.planner.errors import PlanError
from prfaas.planner.network import network_with_roles
from prfaas.planner.paths import all_paths
from prfaas.planner.plan_problem import PlanProblem
from prfaas.planner.point import ServiceModel
from prfaas.planner.routing import Dispatch, Routing, best_routing
from prfaas.planner.search import best_threshold, evaluate

# Requests per second that an instance decodes where decode is left out.
_NO_LIMIT = 1e6
# A smaller part of a cluster's requests is the solver's rounding.
_NOBODY = 1e-6
# A PD cluster without requests would have no threshold: each is given at least this part of them.
_LEAST_PART = 1e-3


def rate_with_roles(
    problem: PlanProblem, prefill: Mapping[str, int], service: ServiceModel = "mean length"
) -> float:
    """Λ_max with the best routes, if `prefill[cluster]` instances of each PD cluster prefill; 0 if nothing flows."""
    if problem.is_two_cluster:
        return best_threshold(problem, prefill[problem.pd[0].name], service).lambda_max
    try:
        return network_with_roles(problem, prefill, service).lambda_max
    except PlanError:
        return 0.0


def even_spread(problem: PlanProblem, prefill: Mapping[str, int]) -> dict[str, float]:
    """The part of all requests that each PD cluster decodes if all are equally full: by N_d · BS_max / T_decode.

    Where every instance prefills, one is taken to decode too.
    """
    output = problem.workload.output_tokens
    rates = {pd.name: max(pd.instances - prefill[pd.name], 1) * pd.decode_rate(output) for pd in problem.pd}
    total = sum(rates.values())
    if total <= 0:
        return {name: 1 / len(rates) for name in rates}
    return {name: rate / total for name, rate in rates.items()}


def best_thresholds(
    problem: PlanProblem,
    prefill: Mapping[str, int],
    spread: Mapping[str, float],
    service: ServiceModel = "mean length",
) -> dict[str, float]:
    """The threshold of each PD cluster, in uncached tokens, that makes the prefill side of given roles strongest.

    Decode is left out: no threshold changes it, and where it is the limit this is the balance of Eq. 7. Two clusters
    are searched exactly. More are a linear programme in which every PD cluster decodes its part (`spread`) of the
    requests of every length; what part of them it should offload makes its threshold. Where lengths have atoms, the
    threshold is half way (in proportion) to the next one: both ends route what is known alike.
    Infinite where nothing should be, or nothing can be, offloaded.
    """
    without = _without_decode(problem, prefill)
    if problem.is_two_cluster:
        name = problem.pd[0].name
        found = best_threshold(without, prefill[name], service).threshold_tokens
        return {name: math.inf if found is None else _between_atoms(problem, found, name)}
    parts = _parts(problem, spread)
    best = best_routing(without, all_paths(without), prefill, service, Dispatch(parts))
    if best is None:
        return {pd.name: math.inf for pd in problem.pd}
    return {
        pd.name: _between_atoms(problem, _threshold(best[0], pd.name, parts[pd.name]), pd.name)
        for pd in problem.pd
    }


def prefill_rate(
    problem: PlanProblem,
    prefill: Mapping[str, int],
    thresholds: Mapping[str, float],
    spread: Mapping[str, float],
    service: ServiceModel = "mean length",
) -> float:
    """Λ_max with given roles and thresholds if decode were no limit; 0 if nothing flows."""
    without = _without_decode(problem, prefill)
    if problem.is_two_cluster:
        name = problem.pd[0].name
        return evaluate(without, thresholds[name], prefill[name], service).lambda_max
    best = best_routing(
        without, all_paths(without), prefill, service, Dispatch(_parts(problem, spread), thresholds)
    )
    return 0.0 if best is None else best[0].rate(service)


def _parts(problem: PlanProblem, spread: Mapping[str, float]) -> dict[str, float]:
    parts = {pd.name: max(spread[pd.name], _LEAST_PART) for pd in problem.pd}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}


def _without_decode(problem: PlanProblem, prefill: Mapping[str, int]) -> PlanProblem:
    output = problem.workload.output_tokens
    return replace(
        problem,
        pd=tuple(
            replace(
                pd,
                instances=prefill[pd.name] + 1,
                decode_batch=_NO_LIMIT * pd.decode_step_s * output,
            )
            for pd in problem.pd
        ),
    )


def _threshold(routing: Routing, name: str, part: float) -> float:
    """In uncached tokens: the longest requests go, as many as the programme offloads for this cluster."""
    problem = routing.problem
    remote = sum(
        float(routing.mass[k])
        for k, path in enumerate(routing.paths)
        if path.decode == name and not path.is_local
    )
    offloaded = remote / part
    if offloaded >= 1 - _NOBODY:
        return 0.0
    lengths = problem.workload.lengths
    length = lengths.high if offloaded <= _NOBODY else lengths.quantile(1 - offloaded)
    return length * _uncached(problem, name)


def _between_atoms(problem: PlanProblem, threshold: float, name: str) -> float:
    import numpy as np

    lengths, share = problem.workload.lengths, _uncached(problem, name)
    if threshold >= lengths.high * share:
        return math.inf
    atoms = lengths.atoms()
    if threshold <= 0 or atoms is None:
        return threshold
    above = float(atoms[np.searchsorted(atoms * share, threshold * (1 + 1e-12), side="right")]) * share
    return math.sqrt(threshold * above)


def _uncached(problem: PlanProblem, name: str) -> float:
    return 1 - problem.hit_ratio(next(pd for pd in problem.pd if pd.name == name))
