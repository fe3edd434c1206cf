"""The deployment as the policies see it: roles, queues, links, thresholds.

A view is a board that its owner (the live control plane, or the simulator) keeps up to date in place; a policy
only reads it. Rebuilding it for every request would cost more than the decision (docs/explanation/decisions/0004).
All times are seconds of one clock, `View.now_s`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

ClusterKind = Literal["prfaas", "pd"]


class NoDecodeInstanceError(LookupError):
    """No instance can decode."""


@dataclass(slots=True)
class InstanceView:
    """One engine instance.

    `draining`: it finishes what it has and gets nothing new (its role is being changed).
    `busy_until_s`: when the prefill work accepted there will be done, as predicted; in the past when idle.
    `decoding`: requests that decode there or are on their way; `decode_slots`: how many keep the SLO, at least 1.
    `in_flight`: requests open there in any role. `seen_s`: when the engine was last heard of.
    """

    name: str
    cluster: str
    prefills: bool
    decodes: bool
    healthy: bool = True
    draining: bool = False
    in_flight: int = 0
    busy_until_s: float = 0.0
    decoding: int = 0
    decode_slots: int = 1
    seen_s: float = 0.0


@dataclass(slots=True)
class LinkView:
    """A directed link between clusters.

    `capacity_bits_per_s`: what it can carry now: what was configured, or less when it was seen to carry less
    under load. `egress_bits_per_s`: what it carried lately. `drained_s`: when the bytes accepted for it will
    have left, as predicted. `seen_s`: when it was last measured or known to be idle.
    """

    source: str
    target: str
    capacity_bits_per_s: float
    egress_bits_per_s: float = 0.0
    drained_s: float = 0.0
    rtt_s: float = 0.0
    retransmit_ratio: float = 0.0
    up: bool = True
    seen_s: float = 0.0

    @property
    def utilisation(self) -> float:
        """Share of the capacity in use, from 0; above 1 when the capacity has just fallen."""
        return self.egress_bits_per_s / self.capacity_bits_per_s if self.capacity_bits_per_s > 0 else 1.0


@dataclass(slots=True)
class ClusterView:
    """Instances that share a network.

    `prefill_s`: seconds of an uncached length in tokens on one of them, for every length from 0 and never falling:
    a measured curve must be continued beyond its points by the one who puts it here. `waiting_s`: seconds of prefill
    that were accepted for whichever of them is free first (`prefill_pool.py`), beside what each has of its own.
    """

    name: str
    kind: ClusterKind
    instances: list[InstanceView]
    prefill_s: Callable[[float], float]
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KvFacts:
    """What the model's KV cache allows.

    `is_hybrid`: some layers' state can't be cut at an arbitrary token, so full-attention blocks alone spare bytes
    but no computing. `can_skip`: they do spare bytes; not so with sliding windows, since engines keep window
    blocks only near a prompt's end and don't count a prefix without them as held.
    """

    is_hybrid: bool
    can_skip: bool
    bytes_to_move: Callable[[int, int], int]
    """`(prompt_tokens, skip_tokens)`: KV bytes that a prompt's prefill sends to the instance that decodes, less those
    of its first `skip_tokens` tokens. Whether the last prompt token is sent, and what blocks add, is decided here."""
    prefix_bytes_to_move: Callable[[int, int], int]
    """`(num_tokens, skip_tokens)`: KV bytes of a prefix of `num_tokens` tokens, less those of its first
    `skip_tokens` tokens: what a cache transfer moves."""


@dataclass(slots=True)
class View:
    """`clusters` by name, `links` by (source, target), `threshold_tokens` by PD cluster (missing: never offload).

    `stale_after_s`: facts of a link older than that are not believed: its bandwidth counts as scarce, and what is
    known of its queue can only make offloading rarer. Six times that (`links.py`): the link counts as down.
    """

    clusters: dict[str, ClusterView]
    links: dict[tuple[str, str], LinkView]
    kv: KvFacts
    threshold_tokens: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    stale_after_s: float = 5.0
    avoid: frozenset[str] = frozenset()

    def without(self, names: Iterable[str]) -> "View":
        """The same board, less `names`: how a request looks for another way after a failure."""
        return replace(self, avoid=self.avoid | frozenset(names))
