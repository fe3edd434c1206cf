"""A double of etcd for tests: one process's memory, with leases that a test's clock ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from prfaas.serving.fleet.store import Entry, StoreChange, StoreError


@dataclass
class MemoryEtcd:
    """What all gateways of a test share."""

    clock: Callable[[], float]
    up: bool = True
    revision: int = 1
    entries: dict[str, Entry] = field(default_factory=dict)
    leases: dict[int, float] = field(default_factory=dict)
    lengths_s: dict[int, int] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)
    history: list[StoreChange] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Nobody is answered from now on."""
        self.up = False
        self._wake()

    def start(self) -> None:
        """Everybody is answered again; leases begin anew, as with etcd."""
        self.up = True
        for lease in self.leases:
            self.leases[lease] = self.clock() + self.lengths_s[lease]

    def lose(self) -> None:
        """Its disk is another one."""
        self.revision = 1
        for kept in (self.entries, self.leases, self.lengths_s, self.holders, self.history):
            kept.clear()

    def expire(self) -> None:
        """End the leases whose time is over."""
        for lease in [lease for lease, until_s in self.leases.items() if until_s <= self.clock()]:
            self.end(lease)

    def end(self, lease: int) -> None:
        self.leases.pop(lease, None)
        for key in [key for key, holder in self.holders.items() if holder == lease]:
            self.set(key, None)

    def set(self, key: str, value: bytes | None, lease: int | None = None) -> int:
        self.revision += 1
        before = self.entries.get(key)
        if value is None:
            self.entries.pop(key, None)
            self.holders.pop(key, None)
            self.history.append(StoreChange(key, None, self.revision))
        else:
            created = self.revision if before is None else before.created
            entry = self.entries[key] = Entry(key, value, created, self.revision)
            if lease is not None:
                self.holders[key] = lease
            self.history.append(StoreChange(key, replace(entry), self.revision))
        self._wake()
        return self.revision

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class MemoryStore:
    """Implements `store.Store` for one gateway. `cut` loses its connection only."""

    def __init__(self, etcd: MemoryEtcd) -> None:
        self.etcd = etcd
        self.cut = False
        self.closed = False

    def _check(self) -> None:
        if self.cut or not self.etcd.up:
            raise StoreError("etcd does not answer: it is stopped")
        self.etcd.expire()

    async def grant(self, lease_s: int) -> int:
        self._check()
        lease = len(self.etcd.lengths_s) + 1
        self.etcd.lengths_s[lease] = lease_s
        self.etcd.leases[lease] = self.etcd.clock() + lease_s
        return lease

    async def keep(self, lease: int) -> bool:
        self._check()
        if lease not in self.etcd.leases:
            return False
        self.etcd.leases[lease] = self.etcd.clock() + self.etcd.lengths_s[lease]
        return True

    async def revoke(self, lease: int) -> None:
        self._check()
        self.etcd.end(lease)

    async def read(self, prefix: str) -> tuple[Sequence[Entry], int]:
        self._check()
        found = [entry for key, entry in self.etcd.entries.items() if key.startswith(prefix)]
        return found, self.etcd.revision

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        self._check()
        return None if key in self.etcd.entries else self.etcd.set(key, value, lease)

    async def put(self, key: str, value: bytes, lease: int) -> None:
        self._check()
        if lease not in self.etcd.leases:
            raise StoreError("etcd refuses: requested lease not found")
        self.etcd.set(key, value, lease)

    async def put_while(self, key: str, value: bytes | None, holder: str, created: int) -> int | None:
        self._check()
        found = self.etcd.entries.get(holder)
        if (0 if found is None else found.created) != created:
            return None
        return self.etcd.set(key, value)

    async def watch(self, prefix: str, first_revision: int) -> AsyncIterator[Sequence[StoreChange]]:
        while True:
            self._check()
            changed = self.etcd.changed
            due = [
                change
                for change in self.etcd.history
                if change.revision >= first_revision and change.key.startswith(prefix)
            ]
            first_revision = self.etcd.revision + 1
            if due:
                yield due
            await changed.wait()

    async def close(self) -> None:
        self.closed = True
