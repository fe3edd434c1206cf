"""What the store that a fleet's gateways share holds and tells (`etcd.py`)."""

from dataclasses import dataclass


class StoreError(OSError):
    """The store does not answer, or refuses."""


class CompactedError(StoreError):
    """The store no longer has the changes that were asked for: read everything again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of the store."""

    key: str
    value: bytes
    created: int
    """The store's revision at which the key came to be."""
    changed: int
    """The store's revision at which it got this value."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """A key that got a value, or went."""

    key: str
    entry: Entry | None
    """None: it went, by a deletion or with its lease."""
    revision: int
