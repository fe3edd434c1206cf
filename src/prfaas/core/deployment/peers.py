"""Who may send KVCache to whom, and over what: engines to engines, and pools to pools."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prfaas.core.deployment.pool import PoolNode
from prfaas.core.deployment.security import OBSERVERS
from prfaas.core.deployment.types import Deployment, Instance, Link, by_pool

_INTRA_CLUSTER_CONNECTIONS = 4
# Stand-ins of one cluster mostly share a process: more connections would only be more threads.
_SYNTHETIC_CONNECTIONS = 1

# Of a link, what its pools may use together while no control plane tells them another part: copies are in the
# background, and the engines' standing shares are all of it already.
_STANDING_PART_OF_POOLS = 0.1

_Member = TypeVar("_Member", Instance, PoolNode)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPath:
    """How KV gets from a sender to a peer."""

    link: str
    """Name of the bandwidth budget that its transfers share; pools are on that of engines."""
    connections: int
    bandwidth_bits_per_s: float | None
    """Of the whole budget; None: unpaced."""
    share_bits_per_s: float | None = None
    """The sender's part of the budget while no control plane tells it another."""
    on_demand: bool
    """Nothing is connected before there is something to send, as after a change of roles or when a prefix moves."""
    encrypted: bool
    """Over TLS and sealed frames; a receiver takes nothing plain from such a sender."""
    compressed: bool = False
    """Its chunks are compressed where that pays."""

    def shared_by(self, ranks: int) -> "KvPath":
        """The path of one of a sender's ranks: all of them send their shares of a transfer at the same time."""
        share = self.share_bits_per_s
        return self if share is None else replace(self, share_bits_per_s=share / ranks)


@dataclass(frozen=True, slots=True)
class KvPeer(Generic[_Member]):
    """An engine or a pool at the other end of a path."""

    member: _Member
    path: KvPath


def peers_of(deployment: Deployment, sender: _Member) -> tuple[KvPeer[_Member], ...]:
    """Whom an engine or a pool may send KV to: those of its own cluster, and those a link leads to.

    Not only engines that decode: roles change, and a prefill may start from a prefix that another cluster sends.
    """
    ways = ((each, _path(deployment, sender, each)) for each in _all_like(deployment, sender))
    return tuple(KvPeer(member, path) for member, path in ways if path is not None)


def sources_of(deployment: Deployment, receiver: _Member) -> tuple[KvPeer[_Member], ...]:
    """Who may send KV to an engine or a pool, each with the path from there; the inverse of `peers_of`."""
    ways = ((each, _path(deployment, each, receiver)) for each in _all_like(deployment, receiver))
    return tuple(KvPeer(member, path) for member, path in ways if path is not None)


def plain_peers_of(deployment: Deployment, member: _Member) -> frozenset[str]:
    """Who may connect to an engine's or a pool's KV port without encryption, and who only asks there.

    Whoever sends connects. A pool also connects to ask for what comes back: one of the two ways is enough.
    """
    ways = sources_of(deployment, member)
    if isinstance(member, PoolNode):
        ways += peers_of(deployment, member)
    plain = frozenset(way.member.name for way in ways if not way.path.encrypted)
    return plain if member.tls else plain | OBSERVERS


def joins_pools(deployment: Deployment, link: Link) -> bool:
    """Whether pools may use a link: engines alone convert KVCache between unlike dtypes."""
    ends = (link.source, link.target)
    return len({deployment.cache_dtypes(cluster).named for cluster in ends}) == 1


def engine_share_bits_per_s(deployment: Deployment, link: Link) -> float:
    """What one sending engine may use of a link while no control plane tells it: it doesn't know of the others."""
    senders = deployment.cluster(link.source)
    # In a pd cluster roles change: what prefills at the start is the best guess there is.
    return link.bandwidth_bits_per_s / max(len(senders.with_role("prefill")), 1)


def _pool_share_bits_per_s(deployment: Deployment, link: Link) -> float:
    pools = by_pool(link.source, deployment.cluster(link.source).instances)
    return _STANDING_PART_OF_POOLS * link.bandwidth_bits_per_s / len(pools)


def _all_like(deployment: Deployment, member: _Member) -> Sequence[_Member]:
    if isinstance(member, PoolNode):
        return deployment.pools
    return deployment.instances


def _path(deployment: Deployment, sender: _Member, receiver: _Member) -> KvPath | None:
    """How KV gets from one to the other; None: it may not."""
    if sender.name == receiver.name:
        return None
    on_demand = isinstance(sender, PoolNode) or not (
        sender.has_role("prefill") and receiver.has_role("decode")
    )
    if sender.cluster == receiver.cluster:
        if isinstance(receiver, Instance) and not deployment.can_decode(receiver):
            return None
        is_stand_in = isinstance(sender, Instance) and sender.is_stand_in
        return KvPath(
            link=receiver.cluster,
            connections=_SYNTHETIC_CONNECTIONS if is_stand_in else _INTRA_CLUSTER_CONNECTIONS,
            bandwidth_bits_per_s=None,
            on_demand=on_demand,
            encrypted=deployment.security.encrypt_inside,
        )
    link = deployment.link(sender.cluster, receiver.cluster)
    if link is None or (isinstance(sender, PoolNode) and not joins_pools(deployment, link)):
        return None
    of_one = _pool_share_bits_per_s if isinstance(sender, PoolNode) else engine_share_bits_per_s
    return KvPath(
        link=link.name,
        connections=link.connections,
        bandwidth_bits_per_s=link.bandwidth_bits_per_s,
        share_bits_per_s=of_one(deployment, link),
        on_demand=on_demand,
        encrypted=link.encryption,
        compressed=link.compression,
    )
