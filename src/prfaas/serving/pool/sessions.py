"""What the store keeps of an engine's or a tool's connection, and what it tells it."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from prfaas.serving.pool.memory_tier import PoolPage
from prfaas.serving.pool.page_table import Owner
from prfaas.serving.pool.protocol import SessionKind

NeededPages: TypeAlias = tuple[int, int, list[PoolPage]]
"""Group, first block, and its pages from there on."""


class StoreMatch(NamedTuple):
    """See `PoolMatch`, which has slots and offsets in place of the pages."""

    pin: int
    usable_tokens: int
    attention_tokens: int
    memory_tokens: int
    pages: Sequence[NeededPages]


class StoreSession:
    """One connection's pins and reservations."""

    def __init__(self, kind: SessionKind, rank: int, owner: Owner) -> None:
        self.kind = kind
        self.rank = rank
        self.owner = owner
        self.pins: dict[int, list[PoolPage]] = {}
        self.reserved: set[PoolPage] = set()
