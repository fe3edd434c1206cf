"""Interface of the store that a fleet's gateways share; `etcd.EtcdStore` is the real one."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


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


class Store(Protocol):
    """Keys with values, all of them with one growing revision. Every method but `close` raises StoreError."""

    async def grant(self, lease_s: int) -> int:
        """A new lease that ends unless it is kept every `lease_s` seconds. Returns its number."""
        ...

    async def keep(self, lease: int) -> bool:
        """Let a lease go on; False if it has ended."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and all that was put with it."""
        ...

    async def read(self, prefix: str) -> tuple[Sequence[Entry], int]:
        """All that begins with `prefix`, and the revision at which it was so."""
        ...

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        """Put a key that is not there. Returns the revision; None if it is there."""
        ...

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """Give a key a value that goes with a lease."""
        ...

    async def put_while(self, key: str, value: bytes | None, holder: str, created: int) -> int | None:
        """Give a key a value that stays, or delete it (None), only while `holder` is the key that was created then.

        Returns the revision; None if it is not.
        """
        ...

    def watch(self, prefix: str, first_revision: int) -> AsyncIterator[Sequence[StoreChange]]:
        """All changes of what begins with `prefix`, from a revision on, in order; raises CompactedError."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...
