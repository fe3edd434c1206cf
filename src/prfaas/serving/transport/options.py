"""What both ends are configured with: peers, deadlines, limits.

The defaults fit datacenters up to about 100 ms apart.
"""

from dataclasses import dataclass, field

from prfaas.core.deployment import TransferLimits


@dataclass(frozen=True, slots=True)
class Peer:
    """A consumer that a producer may send to."""

    name: str
    host: str
    port: int
    link: str
    """The bandwidth budget that the connections to this peer share with others of the same link."""
    connections: int
    """Parallel TCP connections, 1 to 64."""
    bandwidth_bits_per_s: float | None
    """Goodput of the whole link; None: not paced."""
    on_demand: bool = False
    """Connected by the first transfer instead of ahead of time."""
    encrypted: bool = False
    """Its connections are encrypted, and never fall back; the sender must have a TLS identity."""
    compressed: bool = False
    """Its chunks are compressed where that spares more link time than it costs CPU time."""
    share_bits_per_s: float | None = None
    """What this sender may use of the link while no control plane tells it; None: all of it."""

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= 64:
            raise ValueError(f"peer {self.name}: connections is {self.connections}, not within 1..64")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"peer {self.name}: port is {self.port}, not within 1..65535")
        if self.bandwidth_bits_per_s is not None and not self.bandwidth_bits_per_s > 0:
            raise ValueError(f"peer {self.name}: bandwidth_bits_per_s must be above 0 or absent")
        if self.share_bits_per_s is not None and not self.share_bits_per_s > 0:
            raise ValueError(f"peer {self.name}: share_bits_per_s must be above 0 or absent")


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Deadlines and limits of the consumer."""

    limits: TransferLimits = field(default_factory=TransferLimits)
    """Of the deployment. `progress_deadline_s` holds after END and inside a frame: before END the producer must answer
    a PING at least that often."""
    idle_deadline_s: float = 600.0
    """Before END (prefill may be slow), a transfer must gain a byte that often."""
    keep_partial_s: float = 15.0
    """What has come of a broken transfer is kept so long for the engine that may go on from it."""
    tombstone_s: float = 300.0
    """A finished transfer's id is remembered at least that long, and until its ticket expires."""
    handshake_s: float = 5.0
    """For the whole handshake, from the connection's acceptance."""
    max_connections: int = 256
    """Of peers that have proved to have the key."""
    max_unauthenticated: int = 64
    """Connections at once that are still in their handshake."""
    max_waiting: int = 1024
    """Transfers that may wait for staging."""
    max_tombstones: int = 65536
    uncounted_regions: int = 0
    """So many regions at the end of each transfer are not KV (digests): no status counts their bytes."""


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Deadlines and limits of the producer."""

    limits: TransferLimits = field(default_factory=TransferLimits)
    """Of the deployment."""
    accept_margin_s: float = 10.0
    """An OPEN fails that has no answer for so long after the time that a receiver may have it wait for staging."""
    transfer_deadline_s: float = 20.0
    """A peer that has work and acknowledges nothing that long fails its transfers."""
    connect_s: float = 5.0
    """For connecting and the whole handshake."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    rejected_backoff_max_s: float = 30.0
    """A peer that rejects this side (wrong key, other layout) is asked again that rarely."""
    congestion: str | None = "bbr"
    """Congestion control to ask the kernel for on paths over a millisecond; None: its default everywhere."""
    chunk_bytes: int = 4 << 20
    """The largest chunk."""
    min_chunk_bytes: int = 32 << 10
    """The smallest chunk that a slow link leads to."""
    chunk_s: float = 0.05
    """A paced connection's chunks are cut so that each takes about that long."""
    max_resends: int = 8
    """A chunk reported damaged more often fails its transfer."""
    sample_s: float = 0.1
    """Period of the link samples and of the deadlines, while there is work."""

    @property
    def accept_deadline_s(self) -> float:
        """An OPEN without an answer that long fails."""
        return self.limits.staging_wait_s + self.accept_margin_s
