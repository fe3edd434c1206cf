"""Peer lists: the peers that a rank may send KV to and receive it from, from its command line or the control plane."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Self

import msgspec

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.deployment.peers import KvPeer, peers_of, plain_peers_of, sources_of
from prfaas.serving.transport.protocol.options import Peer, PeerName
from prfaas.serving.transport.protocol.wire import FrameType, WireError, body_of, read_body

MAX_LISTED_PEERS = 4096
_DIGEST_BYTES = 8
_Names = Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_LISTED_PEERS)]


class ListedPeers(msgspec.Struct, frozen=True):
    """The fields of a ROSTER frame."""

    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_LISTED_PEERS)]
    producers: _Names
    plain: _Names


@dataclass(frozen=True, slots=True)
class PeerList:
    """Peers of one rank, by their names on the wire. What a ROSTER frame orders."""

    kind: ClassVar[FrameType] = FrameType.ROSTER

    peers: Mapping[str, Peer] = field(default_factory=dict)
    """The only peers that it may send to."""
    producers: frozenset[str] = frozenset()
    """The only peers that may send to it."""
    plain: frozenset[str] = frozenset()
    """If it has a certificate: the only instances, gateways and tools that may connect without encryption."""

    @property
    def digest(self) -> str:
        """16 hex digits, equal for equal lists."""
        canonical = json.dumps(self.to_body(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def to_body(self) -> dict[str, Any]:
        """The fields of a ROSTER frame."""
        listed = tuple(_rounded(peer) for _, peer in sorted(self.peers.items()))
        return body_of(ListedPeers(listed, tuple(sorted(self.producers)), tuple(sorted(self.plain))))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a ROSTER frame.

        Raises:
            WireError: a field is missing or absurd, or a peer is named twice.
        """
        listed = read_body(ListedPeers, body)
        found = {each.name: each for each in listed.peers}
        if len(found) < len(listed.peers):
            raise WireError("field 'peers' names one twice")
        return cls(found, frozenset(listed.producers), frozenset(listed.plain))


def ranked(name: str, rank: int) -> str:
    """The name of one rank of an instance on the wire."""
    return f"{name}/{rank}"


def rank_of(name: str) -> int:
    """The number in a rank's name on the wire.

    Raises:
        ValueError: it has none.
    """
    return int(name.rpartition("/")[2])


def peer_list_of(deployment: Deployment, instance: Instance, rank: int) -> PeerList:
    """The peers of one rank of an instance in a deployment: the ranks that share its heads and layers."""
    grid = instance.rank_grid
    peers = [
        _peer_of(peer, grid.count, other)
        for peer in peers_of(deployment, instance)
        for other in grid.paired(rank, peer.member.rank_grid)
    ]
    producers = (
        ranked(source.member.name, other)
        for source in sources_of(deployment, instance)
        for other in grid.paired(rank, source.member.rank_grid)
    )
    plain = (
        plain_peers_of(deployment, instance) if deployment.needs_certificate(instance.name) else frozenset()
    )
    return PeerList({peer.name: peer for peer in peers}, frozenset(producers), plain)


def _peer_of(peer: KvPeer[Instance], ranks: int, other: int) -> Peer:
    to, path = peer.member, peer.path.shared_by(ranks)
    return Peer(name=ranked(to.name, other), host=to.host, port=to.kv_port + other, **asdict(path))


def _whole(bits_per_s: float | None) -> int | None:
    return None if bits_per_s is None else max(round(bits_per_s), 1)


def _rounded(peer: Peer) -> Peer:
    """With whole rates, as frames and digests have them."""
    return msgspec.structs.replace(
        peer,
        bandwidth_bits_per_s=_whole(peer.bandwidth_bits_per_s),
        share_bits_per_s=_whole(peer.share_bits_per_s),
    )
