"""Deadlines and limits of both ends. The defaults fit datacenters up to about 100 ms apart.

A consumer that a producer may send to.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """`link` names the bandwidth budget that the connections to this peer draw on; None bandwidth:
    unpaced. `on_demand`: connected by the first transfer instead of ahead of time.
    """

    name: str
    host: str
    port: int
    link: str
    connections: int
    bandwidth_bits_per_s: float | None
    on_demand: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= 64:
            raise ValueError(f"peer {self.name}: connections is {self.connections}, not within 1..64")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"peer {self.name}: port is {self.port}, not within 1..65535")
        if self.bandwidth_bits_per_s is not None and not self.bandwidth_bits_per_s > 0:
            raise ValueError(f"peer {self.name}: bandwidth_bits_per_s must be above 0 or absent")


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """How long the consumer waits for what (seconds).

    staging_wait_s: an OPEN waits that long for staging before it is refused.
    reconnect_grace_s: a producer without any connection that long has lost its unfinished transfers.
    progress_deadline_s: after END, or inside a frame, the producer must deliver something that often.
    idle_deadline_s: before END (prefill may be slow), a transfer must gain a byte that often.
    ttl_s: a complete transfer that nobody takes is dropped then.
    tombstone_s: a finished transfer's id is remembered at least that long, and until its ticket expires.
    """

    staging_wait_s: float = 30.0
    reconnect_grace_s: float = 2.0
    progress_deadline_s: float = 10.0
    idle_deadline_s: float = 600.0
    ttl_s: float = 120.0
    tombstone_s: float = 300.0
    handshake_s: float = 5.0
    user_timeout_s: float = 10.0
    congestion: str | None = "bbr"
    max_connections: int = 256
    max_waiting: int = 1024
    max_tombstones: int = 65536


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """How long the producer waits for what (seconds), and how it cuts.

    accept_deadline_s: an OPEN without an answer that long fails (longer than the receiver's staging_wait_s).
    reconnect_grace_s: a peer without any connection that long fails its transfers.
    progress_deadline_s: a connection with chunks in flight and no acknowledgement that long is closed, its
    chunks go back to the queue. transfer_deadline_s: a peer that has work and acknowledges nothing that long
    fails its transfers. max_resends: a chunk reported damaged more often fails its transfer.
    """

    accept_deadline_s: float = 60.0
    reconnect_grace_s: float = 2.0
    progress_deadline_s: float = 5.0
    transfer_deadline_s: float = 20.0
    connect_s: float = 5.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    user_timeout_s: float = 10.0
    congestion: str | None = "bbr"
    chunk_bytes: int = 1 << 20
    min_chunk_bytes: int = 32 << 10
    chunk_s: float = 0.05
    max_resends: int = 8
    sample_s: float = 0.1
