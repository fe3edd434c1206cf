"""What the store keeps of an engine's or a tool's connection."""

from prfaas.serving.pool.memory_tier import PoolPage
from prfaas.serving.pool.page_table import Owner
from prfaas.serving.pool.protocol import SessionKind


class StoreSession:
    """One connection's pins and reservations."""

    def __init__(self, kind: SessionKind, rank: int, owner: Owner) -> None:
        self.kind = kind
        self.rank = rank
        self.owner = owner
        self.pins: dict[int, list[PoolPage]] = {}
        self.reserved: set[PoolPage] = set()
