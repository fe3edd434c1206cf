"""The deployment as the policies see it: roles, queues, links, thresholds.

The owner of a view (the live control plane, or the simulator) keeps it up to date in place; a policy only reads it. To
build it anew for every request would cost more than the decision (docs/explanation/decisions/0004).
All times are seconds of one clock, `View.now_s`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from prfaas.core.latency.cached_prefix import after_prefix_s
from prfaas.core.link.checkpoints import checkpoint_every_tokens
from prfaas.core.link.meter import LinkCondition, LinkMeter
from prfaas.core.scheduling.decision import KvFacts
from prfaas.core.scheduling.prefill_order import PrefillWaits
from prfaas.core.units import BITS_PER_BYTE

ClusterKind = Literal["prfaas", "pd"]


class NoDecodeInstanceError(LookupError):
    """No instance can decode."""


@dataclass(slots=True)
class InstanceView:
    """One engine instance."""

    name: str
    cluster: str
    prefills: bool
    """It has the prefill role."""
    decodes: bool
    """It has the decode role."""
    healthy: bool = True
    """It answers."""
    draining: bool = False
    """Its role is being changed: it finishes what it has and gets nothing new."""
    in_flight: int = 0
    """Requests open there in any role."""
    busy_until_s: float = 0.0
    """When the prefill work accepted there will be done, as predicted; in the past when idle."""
    decoding: int = 0
    """Requests that decode there or are on their way."""
    decode_slots: int = 1
    """How many of them keep the SLO, at least 1."""
    seen_s: float = 0.0
    """When the engine last answered."""
    closed: bool = False
    """An operator drains it: it finishes what it has and gets nothing new, whatever else can answer."""
    group: tuple[str, ...] = ()
    """All ranks of its data-parallel group, which compute in step and have the same roles; empty: it is in none."""

    @property
    def held_up(self) -> int:
        """How many further engines decode no faster than this one while it prefills."""
        return len(self.group) - 1 if self.group and self.decodes else 0

    @property
    def available(self) -> bool:
        """Whether it counts for what the deployment can do: it answers, and no operator has closed it."""
        return self.healthy and not self.closed

    @property
    def is_open(self) -> bool:
        """Whether it may be given new work."""
        return self.healthy and not (self.draining or self.closed)

    @property
    def takes_prefills(self) -> bool:
        """Whether it may be given new prefills."""
        return self.prefills and self.is_open

    @property
    def takes_decodes(self) -> bool:
        """Whether it may be given new requests to decode."""
        return self.decodes and self.is_open


@dataclass(slots=True)
class LinkView:
    """A directed link between clusters."""

    source: str
    target: str
    capacity_bits_per_s: float
    """What it can carry now: what was configured, or less when it was seen to carry less under load."""
    egress_bits_per_s: float = 0.0
    """What it carried in the last seconds."""
    drained_s: float = 0.0
    """When the bytes accepted for it will have left, as predicted."""
    rtt_s: float = 0.0
    """The least that its connections have seen lately: what a transfer takes longer than its bytes."""
    retransmit_ratio: float = 0.0
    """Share of the bytes sent in the last seconds that were sent again."""
    up: bool = True
    seen_s: float = 0.0
    """When it was last measured or known to be idle."""
    congestion: float = 0.0
    """0: none; up to 1: how far round trip and retransmissions say that queues build up in the network."""
    condition: LinkCondition = "clear"
    """What the last seconds say of the link, in a word."""
    pace_bits_per_s: float = math.inf
    """What its senders may send together; infinite: no less than the deployment file says. Above the capacity while
    it is being found out whether the link carries more."""
    egress_price_per_byte: float = 0.0
    """In the currency of the deployment file's prices."""
    kv: KvFacts | None = None
    """What of KVCache crosses it, where dtypes or ranks of its ends make that something else; None: as `View.kv`."""
    joins_pools: bool = True
    """False: its ends keep KVCache in unlike dtypes. Engines convert it, and pools exchange nothing over it."""

    @property
    def utilisation(self) -> float:
        """Share of the capacity in use, from 0; above 1 when the capacity has just fallen."""
        return self.egress_bits_per_s / self.capacity_bits_per_s if self.capacity_bits_per_s > 0 else 1.0


