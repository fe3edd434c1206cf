"""The two-cluster optimum (Eq. 7 and 8): every split of the PD cluster, and the threshold to machine precision."""

import math
from collections.abc import Mapping, Sequence

from prfaas.core.arrays import FloatArray, np
from prfaas.core.planner.loads import Loads, Split, pools_of
from prfaas.core.planner.operating_point import (
    CachePolicy,
    LinkUse,
    OperatingPoint,
    Roles,
    RouteUse,
    ServiceModel,
    Stage,
    StageKind,
)
from prfaas.core.planner.problem import PlanError, PlanProblem, path
from prfaas.core.planner.ttft import service_ttft

_GRID = 1024
# Of lengths that were observed, whose thresholds have an edge of 5 %: what lies between is found by looking closer.
_SAMPLE_GRID = 256
# A smaller part of all requests is the rounding of sums.
_NO_REQUESTS = 1e-12
# Lengths that were observed are a sample: less than this part is not looked for.
_FEW = 1e-3
_ZOOMS = 5
_ZOOM_POINTS = 33


def best_point(problem: PlanProblem, service: ServiceModel = "by length") -> OperatingPoint:
    """The operating point of the highest Λ_max (Eq. 6) of at most one PrfaaS and exactly one PD cluster.

    Where a range of thresholds gives the same Λ_max because decode is the limit, the one that leaves prefill
    the most room is taken: the balance of Eq. 7.

    Raises:
        PlanError: more clusters than that.
    """
    split, length, n_prefill = _best(problem, service)
    return point_of(split, length, n_prefill)


def _best(problem: PlanProblem, service: ServiceModel) -> tuple[Split, float, int]:
    """The search behind `best_point`: its two routes, length and prefill instances."""
    best: tuple[tuple[float, float], Split, float, int] | None = None
    for policy in policies(problem):
        split = split_of(problem, policy, service)
        if split is None:
            continue
        merit, length, n_prefill = best_of(split, split.pd.splits)
        if best is None or merit > best[0]:
            best = (merit, split, length, n_prefill)
    assert best is not None
    return best[1:]


def best_threshold(
    problem: PlanProblem, n_prefill: int, service: ServiceModel = "by length"
) -> OperatingPoint:
    """The best point with `n_prefill` of the PD cluster's instances as prefill (Eq. 7 alone), own caches."""
    split, length = _balance(problem, n_prefill, service)
    return point_of(split, length, n_prefill)


def best_rate(problem: PlanProblem, n_prefill: int) -> float:
    """Λ_max of `best_threshold` alone, by length."""
    split, length = _balance(problem, n_prefill, "by length")
    return _rate_of(split, length, n_prefill)


def best_prefill(problem: PlanProblem) -> int:
    """Prefill instances of the PD cluster at `best_point`, by length."""
    return _best(problem, "by length")[2]


def evaluate(
    problem: PlanProblem, threshold_tokens: float, n_prefill: int, service: ServiceModel = "by length"
) -> OperatingPoint:
    """The operating point with a threshold (uncached tokens) and a split that are given, own caches.

    Raises:
        PlanError: the problem has more than two clusters, or the split isn't one of 0 to all instances.
    """
    split = own_split(problem, service)
    if not 0 <= n_prefill <= split.pd.instances:
        raise PlanError(f"{n_prefill} prefill instances of {split.pd.instances} can't be")
    return point_of(split, threshold_tokens / split.own_share, n_prefill)


def split_of(problem: PlanProblem, policy: CachePolicy, service: ServiceModel) -> Split | None:
    """The two routes of a two-cluster problem under a cache policy; None if links for it are missing.

    Raises:
        PlanError: the problem has more than two clusters.
    """
    if not problem.is_two_cluster:
        raise PlanError("exact search is for one PrfaaS cluster and one PD cluster; use the linear programme")
    pd = problem.pd[0]
    local = path(problem, pd, pd, policy)
    if local is None:
        return None
    prfaas = problem.prfaas[0] if problem.prfaas else None
    remote = path(problem, prfaas, pd, policy) if prfaas is not None else None
    return Split(problem=problem, prfaas=prfaas, pd=pd, remote=remote, local=local, service=service)


