"""Ways for a request: which cluster prefills, which decodes, what is computed and what crosses which link."""

from dataclasses import dataclass

from prfaas.planner.plan_problem import PdCluster, PlanProblem, PrfaasCluster
from prfaas.planner.point import CachePolicy


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV of `share` × length tokens crosses the link of this name."""

    link: str
    share: float


@dataclass(frozen=True, slots=True)
class Path:
    """A request of length l (whole prompt) is prefilled by `prefill`, which computes `share` × l tokens of it."""

    prefill: str
    decode: str
    policy: CachePolicy
    share: float
    transfers: tuple[Transfer, ...]

    @property
    def is_local(self) -> bool:
        """True if the request stays in one cluster."""
        return self.prefill == self.decode


def path(
    problem: PlanProblem, prefill: PrfaasCluster | PdCluster, decode: PdCluster, policy: CachePolicy
) -> Path | None:
    """The way of requests from one cluster to another under a cache policy; None if a link for it is missing.

    Only what the destination doesn't hold crosses a link (section 3.4.3). With the policy "best" the longer
    cached prefix goes first to the cluster that computes.
    """
    ratio, decode_ratio = problem.hit_ratio(prefill), problem.hit_ratio(decode)
    if prefill.name == decode.name:
        if policy == "own":
            return Path(prefill.name, decode.name, policy, 1 - ratio, ())
        return _local_with_best(problem, decode, decode_ratio)
    forward = problem.link(prefill.name, decode.name)
    if forward is None:
        return None
    back = Transfer(forward.name, 1 - decode_ratio)
    if policy == "own" or ratio >= decode_ratio:
        return Path(prefill.name, decode.name, policy, 1 - ratio, (back,))
    reverse = problem.link(decode.name, prefill.name)
    if reverse is None:
        return None
    fetched = Transfer(reverse.name, decode_ratio - ratio)
    return Path(prefill.name, decode.name, policy, 1 - decode_ratio, (fetched, back))


def _local_with_best(problem: PlanProblem, decode: PdCluster, decode_ratio: float) -> Path | None:
    sources = [
        (problem.hit_ratio(other), link)
        for other in problem.clusters
        if other.name != decode.name
        and (link := problem.link(other.name, decode.name)) is not None
        and problem.hit_ratio(other) > decode_ratio
    ]
    if not sources:
        return Path(decode.name, decode.name, "best", 1 - decode_ratio, ())
    ratio, link = max(sources, key=lambda source: source[0])
    return Path(decode.name, decode.name, "best", 1 - ratio, (Transfer(link.name, ratio - decode_ratio),))


def all_paths(problem: PlanProblem) -> tuple[Path, ...]:
    """Every way that the links allow, each once: where both cache policies do the same, only "own"."""
    found: list[Path] = []
    for prefill in problem.clusters:
        for decode in problem.pd:
            own = path(problem, prefill, decode, "own")
            best = path(problem, prefill, decode, "best")
            if own is not None:
                found.append(own)
            if best is not None and (
                own is None or (best.share, best.transfers) != (own.share, own.transfers)
            ):
                found.append(best)
    return tuple(found)