def show(meter: LinkMeter, link: LinkView, now_s: float) -> None:
    """Write what a meter says into a view, but its capacity and whether the link is up: those have effects."""
    link.egress_bits_per_s = meter.egress_bits_per_s(now_s)
    link.rtt_s = meter.network.least_rtt_s
    link.retransmit_ratio = meter.network.retransmit_ratio
    link.congestion = meter.congestion
    link.condition = meter.condition(now_s)
    link.pace_bits_per_s = meter.pace_bits_per_s
    link.seen_s = meter.seen_s


UNKNOWN_SLOT_S = 25.6
"""Of an answer's decode slot where nothing is known: 512 tokens at 50 ms."""

MEMORY_BITS_PER_S = 64e9
"""Of a pool's memory: a plain copy by one core (8 GB/s)."""
SSD_BITS_PER_S = 12e9
"""Of a pool's SSD: one NVMe drive read cold (1.5 GB/s)."""
NETWORK_BITS_PER_S = 10e9


@dataclass(slots=True)
class PoolView:
    """The prefix-cache pool of one machine: host memory and SSD behind its engines."""

    name: str
    cluster: str
    instances: tuple[str, ...]
    """The instances of the machine, which load from it and store into it."""
    memory_bits_per_s: float = MEMORY_BITS_PER_S
    """How fast an engine loads what lies in memory."""
    ssd_bits_per_s: float = SSD_BITS_PER_S
    """How fast what lies on SSD comes into memory."""
    network_bits_per_s: float = NETWORK_BITS_PER_S
    """How fast another machine of the cluster reads from it."""
    up: bool = True
    """Whether it answers. One that does not holds nothing."""


@dataclass(slots=True)
class ClusterView:
    """Instances that share a network."""

    name: str
    kind: ClusterKind
    instances: list[InstanceView]
    prefill_s: Callable[[float], float]
    """Seconds of an uncached length in tokens on one of them, for every length from 0 and never falling. The owner of
    the view continues a measured curve beyond its points."""
    waiting_s: float = 0.0
    """Seconds of prefill that wait for whichever instance is free first (`PrefillPool`), beside what each of them has
    accepted."""
    waits: PrefillWaits = field(default_factory=PrefillWaits)
    """What those that waited so have waited lately."""
    slot_s: float = UNKNOWN_SLOT_S
    """Seconds that an answer keeps its decode slot on one of them, as the latest answers did
    (`decoders.learnt_slot_s`)."""
    instance_price_per_s: float = 0.0
    """What one instance costs, in the currency of the deployment file's prices."""
    kills_per_s: float = 0.0
    """How often an instance is taken away while it is up, as the deployment file says; 0: its owner keeps it."""
    kv: KvFacts | None = None
    """What moves between its instances, where its dtype or ranks make that something else; None: as `View.kv`."""
    pool_kv: KvFacts | None = None
    """What its pools hold, of all ranks; None: as `kv`."""
    reads_kv: bool = False
    """Whether its decode instances read KV out of the memory of its prefill instances (NIXL)."""

    def after_prefix_s(self, uncached_tokens: float, reused_tokens: float) -> float:
        """Seconds of computing `uncached_tokens` behind `reused_tokens` that an instance need not compute."""
        return after_prefix_s(self.prefill_s, uncached_tokens, reused_tokens)


