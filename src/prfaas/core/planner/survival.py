"""What a deployment still carries when a link, a cluster or an instance is gone, and what it takes to lose nothing."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from prfaas.core.planner.cost import instances_per_hour
from prfaas.core.planner.fixed_roles import rate_with_roles
from prfaas.core.planner.operating_point import OperatingPoint
from prfaas.core.planner.plan import best_operation
from prfaas.core.planner.problem import MOST_INSTANCES, PdCluster, PlanError, PlanProblem, PrfaasCluster

Cluster = TypeVar("Cluster", PrfaasCluster, PdCluster)
LossKind = Literal["link", "cluster", "instance"]
"""What may be gone."""

# So large a part of a rate is all of it but for rounding.
_ALL = 1 - 1e-6
# So many times the GPUs that there are may be added.
_MOST_ADDED = 4


@dataclass(frozen=True, slots=True)
class Loss:
    """One thing that may be gone, and the rates in requests per second that are left then, by E[T(L)]."""

    kind: LossKind
    name: str
    """Of the link or cluster; of an instance that of its cluster."""
    rate_at_once: float
    """With the roles as they stand; of an instance of a PD cluster with the role whose loss costs more."""
    rate_after_roles: float
    """With the best roles for what is left."""

    def __str__(self) -> str:
        return f"an instance of {self.name}" if self.kind == "instance" else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class SpareInstances:
    """Instances that a deployment needs in addition to keep a rate when any one thing of a kind is gone."""

    worst: Loss
    """Of all losses of the kind, as things are."""
    wanted_rate: float
    """That is to be kept, requests per second."""
    cluster: str | None = None
    """Where the instances are added; None where no single cluster could keep the rate."""
    instances: int = 0
    cost_ratio: float | None = None
    """What all instances cost then over what they cost now; None without prices."""

    def __str__(self) -> str:
        left, wanted = self.worst.rate_after_roles, f"{self.wanted_rate:.3g}"
        kept = f"Without {self.worst} {left:.3g} of {wanted} requests/s are left"
        if self.cluster is None:
            return f"{kept}; more instances in one cluster alone don't keep all of it."
        if not self.instances:
            return f"{kept}: nothing more is needed."
        cost = "" if self.cost_ratio is None else f", at {self.cost_ratio:.2f} times the cost of instances"
        more = f"{self.instances} more in {self.cluster}{cost}"
        return f"{kept}. To keep {wanted} whichever {self.worst.kind} is gone takes {more}."


def losses(problem: PlanProblem, point: OperatingPoint) -> tuple[Loss, ...]:
    """The rates that are left without each link, each cluster, and one instance (or group) of each cluster.

    `point` says how the problem is operated. Raises PlanError where the solver gave up.
    """
    roles = {each.cluster: each.prefill for each in point.roles}
    possible: list[tuple[LossKind, str]] = [("link", link.name) for link in problem.links]
    possible += [("cluster", cluster.name) for cluster in problem.clusters]
    possible += [("instance", cluster.name) for cluster in problem.clusters]
    found = []
    for kind, name in possible:
        left = _without(problem, kind, name)
        after, at_once = _best_rate(left), 0.0
        if left is not None:
            stay = {pd.name: min(roles[pd.name], pd.instances) for pd in left.pd}
            at_once = rate_with_roles(left, stay)
            lost = next((pd.group_ranks for pd in left.pd if (kind, pd.name) == ("instance", name)), 0)
            if 0 < lost <= roles.get(name, 0):
                fewer = stay | {name: roles[name] - lost}
                at_once = min(at_once, rate_with_roles(left, fewer))
        found.append(Loss(kind, name, min(at_once, after), after))
    return tuple(found)


def reserve_for(problem: PlanProblem, wanted_rate: float, found: tuple[Loss, ...]) -> SpareInstances:
    """The cheapest instances, all in one cluster, with which a rate is kept whichever of these losses there is.

    Args:
        problem: What is planned.
        wanted_rate: Requests per second.
        found: Losses of one kind, as `losses` has them.

    Raises:
        PlanError: the solver gave up.
    """
    # What is worst now mostly says at once that a reserve is too small.
    ordered = sorted(found, key=lambda loss: loss.rate_after_roles)
    gpus, cost = sum(each.gpus for each in problem.clusters), instances_per_hour(problem)
    best = SpareInstances(ordered[0], wanted_rate)
    for cluster in problem.clusters:
        step, name = cluster.group_ranks if isinstance(cluster, PdCluster) else 1, cluster.name

        def keeps(count: int, name: str = name) -> bool:
            more = _with_more(problem, name, count)
            rates = (_best_rate(_without(more, loss.kind, loss.name)) for loss in ordered)
            return all(rate >= wanted_rate * _ALL for rate in rates)

        most = min(_MOST_ADDED * gpus // cluster.gpus_per_instance, MOST_INSTANCES - cluster.instances)
        counts = range(0, most + 1, step)
        place = bisect_left(counts, True, key=keeps)
        if place == len(counts):
            continue
        count = counts[place]
        then = instances_per_hour(_with_more(problem, name, count))
        ratio = then / cost if cost and then is not None else None
        if best.cluster is None or (ratio or count) < (best.cost_ratio or best.instances):
            best = SpareInstances(ordered[0], wanted_rate, name, count, ratio)
    return best


def _without(problem: PlanProblem, kind: LossKind, name: str) -> PlanProblem | None:
    """What is left; None where nothing decodes then. Instances of a group are gone together."""
    if kind == "link":
        return replace(problem, links=tuple(link for link in problem.links if link.name != name))
    lost = next((pd.group_ranks for pd in problem.pd if pd.name == name), 1)
    if kind == "instance" and any(each.name == name and each.instances > lost for each in problem.clusters):
        return _with_more(problem, name, -lost)
    pd = tuple(each for each in problem.pd if each.name != name)
    prfaas = tuple(each for each in problem.prfaas if each.name != name)
    links = tuple(link for link in problem.links if name not in (link.source, link.target))
    return replace(problem, prfaas=prfaas, pd=pd, links=links) if pd else None


def _with_more(problem: PlanProblem, name: str, more: int) -> PlanProblem:
    def grown(cluster: Cluster) -> Cluster:
        return replace(cluster, instances=cluster.instances + more) if cluster.name == name else cluster

    return replace(problem, prfaas=tuple(map(grown, problem.prfaas)), pd=tuple(map(grown, problem.pd)))


def _best_rate(left: PlanProblem | None) -> float:
    """With the best roles for what is left."""
    try:
        return 0.0 if left is None else best_operation(left).lambda_max
    except PlanError:
        return 0.0
