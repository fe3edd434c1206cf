"""A pool's links to other pools: its KV port, its connections to targets, and observers of its sources."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.core.deployment.peers import KvPeer, peers_of, plain_peers_of, sources_of
from prfaas.serving.pool.copies import PrefixCopies
from prfaas.serving.pool.lending import PageLender
from prfaas.serving.pool.store import PageStore
from prfaas.serving.transport.io.endpoint import KvEndpoint
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.region_layout import AskedTransfers
from prfaas.serving.transport.protocol.requests import CopyOrder, FollowOrder, PeerRequest, refuse_request

# The geometry is compared in each PULL: a pool listens before its first engine has set it.
_FINGERPRINT = {"prefix_pool": "v1"}


class PoolNeighbours:
    """The side of a pool that other machines see. Make it in the daemon's event loop."""

    def __init__(
        self,
        deployment: Deployment,
        pool: PoolNode,
        key: bytes,
        tls: TlsIdentity | None,
        store_of: Callable[[], PageStore | None],
        more_stats: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """
        Args:
            deployment: has the pools and the links between them.
            pool: this one.
            key: of the deployment, 32 bytes.
            tls: this pool's identity on encrypted links; None: all of its links are plain.
            store_of: its pages; None until the first engine has connected.
            more_stats: further fields of STATS answers; called in any thread.
        """
        limits = deployment.transfer
        sources = sources_of(deployment, pool)
        self._loop = asyncio.get_running_loop()
        self.on_follow: Callable[[PeerRequest], None] = refuse_request
        """Called with a gateway's FOLLOW, in the connection's thread."""
        asked = AskedTransfers()
        block_bytes = deployment.engine.transfer_block_bytes
        staging_bytes = max(deployment.pool.staging_bytes, block_bytes) if sources else block_bytes
        endpoint = KvEndpoint.of(
            name=pool.name,
            key=key,
            host=pool.host,
            port=pool.kv_port,
            fingerprint=_FINGERPRINT,
            tls=tls,
            peer_list=PeerList(
                peers={peer.member.name: _peer(peer) for peer in peers_of(deployment, pool)},
                producers=frozenset(source.member.name for source in sources),
                plain=plain_peers_of(deployment, pool),
            ),
            arena=StagingArena(staging_bytes, block_bytes),
            layout=asked,
            sender_options=SenderOptions(limits=limits),
            receiver_options=ReceiverOptions(limits=limits),
            on_request=self._on_request,
            more_stats=more_stats,
        )
        self._sender, self._receiver = endpoint.sender, endpoint.receiver
        self._observers = {
            source.member.name: Observer(
                name=pool.name,
                key=key,
                host=source.member.host,
                port=source.member.kv_port,
                peer_name=source.member.name,
                tls=tls if source.path.encrypted else None,
                silence_s=limits.silence_s,
            )
            for source in sources
        }
        # Lent pages are pinned: most of the memory stays for the engines of this machine.
        self.lender = PageLender(pool.name, key, store_of, self._sender, most_bytes=pool.memory_bytes // 4)
        self.copies = PrefixCopies(pool.name, key, store_of, self._receiver.transfers, asked, self._observers)

    def start(self) -> None:
        """Listen at the KV port, and be ready to send.

        Raises:
            OSError: the port is taken, or the host is not this machine.
        """
        self._receiver.start()
        self._sender.start()

    async def close(self) -> None:
        """End every copy, connection and thread; then no page is read or written for another pool."""
        await self.copies.close()
        await asyncio.to_thread(self._sender.close)
        await self.lender.close()
        for observer in self._observers.values():
            await observer.close()
        await asyncio.to_thread(self._receiver.close)

    def figures(self) -> dict[str, int]:
        """Counters and gauges of copies and lending."""
        return {
            **asdict(self.copies.counters),
            **asdict(self.lender.counters),
            "running_copies": self.copies.running,
            "lent_pinned_bytes": self.lender.pinned_bytes,
        }

    def stats(self) -> dict[str, Any]:
        """Stats of receiver and sender, as `Receiver.stats` and `Sender.stats`."""
        return {"receiver": self._receiver.stats(), "sender": self._sender.stats()}

    def _on_request(self, request: PeerRequest) -> None:
        if isinstance(request.order, FollowOrder):
            self.on_follow(request)
            return
        taker = self.copies if isinstance(request.order, CopyOrder) else self.lender
        self._loop.call_soon_threadsafe(partial(taker.take, request))


def _peer(peer: KvPeer[PoolNode]) -> Peer:
    pool = peer.member
    return Peer(name=pool.name, host=pool.host, port=pool.kv_port, **asdict(peer.path))
