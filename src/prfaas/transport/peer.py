"""A consumer that a producer may send to."""

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
