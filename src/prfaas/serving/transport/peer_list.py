"""Peer lists: the peers that a rank may send KV to and receive it from, from its command line or the control plane."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from prfaas.core.deployment import Deployment, Instance, KvPeer
from prfaas.core.kv.rank_shares import paired_ranks
from prfaas.serving.transport.options import Peer
from prfaas.serving.transport.wire import MAX_LINK_CHARS, WireError, count_field, text_field

MAX_LISTED_PEERS = 4096
_MAX_NAME_CHARS = 255
_MAX_BITS_PER_S = 1 << 50
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class PeerList:
    """Peers of one rank, by their names on the wire."""

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
        return {
            "peers": [
                {
                    "name": peer.name,
                    "host": peer.host,
                    "port": peer.port,
                    "link": peer.link,
                    "connections": peer.connections,
                    "bits_per_s": _whole(peer.bandwidth_bits_per_s),
                    "share_bits_per_s": _whole(peer.share_bits_per_s),
                    "on_demand": peer.on_demand,
                    "encrypted": peer.encrypted,
                    "compressed": peer.compressed,
                }
                for _, peer in sorted(self.peers.items())
            ],
            "producers": sorted(self.producers),
            "plain": sorted(self.plain),
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a ROSTER frame.

        Raises:
            WireError: a field is missing or absurd, or a peer is named twice.
        """
        peers = [_peer(each) for each in _list(body, "peers")]
        found = {peer.name: peer for peer in peers}
        if len(found) < len(peers):
            raise WireError("field 'peers' names one twice")
        return cls(found, _names(body, "producers"), _names(body, "plain"))


def ranked(name: str, rank: int) -> str:
    """The name of one tensor-parallel rank of an instance on the wire."""
    return f"{name}/{rank}"


def rank_of(name: str) -> int:
    """The number in a rank's name on the wire.

    Raises:
        ValueError: it has none.
    """
    return int(name.rpartition("/")[2])


def peer_list_of(deployment: Deployment, instance: Instance, rank: int) -> PeerList:
    """The peers of one rank of an instance in a deployment: the ranks that share its heads."""
    ranks = instance.kv_ranks
    peers = [
        _peer_of(peer, ranks, other)
        for peer in deployment.peers_of(instance)
        for other in paired_ranks(rank, ranks, peer.instance.kv_ranks)
    ]
    producers = (
        ranked(producer.name, other)
        for producer in deployment.producers_for(instance)
        for other in paired_ranks(rank, ranks, producer.kv_ranks)
    )
    plain = (
        deployment.plain_peers_of(instance) if deployment.needs_certificate(instance.name) else frozenset()
    )
    return PeerList({peer.name: peer for peer in peers}, frozenset(producers), plain)


def _peer_of(peer: KvPeer, ranks: int, other: int) -> Peer:
    # All ranks send their shares of a transfer at the same time.
    share = None if peer.share_bits_per_s is None else peer.share_bits_per_s / ranks
    return Peer(
        name=ranked(peer.instance.name, other),
        host=peer.instance.host,
        port=peer.instance.kv_port + other,
        link=peer.link,
        connections=peer.connections,
        bandwidth_bits_per_s=peer.bandwidth_bits_per_s,
        on_demand=peer.on_demand,
        encrypted=peer.encrypted,
        compressed=peer.compressed,
        share_bits_per_s=share,
    )


def _whole(bits_per_s: float | None) -> int | None:
    return None if bits_per_s is None else max(round(bits_per_s), 1)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list) or len(value) > MAX_LISTED_PEERS:
        raise WireError(f"field {name!r} must be a list of at most {MAX_LISTED_PEERS}")
    return value


def _names(body: Mapping[str, Any], name: str) -> frozenset[str]:
    return frozenset(text_field({name: each}, name, _MAX_NAME_CHARS) for each in _list(body, name))


def _peer(fields: Any) -> Peer:
    if not isinstance(fields, dict):
        raise WireError("field 'peers' must be a list of objects")
    try:
        return Peer(
            name=text_field(fields, "name", _MAX_NAME_CHARS),
            host=text_field(fields, "host", _MAX_NAME_CHARS),
            port=count_field(fields, "port", 65535),
            link=text_field(fields, "link", MAX_LINK_CHARS),
            connections=count_field(fields, "connections", 64),
            bandwidth_bits_per_s=_bits_per_s(fields, "bits_per_s"),
            on_demand=fields.get("on_demand") is True,
            encrypted=fields.get("encrypted") is True,
            compressed=fields.get("compressed") is True,
            share_bits_per_s=_bits_per_s(fields, "share_bits_per_s"),
        )
    except ValueError as error:
        raise WireError(str(error)) from None


def _bits_per_s(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else float(count_field(fields, name, _MAX_BITS_PER_S))
