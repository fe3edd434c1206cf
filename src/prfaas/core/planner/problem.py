"""The planner's input: clusters, links, traffic and sizes as plain numbers and functions.

A path says how a request can go: which cluster prefills, which decodes, what is computed and what crosses which link.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prfaas.core.arrays import OfLength
from prfaas.core.deployment import FirstTokenSource
from prfaas.core.planner.operating_point import CachePolicy
from prfaas.core.units import format_s
from prfaas.core.workload.lengths import Workload

MOST_INSTANCES = 10_000
"""Of a cluster that can be planned. Far more than anyone has, and few enough for a plan to stay in memory."""


class PlanError(ValueError):
    """The planner was given something that has no plan: no decode cluster, nothing that can prefill, …

    The text is one sentence.
    """


@dataclass(frozen=True, slots=True)
class PrfaasCluster:
    """Equal instances that prefill for PD clusters."""

    name: str
    hardware: str
    instances: int
    gpus_per_instance: int
    prefill_s: OfLength
    """T_prefill: seconds for arrays of uncached tokens."""
    prefix_hit_ratio: float | None = None
    """The part of every prompt that this cluster's own cache holds; None: the workload's."""

    @property
    def gpus(self) -> int:
        """All GPUs of the cluster."""
        return self.instances * self.gpus_per_instance


@dataclass(frozen=True, slots=True)
class PdCluster:
    """Equal instances that the planner divides into prefill and decode."""

    name: str
    hardware: str
    instances: int
    """N_p + N_d."""
    gpus_per_instance: int
    prefill_s: OfLength
    """T_prefill: seconds for arrays of uncached tokens."""
    decode_batch: float
    """BS_max: requests that decode together on one instance under the SLO."""
    decode_step_s: float
    """T_decode: seconds of a step at that batch."""
    prefix_hit_ratio: float | None = None
    """The part of every prompt that this cluster's own cache holds; None: the workload's."""
    group_ranks: int = 1
    """Instances that have their role together."""

    @property
    def splits(self) -> range:
        """The numbers of prefill instances that can be."""
        return range(0, self.instances + 1, self.group_ranks)

    @property
    def gpus(self) -> int:
        """All GPUs of the cluster."""
        return self.instances * self.gpus_per_instance

    def decode_rate(self, output_tokens: float) -> float:
        """Requests per second that one instance decodes: BS_max / (T_decode × L_out), a factor of Eq. 5."""
        return self.decode_batch / (self.decode_step_s * output_tokens)


@dataclass(frozen=True, slots=True)
class PlanLink:
    """A directed link between two clusters by name; everything on it shares the bandwidth."""

    source: str
    target: str
    bandwidth_bits_per_s: float
    egress_per_gb: float = 0.0
    """What 10^9 bytes over it cost, in the currency of the instances' prices."""
    rtt_s: float = 0.0
    """Round trip in seconds: every request that crosses waits for one."""
    transfer_limit_bits_per_s: float = math.inf
    """The highest rate of one transfer: its ends can map no more."""
    kv_bytes: OfLength | None = None
    """S_kv on this link, where its ends keep KVCache in a narrower dtype than others; None: the problem's."""
    streamed_token_bytes: float = math.inf
    """Like the problem's `streamed_token_bytes`, for `kv_bytes` of this link."""

    @property
    def name(self) -> str:
        """ "source->target"."""
        return f"{self.source}->{self.target}"


TtftStatistic = Literal["mean", "p90"]
"""The statistic of all TTFTs that a target bounds."""


@dataclass(frozen=True, slots=True)
class TtftTarget:
    """The longest TTFT that users accept, waiting included."""

    seconds: float
    statistic: TtftStatistic = "p90"

    def __str__(self) -> str:
        return f"{_STATISTICS[self.statistic]} TTFT of {format_s(self.seconds)}"


_STATISTICS: dict[TtftStatistic, str] = {"mean": "a mean", "p90": "a P90"}


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """One planning problem.

    Raises:
        PlanError: no PD cluster, doubled names, links between unknown clusters, or numbers out of range.
    """

    name: str
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    links: tuple[PlanLink, ...]
    workload: Workload
    kv_bytes: OfLength
    """S_kv: bytes for arrays of tokens."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Prices per GPU-hour by hardware, in any currency; empty: costs are unknown."""
    load: float = 0.7
    """The share of Λ_max, in (0, 1), at which queueing is estimated."""
    ttft_target: TtftTarget | None = None
    """The bound on the TTFT at `load`; None: none."""
    first_token: FirstTokenSource = "decode"
    """Who gives clients their first token; "prefill": as if every request allowed it."""
    streamed_token_bytes: float = math.inf
    """Of S_kv, the bytes per token that leave while a prefill runs; the rest leaves at its end. Infinite: all of it."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def clusters(self) -> tuple[PrfaasCluster | PdCluster, ...]:
        """All clusters, PrfaaS first."""
        return (*self.prfaas, *self.pd)

    @property
    def is_two_cluster(self) -> bool:
        """True for the paper's case: at most one PrfaaS cluster and one PD cluster."""
        return len(self.prfaas) <= 1 and len(self.pd) == 1

    def link(self, source: str, target: str) -> PlanLink | None:
        """The link between two clusters by name, None if there is none."""
        return next((link for link in self.links if (link.source, link.target) == (source, target)), None)

    def kv_bytes_over(self, link: str) -> OfLength:
        """S_kv on a link, by its name."""
        own = next((each.kv_bytes for each in self.links if each.name == link), None)
        return self.kv_bytes if own is None else own

    def hit_ratio(self, cluster: PrfaasCluster | PdCluster) -> float:
        """The part of every prompt that a cluster's cache holds."""
        own = cluster.prefix_hit_ratio
        return self.workload.prefix_hit_ratio if own is None else own