def point_of(split: Split, length: float, n_prefill: int) -> OperatingPoint:
    """The operating point if prompts of more than `length` tokens (cached ones counted) are offloaded."""
    problem, pd = split.problem, split.pd
    length = settled(problem, length if split.remote is not None else math.inf)
    loads = split.loads(np.array([length], dtype=np.float64))
    p = float(loads.offloaded[0])
    p = 0.0 if p <= _NO_REQUESTS else 1.0 if p >= 1 - _NO_REQUESTS else p
    n_decode = pd.instances - n_prefill
    decode = _decode_rate(split, n_prefill)
    capacities = _capacities(split, loads, n_prefill)
    rate = _least(decode, capacities)
    own_links = {transfer.link for transfer in split.remote.transfers} if split.remote else set()
    prfaas_capacities = [
        value
        for (kind, name), value in capacities.items()
        if value is not None and (kind == "prfaas prefill" or name in own_links)
    ]
    local_capacity = capacities["pd prefill", pd.name]
    long_tokens, short_tokens = _mean_lengths(problem, length)
    mean_ttft, p90_ttft = service_ttft(pools_of(split, length, n_prefill), split.problem.first_token)
    stages = [
        Stage(
            f"{name} {'link' if kind == 'link' else 'prefill'}", kind, value, rate / value if value else 0.0
        )
        for (kind, name), value in capacities.items()
    ]
    stages.append(Stage(f"{pd.name} decode", "pd decode", decode, rate / decode if decode else 1.0))
    egress = {name: float(bits[0]) * rate for name, bits in loads.link_bits.items()}
    return OperatingPoint(
        threshold_tokens=length * split.own_share if split.remote is not None else None,
        n_prefill=n_prefill,
        n_decode=n_decode,
        theta_prfaas=min(prfaas_capacities) * p if p > 0 and prfaas_capacities else None,
        theta_pd_p=None if local_capacity is None else local_capacity * (1 - p),
        theta_pd_d=decode,
        lambda_max=rate,
        offloaded_fraction=p,
        mean_long_tokens=None if long_tokens is None else long_tokens * split.own_share,
        mean_short_tokens=None if short_tokens is None else short_tokens * split.own_share,
        egress_bits_per_s=sum(egress.values(), 0.0),
        ttft_mean_s=mean_ttft,
        ttft_p90_s=p90_ttft,
        n_prfaas=split.prfaas.instances if split.prfaas else 0,
        cache_policy=split.local.policy,
        roles=(Roles(pd.name, n_prefill, n_decode),),
        stages=tuple(stages),
        routes=tuple(_routes(split, length, p, long_tokens, short_tokens)),
        links=tuple(
            LinkUse(
                link.name,
                link.bandwidth_bits_per_s,
                egress[link.name],
                egress[link.name] / link.bandwidth_bits_per_s,
            )
            for link in problem.links
        ),
    )


def _rate_of(split: Split, length: float, n_prefill: int) -> float:
    """Λ_max of `point_of` alone."""
    length = settled(split.problem, length if split.remote is not None else math.inf)
    loads = split.loads(np.array([length], dtype=np.float64))
    return _least(_decode_rate(split, n_prefill), _capacities(split, loads, n_prefill))


def _decode_rate(split: Split, n_prefill: int) -> float:
    """Eq. 5: N_d · BS_max / (T_decode · L_out), requests per second."""
    pd, output_tokens = split.pd, split.problem.workload.output_tokens
    return (pd.instances - n_prefill) * pd.decode_batch / (pd.decode_step_s * output_tokens)


def _least(decode: float, capacities: "Mapping[tuple[StageKind, str], float | None]") -> float:
    """The first stage that is full."""
    return min([decode, *(value for value in capacities.values() if value is not None)])


