"""Which pools may send pages to which, over what, and who of them shows certificates."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from prfaas.core.deployment.pool import PoolNode
from prfaas.core.deployment.security import OBSERVERS
from prfaas.core.deployment.types import INTRA_CLUSTER_CONNECTIONS, Deployment, KvPath, Link

# Of a link, what its pools may use together while no control plane tells them another part: copies are in the
# background, and the engines' standing shares are all of it already.
_STANDING_PART = 0.1


@dataclass(frozen=True, slots=True)
class PoolPeer:
    """A pool that another one may send pages to."""

    pool: PoolNode
    path: KvPath
    """On the bandwidth budget of engines."""


def pool_peers(deployment: Deployment, pool: PoolNode) -> tuple[PoolPeer, ...]:
    """The pools that `pool` may send to: the others of its cluster, and those of its dtype that a link leads to."""
    return tuple(_ways(deployment, pool))


def joins_pools(deployment: Deployment, link: Link) -> bool:
    """Whether pools may use a link: engines alone convert KVCache between unlike dtypes."""
    ends = (link.source, link.target)
    return len({deployment.cache_dtypes(cluster).named for cluster in ends}) == 1


def pool_sources(deployment: Deployment, pool: PoolNode) -> tuple[PoolPeer, ...]:
    """The pools that may send to `pool`, each with the way from there; the inverse of `pool_peers`."""
    return tuple(
        replace(way, pool=source)
        for source in deployment.pools
        for way in _ways(deployment, source)
        if way.pool.name == pool.name
    )


def plain_pool_peers(deployment: Deployment, pool: PoolNode) -> frozenset[str]:
    """Who may connect to a pool's KV port without encryption.

    A pool connects to send, and to ask for what comes back: one of the two ways is enough.
    """
    ways = (*pool_peers(deployment, pool), *pool_sources(deployment, pool))
    plain = frozenset(way.pool.name for way in ways if not way.path.encrypted)
    return plain if pool.tls else plain | OBSERVERS


def _ways(deployment: Deployment, source: PoolNode) -> Iterator[PoolPeer]:
    senders = sum(pool.cluster == source.cluster for pool in deployment.pools)
    for target in deployment.pools:
        link = deployment.link(source.cluster, target.cluster)
        if target.name == source.name or (link is not None and not joins_pools(deployment, link)):
            continue
        path = deployment.kv_path(
            source.cluster, target.cluster, inside=INTRA_CLUSTER_CONNECTIONS, on_demand=True
        )
        if path is not None and link is not None:
            path = replace(path, share_bits_per_s=_STANDING_PART * link.bandwidth_bits_per_s / senders)
        if path is not None:
            yield PoolPeer(target, path)