def _check(problem: PlanProblem) -> None:
    if not problem.pd:
        raise PlanError("nothing decodes; a plan needs at least one PD cluster")
    names = [cluster.name for cluster in problem.clusters]
    if len(set(names)) < len(names):
        raise PlanError(f"two clusters have the same name; there are {', '.join(names)}")
    for cluster in problem.clusters:
        if cluster.instances < 1 or cluster.gpus_per_instance < 1:
            raise PlanError(f'cluster "{cluster.name}" needs at least one instance of at least one GPU')
        if cluster.instances > MOST_INSTANCES:
            raise PlanError(
                f'cluster "{cluster.name}" has {cluster.instances:,} instances; at most {MOST_INSTANCES:,} are planned'
            )
        ratio = problem.hit_ratio(cluster)
        if not 0 <= ratio < 1:
            raise PlanError(
                f'the prefix hit ratio of cluster "{cluster.name}" must be in [0, 1), not {ratio!r}'
            )
    for pd in problem.pd:
        if not (pd.decode_batch >= 0 and 0 < pd.decode_step_s < math.inf):
            raise PlanError(f'cluster "{pd.name}" needs a decode batch of 0 or more and a step above 0 s')
    for link in problem.links:
        for end in (link.source, link.target):
            if end not in names:
                raise PlanError(f'link {link.name} names cluster "{end}", which is not there')
        if not link.bandwidth_bits_per_s > 0:
            raise PlanError(f"link {link.name} needs a bandwidth above 0, not {link.bandwidth_bits_per_s!r}")
        if not link.transfer_limit_bits_per_s > 0:
            raise PlanError(
                f"one transfer on link {link.name} gets more than 0 bit/s, not {link.transfer_limit_bits_per_s!r}"
            )
        if not 0 <= link.egress_per_gb < math.inf:
            raise PlanError(f"a price of egress is 0 or more, not {link.egress_per_gb!r} on {link.name}")
        if not 0 <= link.rtt_s < math.inf:
            raise PlanError(f"the round trip of link {link.name} takes 0 s or more, not {link.rtt_s!r}")
    if len({link.name for link in problem.links}) < len(problem.links):
        raise PlanError("two links join the same clusters in the same direction; make them one")
    if not 0 < problem.load < 1:
        raise PlanError(f"the load for queueing estimates must be in (0, 1), not {problem.load!r}")
    if problem.ttft_target is not None and not 0 < problem.ttft_target.seconds < math.inf:
        raise PlanError(f"the target of the TTFT must be above 0 s, not {problem.ttft_target.seconds!r}")


@dataclass(frozen=True, slots=True)
class PathTransfer:
    """KV that crosses a link for each request of a path."""

    link: str
    """The link's name."""
    share: float
    """Tokens whose KV crosses, per token of the prompt."""


@dataclass(frozen=True, slots=True)
class Path:
    """A path of requests: the clusters that prefill and decode, and the work there."""

    prefill: str
    decode: str
    policy: CachePolicy
    share: float
    """Tokens that the prefill computes, per token of the prompt."""
    transfers: tuple[PathTransfer, ...]

    @property
    def is_local(self) -> bool:
        """True if the request stays in one cluster."""
        return self.prefill == self.decode


def path(
    problem: PlanProblem, prefill: PrfaasCluster | PdCluster, decode: PdCluster, policy: CachePolicy
) -> Path | None:
    """The path from one cluster to another under a cache policy; None if a link for it is missing.

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
    back = PathTransfer(forward.name, 1 - decode_ratio)
    if policy == "own" or ratio >= decode_ratio:
        return Path(prefill.name, decode.name, policy, 1 - ratio, (back,))
    reverse = problem.link(decode.name, prefill.name)
    if reverse is None:
        return None
    fetched = PathTransfer(reverse.name, decode_ratio - ratio)
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
    return Path(decode.name, decode.name, "best", 1 - ratio, (PathTransfer(link.name, ratio - decode_ratio),))


def all_paths(problem: PlanProblem) -> tuple[Path, ...]:
    """Every path that the links allow, each once: where both cache policies do the same, only "own"."""
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
