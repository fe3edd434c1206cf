"""The settings of one engine's connector, as its command line gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from prfaas.core.deployment import EngineConfig, EventsEndpoint, PoolSettings, TransferLimits
from prfaas.core.kv.rank_shares import RankGrid
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.peer_list import PeerList, ranked


class SettingsError(ValueError):
    """`kv_connector_extra_config` lacks a field or has a wrong one."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The connector's part of the deployment file, already resolved for one instance."""

    name: str
    kv_host: str
    kv_port: int
    key_file: Path
    peers: Mapping[str, Peer]
    """The only instances that this engine sends to, each by its rank 0, until the control plane tells others."""
    producers: frozenset[str]
    """The only instances that may send to this engine, until then."""
    staging_bytes: int
    """Host memory for incoming transfers."""
    events: EventsEndpoint | None = None
    """Where the engine publishes its KV-cache events, for rank 0 to tell them on; None: it publishes none."""
    transfer_block_bytes: int = EngineConfig().transfer_block_bytes
    """Unit in which staging is handed out."""
    transfer: TransferLimits = field(default_factory=TransferLimits)
    """How long each step of a transfer may take."""
    identity_file: Path | None = None
    """This instance's certificate and its key; None: nothing is encrypted here."""
    ca_file: Path | None = None
    """The CAs that its peers' certificates may come from."""
    plain_peers: frozenset[str] = frozenset()
    """The only instances, gateways and tools that may connect without encryption, where there is a certificate."""
    pool_socket: Path | None = None
    """Where this machine's pool daemon listens; None: there is no pool."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    """How far linear states in the pool are apart, and how long a call of its daemon may take."""
    ranks_of_others: Mapping[str, int] = field(default_factory=dict)
    """Tensor-parallel ranks of the peers and producers that have more or fewer than this engine."""
    stages_of_others: Mapping[str, int] = field(default_factory=dict)
    """Pipeline stages of the producers that have some."""
    nixl_beside: bool = False
    """Some engines of the deployment have NIXL too: this one lays its KV out as NIXL wants it."""
    convert_kv: bool = False
    """Some clusters of the deployment keep KV in another dtype: it is converted between them."""

    def peer_list(self, rank: int, ranks: RankGrid) -> PeerList:
        """The peers of one of the engine's ranks, until the control plane sends another list."""

        def paired(name: str) -> tuple[int, ...]:
            tensor, stages = self.ranks_of_others.get(name, ranks.tensor), self.stages_of_others.get(name, 1)
            return ranks.paired(rank, RankGrid(tensor, stages))

        peers = [
            structs.replace(peer, name=ranked(name, other), port=peer.port + other)
            for name, peer in self.peers.items()
            for other in paired(name)
        ]
        producers = frozenset(ranked(name, other) for name in self.producers for other in paired(name))
        return PeerList({peer.name: peer for peer in peers}, producers, self.plain_peers)

    @property
    def tls(self) -> TlsIdentity | None:
        """Identity of this instance on encrypted links. Raises TlsFileError when its files can't be used."""
        if self.identity_file is None or self.ca_file is None:
            return None
        return TlsIdentity(self.identity_file, self.identity_file, self.ca_file)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "ConnectorSettings":
        """Read vLLM's `kv_connector_extra_config`.

        Raises:
            SettingsError: a field is missing, unknown or of the wrong kind.
        """
        fields = dict(config)
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(fields) - known)
        if unknown:
            raise SettingsError(
                f"kv_connector_extra_config: unknown field {unknown[0]!r}; known are {sorted(known)}"
            )
        try:
            fields["peers"] = {name: _rank_0(name, **peer) for name, peer in fields["peers"].items()}
            if "events" in fields:
                fields["events"] = EventsEndpoint(**fields["events"])
            fields["transfer"] = TransferLimits(**fields.get("transfer", {}))
            fields["pool"] = PoolSettings(**fields.get("pool", {}))
            fields["producers"] = frozenset(fields["producers"])
            fields["plain_peers"] = frozenset(fields.get("plain_peers", ()))
            for name in ("key_file", "identity_file", "ca_file", "pool_socket"):
                if fields.get(name) is not None:
                    fields[name] = Path(fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"kv_connector_extra_config: {error}; take it from `prfaas engine DEPLOYMENT NAME --print`"
            ) from error


def _rank_0(name: str, kv_port: int, **fields: Any) -> Peer:
    return Peer(name=ranked(name, 0), port=kv_port, **fields)
