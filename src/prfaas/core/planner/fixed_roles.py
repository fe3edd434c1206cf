"""The throughput of a running deployment with its roles as they are, and the best thresholds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prfaas.core.arrays import FloatArray, OfLength, np
from prfaas.core.planner.loads import HelpedSplit, Helper, Split
from prfaas.core.planner.plan import best_operation
from prfaas.core.planner.problem import PdCluster, PlanLink, PlanProblem, PrfaasCluster, all_paths
from prfaas.core.planner.routing import RoutingPlan, best_routing
from prfaas.core.planner.two_clusters import (
    best_of,
    best_prefill,
    best_rate,
    candidate_lengths,
    own_split,
    settled,
    sides_of,
)

# Requests per second that an instance decodes where decode is left out.
_NO_LIMIT = 1e6
# A PD cluster without requests would have no threshold: each is given at least this part of them.
_LEAST_PART = 1e-3
# A smaller part of a cluster's time is the solver's rounding.
_NO_TIME = 1e-6


def rate_with_roles(problem: PlanProblem, prefill: Mapping[str, int]) -> float:
    """Λ_max with the best routes, if `prefill[cluster]` instances of each PD cluster prefill; 0 if nothing flows."""
    if problem.is_two_cluster:
        return best_rate(problem, prefill[problem.pd[0].name])
    found = best_routing(problem, all_paths(problem), prefill)
    return 0.0 if found is None else found.rate()


def best_roles(problem: PlanProblem) -> dict[str, int]:
    """Prefill instances by PD cluster at the planner's best operating point."""
    if problem.is_two_cluster:
        return {problem.pd[0].name: best_prefill(problem)}
    return {roles.cluster: roles.prefill for roles in best_operation(problem).roles}


def even_spread(problem: PlanProblem, prefill: Mapping[str, int]) -> dict[str, float]:
    """The part of all requests that each PD cluster decodes if all are equally full: by N_d · BS_max / T_decode.

    Where every instance prefills, one is taken to decode too.
    """
    output = problem.workload.output_tokens
    rates = {pd.name: max(pd.instances - prefill[pd.name], 1) * pd.decode_rate(output) for pd in problem.pd}
    total = sum(rates.values(), 0.0)
    if total <= 0:
        return {name: 1 / len(rates) for name in rates}
    return {name: rate / total for name, rate in rates.items()}


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """The prefill capacity of one PD cluster: its own instances, and others over links.

    Decode is left out, since no threshold changes it. Thresholds are in uncached tokens.
    """

    problem: PlanProblem
    """The problem of this PD cluster and at most one PrfaaS cluster."""
    n_prefill: int
    """Instances of the PD cluster that prefill."""
    part: float
    """Of all requests of the deployment, the part that this cluster decodes."""
    helpers: "tuple[Helper, ...]" = ()
    """What the PrfaaS cluster of the problem stands for; none: itself."""

    @property
    def is_reached(self) -> bool:
        """True if others than its own instances can prefill for the PD cluster."""
        target = self.problem.pd[0].name
        return any(link.target == target for link in self.problem.links)

    def best_beside(self, now: float | None, margin: float) -> "tuple[float, float, float | None]":
        """The threshold of the balance of Eq. 7, its rate, and that of the threshold `now`; None: there is none yet.

        By what prefill and links carry; infinite where nothing is to go.

        Where no threshold can carry more by `margin`, which is sooner known than the best one, `now` is given back.
        """
        split, highest = self._split(), self.problem.workload.lengths.highest_threshold
        candidates, before = candidate_lengths(split), None
        if now is not None:
            # Where nothing can go, all stays whatever the threshold is.
            here = highest if split.remote is None else min(now / split.own_share, highest)
            place = int(candidates.searchsorted(here))
            candidates = np.concatenate([candidates[:place], [here], candidates[place:]])
        loads = split.loads(candidates)
        if now is not None:
            away, home = sides_of(split, loads, self.n_prefill)
            before = float(min(away[place], home[place]))
            # The more stay the less is carried at home, and the more away: so much between two candidates at most.
            most = np.minimum(away[1:], home[:-1]).max(initial=0.0)
            if split.remote is not None and most <= before * (1 + margin):
                return now, before, before
        (after, _), length, _ = best_of(split, [self.n_prefill], candidates, loads)
        length = settled(self.problem, length)
        return math.inf if length >= highest else length * split.own_share, after, before

    def _split(self) -> Split:
        split = own_split(self.problem, "by length")
        if not self.helpers:
            return split
        return HelpedSplit(
            problem=split.problem,
            prfaas=split.prfaas,
            pd=split.pd,
            remote=split.remote,
            local=split.local,
            service=split.service,
            helpers=self.helpers,
        )


