"""What the planner works on: clusters, links, traffic and sizes as plain numbers and functions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prfaas.planner.errors import PlanError
from prfaas.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]
    OfLength = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class PrfaasCluster:
    """`instances` equal prefill instances. `prefill_s` is T_prefill: seconds for arrays of uncached tokens.

    `prefix_hit_ratio` is the part of every prompt that this cluster's own cache holds; None: the workload's.
    """

    name: str
    hardware: str
    instances: int
    gpus_per_instance: int
    prefill_s: "OfLength"
    prefix_hit_ratio: float | None = None

    @property
    def gpus(self) -> int:
        """All GPUs of the cluster."""
        return self.instances * self.gpus_per_instance


@dataclass(frozen=True, slots=True)
class PdCluster:
    """`instances` equal instances (N_p + N_d) that the planner divides into prefill and decode.

    `decode_batch` is BS_max under the SLO and `decode_step_s` is T_decode at that batch.
    """

    name: str
    hardware: str
    instances: int
    gpus_per_instance: int
    prefill_s: "OfLength"
    decode_batch: float
    decode_step_s: float
    prefix_hit_ratio: float | None = None

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

    @property
    def name(self) -> str:
        """ "source->target"."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """One planning problem.

    `kv_bytes` is S_kv: bytes for arrays of tokens. `prices` are per GPU-hour by hardware, in any currency
    (empty: nothing is said about cost). `load` in (0, 1) is the share of Λ_max at which queueing is estimated.

    Raises:
        PlanError: no PD cluster, doubled names, links between unknown clusters, or numbers out of range.
    """

    name: str
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    links: tuple[PlanLink, ...]
    workload: Workload
    kv_bytes: "OfLength"
    prices: Mapping[str, float] = field(default_factory=dict)
    load: float = 0.7

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
    if len({link.name for link in problem.links}) < len(problem.links):
        raise PlanError("two links join the same clusters in the same direction; make them one")
    if not 0 < problem.load < 1:
        raise PlanError(f"the load for queueing estimates must be in (0, 1), not {problem.load!r}")