def settled(problem: PlanProblem, length: float) -> float:
    """0 if (almost) every prompt is longer, the lowest threshold that no prompt is above if (almost) none is."""
    lengths = problem.workload.lengths
    p = float(lengths.beyond(np.array([length]))[0][0])
    return lengths.highest_threshold if p < _NO_REQUESTS else 0.0 if p > 1 - _NO_REQUESTS else length


def policies(problem: PlanProblem) -> tuple[CachePolicy, ...]:
    """The cache policies that differ for this problem."""
    ratios = {problem.hit_ratio(cluster) for cluster in problem.clusters}
    return ("own",) if len(ratios) == 1 else ("own", "best")


def _balance(problem: PlanProblem, n_prefill: int, service: ServiceModel) -> tuple[Split, float]:
    split = own_split(problem, service)
    return split, best_of(split, range(n_prefill, n_prefill + 1))[1]


def own_split(problem: PlanProblem, service: ServiceModel) -> Split:
    """The two routes where every cluster uses its own cache."""
    split = split_of(problem, "own", service)
    assert split is not None  # without the "best" policy a cluster can always prefill for itself
    return split


def candidate_lengths(split: Split) -> FloatArray:
    """Candidate thresholds in tokens of the whole prompt, ascending."""
    lengths = split.problem.workload.lengths
    if split.remote is None:
        return np.array([lengths.highest_threshold])
    if lengths.atoms() is not None:
        return lengths.thresholds(_SAMPLE_GRID)
    spread = np.geomspace(lengths.low, lengths.highest_threshold, _GRID)
    return np.unique(np.append(lengths.thresholds(_GRID), spread))


Found = tuple[tuple[float, float], float, int]
"""(Λ, prefill's own limit), the length and the number of prefill instances that give it."""


def best_of(
    split: Split, splits: Sequence[int], candidates: "FloatArray | None" = None, loads: Loads | None = None
) -> Found:
    """The best of all `splits`.

    `candidates`: what `candidate_lengths` gives, with their `loads`; None: they are worked out here.
    """
    candidates = candidate_lengths(split) if candidates is None else candidates
    rates, limits = merits(split, loads or split.loads(candidates), splits)
    best: Found = ((-1.0, -1.0), 0.0, 0)
    for row, (n_prefill, index) in enumerate(zip(splits, _highest(rates, limits), strict=True)):
        found = ((float(rates[row, index]), float(limits[row, index])), float(candidates[index]), n_prefill)
        # One that is much worse than one before it is not looked at more closely. Between candidates hides what one
        # part in twenty of the largest atom is worth, at most.
        if found[0][0] > 0.95 * max(best[0][0], 0.0):
            found = _zoom(split, candidates, index, rates[row], limits[row], found)
        best = max(best, found)
    return best


def _zoom(
    split: Split, candidates: FloatArray, last: int, rates: FloatArray, limits: FloatArray, found: Found
) -> Found:
    """What is better than the candidate at `last`, the best, between its neighbours.

    Where no prompt is as long as any of several candidates, all of them are the best: what is better may lie on
    either side of these.
    """
    is_sample = split.problem.workload.lengths.atoms() is not None
    for _ in range(_ZOOMS):
        is_worse = (rates != rates[last]) | (limits != limits[last])
        first = int(np.flatnonzero(is_worse[:last]).max(initial=-1)) + 1
        below, above = candidates[max(first - 1, 0)], candidates[min(last + 1, len(candidates) - 1)]
        if below == above:
            break
        alike = candidates[[first, last]]
        beside = [(below, above)] if first == last else [(below, alike[0]), (alike[1], above)]
        points = [np.linspace(start, end, _ZOOM_POINTS) for start, end in beside]
        candidates = np.unique(np.concatenate([*points, alike]))
        loads = split.loads(candidates)
        rates, limits = (each[0] for each in merits(split, loads, [found[2]]))
        (last,) = _highest(rates[None], limits[None])
        found = max(found, ((float(rates[last]), float(limits[last])), float(candidates[last]), found[2]))
        away, home = sides_of(split, loads, found[2])
        if is_sample and np.minimum(away[1:], home[:-1]).max() < (1 + _FEW) * found[0][1]:
            break
    return found


