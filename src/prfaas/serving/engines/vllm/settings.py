"""What one engine's connector is told on its command line."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEBI = 1024 * 1024


class SettingsError(ValueError):
    """`kv_connector_extra_config` lacks a field or has a wrong one."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """An instance that this engine may send KV to.

    `link` names the bandwidth budget it shares with others; `bandwidth_bits_per_s` is None on an unpaced
    (intra-cluster) link. `on_demand`: connected when there is something to send, not before.
    """

    host: str
    kv_port: int
    link: str
    connections: int
    bandwidth_bits_per_s: float | None
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The connector's part of the deployment file, already resolved for one instance.

    `producers` are the only instance names that may send to this engine; `peers` the only ones it sends to.
    `lease_s` bounds how long a finished prefill keeps its blocks for an unacknowledged transfer;
    `load_wait_s` how long a decode request waits for a transfer that is still arriving.
    """

    name: str
    kv_host: str
    kv_port: int
    key_file: Path
    peers: Mapping[str, PeerSettings]
    producers: frozenset[str]
    staging_bytes: int
    transfer_block_bytes: int = MEBI
    lease_s: float = 60.0
    load_wait_s: float = 30.0
    staging_ttl_s: float = 60.0
    staging_wait_s: float = 20.0
    progress_deadline_s: float = 8.0

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
            fields["peers"] = {name: PeerSettings(**peer) for name, peer in fields["peers"].items()}
            fields["producers"] = frozenset(fields["producers"])
            fields["key_file"] = Path(fields["key_file"])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"kv_connector_extra_config: {error}; take it from `prfaas engine DEPLOYMENT NAME --print`"
            ) from error