def prefill_sides(
    problem: PlanProblem,
    prefill: Mapping[str, int],
    spread: Mapping[str, float],
) -> dict[str, PrefillSide]:
    """The prefill side of every PD cluster, by its name.

    Two clusters are what they are. Of more, each prefill cluster's instances are divided among the PD clusters that
    it prefills for, as the planner's linear programme for the present roles divides their time; every PD cluster then
    decodes its part (`spread`) of the requests of every length. Where one is the limit and can't use all it is granted,
    that is not given to others. Several clusters that prefill for one PD cluster become one, whose rate is
    Σ min(N / E[T_prefill], B / E[S_kv]): Eq. 3, summed, since policies give each of them prompts of every length.
    """
    without = _without_decode(problem, prefill)
    if problem.is_two_cluster:
        name = problem.pd[0].name
        return {name: PrefillSide(without, prefill[name], 1.0)}
    parts = {pd.name: max(spread[pd.name], _LEAST_PART) for pd in problem.pd}
    parts = {name: part / sum(parts.values(), 0.0) for name, part in parts.items()}
    granted = _granted(without, prefill, parts)
    return {pd.name: _side(without, pd, granted, parts[pd.name]) for pd in without.pd}


def _without_decode(problem: PlanProblem, prefill: Mapping[str, int]) -> PlanProblem:
    output = problem.workload.output_tokens
    return replace(
        problem,
        pd=tuple(
            replace(pd, instances=prefill[pd.name] + 1, decode_batch=_NO_LIMIT * pd.decode_step_s * output)
            for pd in problem.pd
        ),
    )


def _granted(
    problem: PlanProblem, prefill: Mapping[str, int], parts: Mapping[str, float]
) -> dict[tuple[str, str], float]:
    """Instances (not whole ones) of each prefill cluster that work for each PD cluster."""
    instances = {cluster.name: prefill.get(cluster.name, cluster.instances) for cluster in problem.clusters}
    found = best_routing(problem, all_paths(problem), prefill, parts)
    granted: dict[tuple[str, str], float] = {}
    for cluster in problem.clusters:
        reached = [
            pd.name
            for pd in problem.pd
            if pd.name == cluster.name or problem.link(cluster.name, pd.name) is not None
        ]
        # Without a solution (some cluster has nothing that could prefill for it) by requests.
        time_s = {name: parts[name] for name in reached}
        if found is not None:
            used = {name: _time_s(found, cluster, name) for name in reached}
            total = sum(used.values(), 0.0)
            if total > 0:
                time_s = {name: used[name] if used[name] > _NO_TIME * total else 0.0 for name in reached}
        total = sum(time_s.values(), 0.0)
        for name in reached:
            granted[cluster.name, name] = instances[cluster.name] * time_s[name] / total
    return granted


def _time_s(routing: RoutingPlan, cluster: PrfaasCluster | PdCluster, decode: str) -> float:
    """Seconds of `cluster` per request of the deployment, on requests that `decode` decodes."""
    return sum(
        (
            float((routing.shares[:, k] * routing.lengths.means(cluster.prefill_s, path.share)).sum())
            for k, path in enumerate(routing.paths)
            if path.prefill == cluster.name and path.decode == decode
        ),
        0.0,
    )


def _side(
    problem: PlanProblem,
    pd: PdCluster,
    granted: Mapping[tuple[str, str], float],
    part: float,
) -> PrefillSide:
    own = granted[pd.name, pd.name]
    home = (
        replace(pd, instances=2, prefill_s=_Divided(pd.prefill_s, own))
        if own > 0
        else replace(pd, instances=1)
    )
    helpers = tuple(
        Helper(
            cluster.prefill_s,
            granted[cluster.name, pd.name],
            link.bandwidth_bits_per_s,
            problem.kv_bytes_over(link.name),
        )
        for cluster in problem.clusters
        if cluster.name != pd.name
        and (link := problem.link(cluster.name, pd.name)) is not None
        and granted[cluster.name, pd.name] > 0
    )
    # Its links are in the curve.
    name = f"others for {pd.name}"
    away = PrfaasCluster(name, name, 1, 1, _Together(helpers), prefix_hit_ratio=pd.prefix_hit_ratio)
    alone = replace(
        problem,
        prfaas=(away,) if helpers else (),
        pd=(home,),
        links=(PlanLink(name, pd.name, math.inf),) if helpers else (),
    )
    return PrefillSide(alone, home.instances - 1, part, helpers)


@dataclass(frozen=True, slots=True)
class _Divided:
    """Seconds of a prefill on `instances` instances together."""

    prefill_s: OfLength
    instances: float

    def __call__(self, tokens: FloatArray) -> FloatArray:
        return self.prefill_s(tokens) / self.instances


@dataclass(frozen=True, slots=True)
class _Together:
    """Seconds per request of one length of prefill clusters and their links together."""

    helpers: Sequence[Helper]

    def __call__(self, tokens: FloatArray) -> FloatArray:
        rates = [
            1 / np.maximum(each.prefill_s(tokens) / each.instances, each.link_s(tokens))
            for each in self.helpers
        ]
        total: FloatArray = 1 / np.sum(rates, axis=0)
        return total