def _highest(rates: FloatArray, limits: FloatArray) -> list[int]:
    """Per row the place of the highest rate; among ties, the last one with the highest limit."""
    # No limit is below 0.
    best = np.where(rates == rates.max(axis=1)[:, None], limits, -1.0)
    last = best.shape[1] - 1
    places: list[int] = (last - best[:, ::-1].argmax(axis=1)).tolist()
    return places


def merits(split: Split, loads: Loads, splits: Sequence[int]) -> "tuple[FloatArray, FloatArray]":
    """Λ, and Λ without the limit of decode: a row for every split, over the lengths of the loads."""
    # All splits at once: a row each.
    prefill = np.array(splits, dtype=np.float64)[:, None]
    limits = np.minimum(*sides_of(split, loads, prefill))
    per_decoder = split.pd.decode_rate(split.problem.workload.output_tokens)
    return np.minimum(limits, (split.pd.instances - prefill) * per_decoder), limits


def sides_of(split: Split, loads: Loads, prefill: "float | FloatArray") -> "tuple[FloatArray, FloatArray]":
    """The limits of the PrfaaS cluster with all links, and of `prefill` instances of the PD cluster."""
    away = _ratio(0 if split.prfaas is None else split.prfaas.instances, loads.prfaas_s)
    for link in split.problem.links:
        away = np.minimum(away, _ratio(link.bandwidth_bits_per_s, loads.link_bits[link.name]))
    return away, _ratio(prefill, loads.pd_s)


def _ratio(capacity: "float | FloatArray", load: FloatArray) -> FloatArray:
    """Infinite where there is no load; a column of capacities gives a row for each."""
    shape = load.shape if isinstance(capacity, int | float) else (len(capacity), len(load))
    result = np.full(shape, math.inf)
    np.divide(capacity, load, out=result, where=load > 0)
    return result


def _capacities(split: Split, loads: Loads, n_prefill: int) -> dict[tuple[StageKind, str], float | None]:
    """The request rate at which each stage but decode is full, by the first loads; None: it has nothing to do."""
    found: dict[tuple[StageKind, str], float | None] = {}

    def add(kind: StageKind, name: str, capacity: float, load: float) -> None:
        found[kind, name] = capacity / load if load > 0 else None

    if split.prfaas is not None:
        add("prfaas prefill", split.prfaas.name, split.prfaas.instances, float(loads.prfaas_s[0]))
    for link in split.problem.links:
        add("link", link.name, link.bandwidth_bits_per_s, float(loads.link_bits[link.name][0]))
    add("pd prefill", split.pd.name, n_prefill, float(loads.pd_s[0]))
    return found


def _mean_lengths(problem: PlanProblem, threshold: float) -> tuple[float | None, float | None]:
    """E[L] of the prompts that are longer, and of the others; None where there are none."""
    lengths = problem.workload.lengths
    (mass,), (tokens,) = lengths.beyond(np.array([threshold]))
    low, high, rest = lengths.low, lengths.high, 1 - mass
    long = min(max(float(tokens / mass), low), high) if mass > _NO_REQUESTS else None
    short = min(max(float((lengths.mean() - tokens) / rest), low), high) if rest > _NO_REQUESTS else None
    return long, short


def _routes(
    split: Split, length: float, p: float, long_tokens: float | None, short_tokens: float | None
) -> list[RouteUse]:
    lengths, share = split.problem.workload.lengths, split.own_share
    routes = []
    if short_tokens is not None:
        end = min(length, lengths.high)
        routes.append(
            RouteUse(split.pd.name, split.pd.name, 1 - p, short_tokens * share, 0.0, to_tokens=end * share)
        )
    if long_tokens is not None and split.prfaas is not None:
        routes.append(
            RouteUse(
                split.prfaas.name,
                split.pd.name,
                p,
                long_tokens * share,
                length * share,
                to_tokens=lengths.high * share,
            )
        )
    return routes
