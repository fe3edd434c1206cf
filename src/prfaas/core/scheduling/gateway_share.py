"""What one gateway has open, as it tells the other gateways of its fleet; and the sum of what several have.

A gateway counts only its own requests. Without the others' it would take a full queue for an empty one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

MOST_LENGTHS = 512
"""Observed lengths of one share at most; of more, the newest."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class InstanceShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway has open at one instance."""

    requests: _Count = 0
    """In any role."""
    decoding: _Count = 0
    """That decode there."""
    arriving: _Count = 0
    """That will decode there once their KV has come."""
    prefills: _Count = 0
    """Prefills accepted there."""
    prefill_s: _Seconds = 0.0
    """Seconds that these will still take, as predicted."""
    prefill_tokens: _Count = 0
    """Uncached tokens of those that took a turn."""
    waiting: _Count = 0
    """Prefills that wait for a turn at this instance only."""


class ClusterShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prefills of one gateway that any instance of a cluster may take."""

    waiting: _Count = 0
    """How many wait for a turn."""
    waiting_s: _Seconds = 0.0
    """Seconds of their work."""
    served_s: _Seconds = 0.0
    """Seconds of work that had a turn lately (`prefill_turns.ServedWork`)."""


class GatewayShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway has open, or what several have together. What has nothing open is left out."""

    instances: dict[str, InstanceShare] = {}
    """By the instance's name."""
    clusters: dict[str, ClusterShare] = {}
    """By the cluster's name."""
    links: dict[str, _Count] = {}
    """Bytes promised to a link that have not left, by "source->target"."""
    lengths: Annotated[list[_Count], msgspec.Meta(max_length=MOST_LENGTHS)] = []
    """Uncached lengths of its latest requests, newest last."""
    lengths_total: _Count = 0
    """How many it has had since it started."""


NOTHING_AT_INSTANCE = InstanceShare()
NOTHING_AT_CLUSTER = ClusterShare()


@dataclass(frozen=True, slots=True)
class OtherGateways:
    """What the other gateways of a fleet have open."""

    each: Mapping[str, GatewayShare] = field(default_factory=dict)
    """By the gateway's name."""

    def total(self) -> GatewayShare:
        """The sum of all."""
        return total(self.each.values())


def total(shares: Iterable[GatewayShare]) -> GatewayShare:
    """The sum of shares; lengths are not summed, since each is observed once."""
    instances: dict[str, InstanceShare] = {}
    clusters: dict[str, ClusterShare] = {}
    links: dict[str, int] = {}
    for share in shares:
        for name, instance in share.instances.items():
            instances[name] = _sum(instances.get(name, NOTHING_AT_INSTANCE), instance)
        for name, cluster in share.clusters.items():
            clusters[name] = _sum(clusters.get(name, NOTHING_AT_CLUSTER), cluster)
        for name, nbytes in share.links.items():
            links[name] = links.get(name, 0) + nbytes
    return GatewayShare(instances=instances, clusters=clusters, links=links)


def new_lengths(share: GatewayShare, seen: int) -> list[int]:
    """The lengths of a share that came after the first `seen`. A gateway that starts anew counts from 0 again."""
    unseen = share.lengths_total - seen if share.lengths_total >= seen else share.lengths_total
    return share.lengths[-unseen:] if unseen else []


_Sum = TypeVar("_Sum", InstanceShare, ClusterShare)


def _sum(one: _Sum, other: _Sum) -> _Sum:
    return type(one)(*(getattr(one, name) + getattr(other, name) for name in one.__struct_fields__))
