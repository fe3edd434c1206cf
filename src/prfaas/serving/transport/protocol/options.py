"""Configuration of both ends: peers, deadlines, limits.

The defaults fit datacenters up to about 100 ms apart.
"""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from prfaas.core.deployment import TransferLimits
from prfaas.serving.transport.protocol.wire import MAX_LINK_CHARS

PeerName = Annotated[str, msgspec.Meta(max_length=255)]
_Rate = Annotated[float, msgspec.Meta(le=1 << 50)]


class Peer(msgspec.Struct, frozen=True, rename={"bandwidth_bits_per_s": "bits_per_s"}):
    """A consumer that a producer may send to; also as a ROSTER frame has it."""

    name: PeerName
    host: PeerName
    port: int
    link: Annotated[str, msgspec.Meta(max_length=MAX_LINK_CHARS)]
    """The bandwidth budget that the connections to this peer share with others of the same link."""
    connections: int
    """Parallel TCP connections, 1 to 64."""
    bandwidth_bits_per_s: _Rate | None = None
    """Goodput of the whole link; None: not paced."""
    on_demand: bool = False
    """Connected by the first transfer instead of ahead of time."""
    encrypted: bool = False
    """Its connections are encrypted, and never fall back; the sender must have a TLS identity."""
    compressed: bool = False
    """Its chunks are compressed where that saves more link time than it costs CPU time."""
    share_bits_per_s: _Rate | None = None
    """This sender's share of the link without orders of a control plane; None: all of it."""

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
    """The deployment's. `progress_deadline_s` applies after END, inside a frame, and to answers to a PING."""
    idle_deadline_s: float = 600.0
    """Most time between two chunks of a transfer before END, since a prefill may be slow."""
    keep_partial_s: float = 15.0
    """How long a partial transfer is kept for an engine to resume from."""
    tombstone_s: float = 300.0
    """Least time for which a finished transfer's id is remembered; also until its ticket expires."""
    handshake_s: float = 5.0
    """For the whole handshake, from the connection's acceptance."""
    max_connections: int = 256
    """Most connections of authenticated peers."""
    max_unauthenticated: int = 64
    """Most connections in their handshake."""
    max_waiting: int = 1024
    """Most transfers that wait for staging."""
    passed_for_s: float = 5.0
    """How long others that fit may pass a transfer that waits for more staging than is free."""
    max_tombstones: int = 65536
    uncounted_regions: int = 0
    """Number of regions at a transfer's end that hold digests, not KV: no status counts their bytes."""


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Deadlines and limits of the producer."""

    limits: TransferLimits = field(default_factory=TransferLimits)
    """The deployment's."""
    accept_margin_s: float = 10.0
    """How long an OPEN may stay unanswered beyond the receiver's `staging_wait_s`."""
    transfer_deadline_s: float = 20.0
    """How long a peer with work may acknowledge nothing before its transfers fail."""
    connect_s: float = 5.0
    """For connecting and the whole handshake."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    rejected_backoff_max_s: float = 30.0
    """Longest pause before a peer that rejected this side (wrong key, other layout) is tried again."""
    congestion: str | None = "bbr"
    """Congestion control on paths over a millisecond; None: the kernel's default everywhere."""
    chunk_bytes: int = 4 << 20
    """The largest chunk."""
    min_chunk_bytes: int = 32 << 10
    """The smallest chunk, on slow links."""
    chunk_s: float = 0.05
    """Time that a chunk takes on a paced connection, which decides its size."""
    max_resends: int = 8
    """How often a damaged chunk is sent again before its transfer fails."""
    sample_s: float = 0.1
    """Period of the link samples and of the deadlines, while there is work."""

    @property
    def accept_deadline_s(self) -> float:
        """How long an OPEN may stay unanswered."""
        return self.limits.staging_wait_s + self.accept_margin_s