def may_sample(cluster: ClusterView, link: LinkView | None, every_tokens: int) -> bool:
    """Whether a prefill in `cluster`, which sends checkpoints `every_tokens` over `link`, may sample the first token.

    A NIXL producer of some models drops the prompt's last token. And the ticket of a prefill that samples has a token
    more than the decode request: of such a transfer nothing is kept, so that checkpoints would be for nothing.
    """
    return not every_tokens and (link is not None or not cluster.reads_kv)


@dataclass(slots=True)
class View:
    """Everything that a policy reads."""

    clusters: dict[str, ClusterView]
    """By name."""
    links: dict[tuple[str, str], LinkView]
    """By (source, target)."""
    kv: KvFacts
    stale_after_s: float
    """Facts of a link that are older are not believed: its bandwidth counts as scarce, and what is known of its queue
    can only make offloading rarer. After `link_choice.DOWN_AFTER_STALE` times that the link counts as down."""
    threshold_tokens: dict[str, float] = field(default_factory=dict)
    """By PD cluster; one that is missing never offloads."""
    now_s: float = 0.0
    avoid: frozenset[str] = frozenset()
    """Instances that get nothing."""
    blocked: frozenset[tuple[str, str]] = frozenset()
    """(producer, consumer): the second takes no KV from the first, for they are incompatible."""
    pools: dict[str, PoolView] = field(default_factory=dict)
    """By name; empty: no machine has one."""
    leaves_s: dict[str, float] = field(default_factory=dict)
    """When instances that were given notice will be gone, by name; empty: nobody has notice."""
    keeps_transfers: bool = True
    """What has arrived of a transfer is kept when it breaks, and the decode instance goes on from there, as live. Only
    simulations can say that it is lost."""

    def kv_between(self, source: str, target: str) -> KvFacts:
        """What of KVCache goes from one cluster to another, or moves inside of one, by their names."""
        place = self.clusters[source] if source == target else self.links.get((source, target))
        return self.kv if place is None or place.kv is None else place.kv

    def kv_of_pools(self, cluster: str) -> KvFacts:
        """What the pools of a cluster hold, load and exchange: the pages of all ranks, copies included."""
        place = self.clusters[cluster]
        return place.pool_kv or place.kv or self.kv

    def checkpoint_tokens(
        self,
        cluster: ClusterView,
        link: LinkView | None,
        prefill_tokens: int,
        reused_tokens: int,
        kv_bytes: int,
    ) -> int:
        """About how many tokens a prefill in `cluster`, behind `reused_tokens`, computes between two checkpoints.

        0: it sends none, such as inside of a PD cluster, where no `link` is crossed.
        """
        if link is None or not cluster.kills_per_s or not self.keeps_transfers:
            return 0
        return checkpoint_every_tokens(
            prefill_tokens,
            cluster.after_prefix_s(prefill_tokens, reused_tokens),
            kv_bytes,
            (link.kv or self.kv).checkpoint_bytes,
            link.capacity_bits_per_s,
            cluster.kills_per_s,
        )

    def checkpoint_s(self, link: LinkView, first_from_prefill: bool) -> float:
        """What a checkpoint takes on a link; 0: the model needs none; infinite: a broken transfer is not kept.

        A transfer whose prefill gives the first token never is: its ticket has a token more than the decode request.
        Nor is one of a hybrid model that nothing else is known of.
        """
        size_bytes = (link.kv or self.kv).checkpoint_bytes
        if first_from_prefill or not self.keeps_transfers or (self.kv.is_hybrid and not size_bytes):
            return math.inf
        return BITS_PER_BYTE * size_bytes / link.capacity_bits_per_s

    def towards(self, consumer: str) -> "View":
        """The same view, but whoever cannot send to `consumer` gets nothing."""
        if not self.blocked:
            return self
        unable = [producer for producer, other in self.blocked if other == consumer]
        return self.without(unable) if unable else self

    def without(self, names: Iterable[str]) -> "View":
        """The same view, but `names` get nothing: how another route is found after a failure."""
        return replace(self, avoid=self.avoid | frozenset(names))
