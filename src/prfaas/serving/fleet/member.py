"""One gateway's place in its fleet: its lease, the others, who leads, and what the store says."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from prfaas.core.deployment import FleetConfig
from prfaas.serving.fleet.etcd import EtcdStore
from prfaas.serving.fleet.store import CompactedError, Entry, StoreChange, StoreError
from prfaas.serving.tasks import run_together

logger = logging.getLogger(__name__)

GATEWAYS = "gateways/"
# Others may be written into etcd by anybody who can, and would be shown to operators.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_RETRY_S = 0.5
# What has not changed is told again so often: a put that etcd has lost is then made good.
_REPEAT_S = 1.0
# Whoever else writes there gets no more of this gateway than a fleet may have.
_MOST_GATEWAYS, _MOST_KEYS = 64, 10_000
_MOST_KEY_CHARS, _MOST_VALUE_BYTES = 512, 1 << 20
_AT_ONCE = 256


class MemberOwner(Protocol):
    """What a gateway tells its fleet, and what it does about the values that the fleet has written."""

    def announcement(self) -> bytes:
        """What this gateway says of itself now."""

    def take_value(self, key: str, value: bytes | None, revision: int) -> None:
        """Take a value beside those of gateways, by its key without the prefix, with the revision of its change.

        `value` None: it was deleted.
        """

    def steer(self) -> None:
        """Go on from all that was read: at the start, and after each silence of the store."""

    def forget_revisions(self) -> None:
        """Count from nothing: the store has lost what it held, and what it holds now is told next."""


class FleetMember:
    """Keeps one gateway a member, and follows what is written under the fleet's prefix.

    The members' own keys are the election: the one that was created first leads, as all see it alike. When it goes,
    its lease ends, and the next oldest leads. Only the leader writes decisions, in a transaction that holds while its
    own key is the one that it created. So a leader that was thought dead writes nothing any more.

    Without the store everything stays as it was last seen. A lease that has outlived the silence is kept, so a short
    one changes no leader.
    """

    def __init__(
        self, store: EtcdStore, prefix: str, name: str, config: FleetConfig, owner: MemberOwner
    ) -> None:
        """
        Args:
            store: shared by all gateways.
            prefix: of all keys of this fleet.
            name: this gateway's, unlike any other's.
            config: how long a lease is, and how often the owner is asked.
            owner: whose member this is.
        """
        self.name = name
        self.members: dict[str, Entry] = {}
        """All gateways by name, as last seen, this one among them: what each tells of itself, and when it joined."""
        self.is_connected = False
        """Whether the store answers and this gateway is a member."""
        self.has_joined = False
        """Whether it ever was."""
        self.problem: str | None = "etcd has not answered yet"
        """Why it is not connected."""
        self.losses = 0
        """How often the store was lost."""
        self._store = store
        self._prefix = prefix
        self._config = config
        self._owner = owner
        self._lease: int | None = None
        self._values: set[str] = set()
        self._next_revision = 0

    @property
    def leader(self) -> str | None:
        """The member that joined first, as last seen; None where nobody has joined."""
        return min(self.members, key=lambda name: self.members[name].created, default=None)

    @property
    def leads(self) -> bool:
        """True if this gateway leads, as last seen."""
        return self.has_joined and self.leader == self.name

    @property
    def others(self) -> Mapping[str, Entry]:
        """The other gateways, as last seen."""
        return {name: entry for name, entry in self.members.items() if name != self.name}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._session()
            except Exception as error:
                self._lost(str(error))
                if not isinstance(error, StoreError):
                    raise
            await asyncio.sleep(_RETRY_S)

    async def put(self, key: str, value: bytes | None) -> int | None:
        """Write a value as a member, or delete it (None).

        Returns:
            The store's revision; None if this gateway is no member any more.

        Raises:
            StoreError: the store does not answer.
        """
        own = self.members.get(self.name)
        if own is None or not self.is_connected:
            return None
        return await self._store.put_while(
            self._prefix + key, value, self._prefix + GATEWAYS + self.name, own.created
        )

    async def leave(self) -> None:
        """Be no member any more, so that the others need not wait for the lease to end; then close the store."""
        try:
            if self._lease is not None:
                await self._store.revoke(self._lease)
        except StoreError as error:
            logger.info("left without telling etcd: %s", error)
        finally:
            await self._store.close()

    async def _session(self) -> None:
        """Be a member until something fails."""
        if self._lease is None or not await self._store.keep(self._lease):
            self._lease = await self._store.grant(self._config.lease_s)
        await self._join(self._lease)
        await run_together(self._keep(self._lease), self._follow(), self._publish(self._lease))

    async def _join(self, lease: int) -> None:
        key = self._prefix + GATEWAYS + self.name
        entries, revision = await self._store.read(self._prefix)
        own = next((entry for entry in entries if entry.key == key), None)
        known = self.members.get(self.name)
        if own is None:
            if await self._store.create(key, self._owner.announcement(), lease) is None:
                raise StoreError(f"another gateway has just joined as {self.name}")
            entries, revision = await self._store.read(self._prefix)
        elif known is None or own.created != known.created:
            # It may be what this gateway was before it was started again: then its lease ends soon.
            self._lease = None
            raise StoreError(
                f"another gateway is called {self.name}; if it is no earlier life of this one, give each gateway "
                "its own fleet.name"
            )
        self._take_all(entries, revision)
        if self.name not in self.members:
            raise StoreError("the lease ended as soon as it began")
        if not self.is_connected:
            logger.info("a member of the fleet as %s; %s leads", self.name, self.leader)
        self.is_connected, self.has_joined, self.problem = True, True, None
        self._owner.steer()

    def _take_all(self, entries: Sequence[Entry], revision: int) -> None:
        if revision + 1 < self._next_revision:
            # Revisions only grow: its data is gone, and so is no word that anybody has taken back.
            logger.warning("etcd has lost its data: what this gateway knows is written again")
            self._values.clear()
            self._owner.forget_revisions()
        leader = self.leader
        self.members, found = {}, dict[str, Entry]()
        for entry in entries:
            key = entry.key.removeprefix(self._prefix)
            name = key.removeprefix(GATEWAYS)
            if name == key and self._has_room(entry, len(found) < _MOST_KEYS):
                found[key] = entry
            elif (
                name != key
                and _NAME.fullmatch(name)
                and self._has_room(entry, len(self.members) < _MOST_GATEWAYS)
            ):
                self.members[name] = entry
        for key in [key for key in self._values if key not in found]:
            self._values.discard(key)
            self._owner.take_value(key, None, revision)
        for key, entry in found.items():
            self._values.add(key)
            self._owner.take_value(key, entry.value, entry.changed)
        self._next_revision = revision + 1
        if leader is not None and leader != self.leader:
            logger.warning("%s leads the fleet now", self.leader)

    async def _keep(self, lease: int) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            if not await self._store.keep(lease):
                self._lease = None
                raise StoreError("the lease has ended; etcd had not heard of this gateway for too long")

    async def _publish(self, lease: int) -> None:
        clock = asyncio.get_running_loop().time
        told, told_s = b"", -_REPEAT_S
        while True:
            value = self._owner.announcement()
            if value != told or clock() - told_s >= _REPEAT_S:
                await self._store.put(self._prefix + GATEWAYS + self.name, value, lease)
                told, told_s = value, clock()
            await asyncio.sleep(self._config.period_s)

    async def _follow(self) -> None:
        try:
            async for changes in self._store.watch(self._prefix, self._next_revision):
                for place, change in enumerate(changes):
                    self._take(change)
                    if not place % _AT_ONCE:
                        # Where more is there already, nothing else here waits.
                        await asyncio.sleep(0)
        except CompactedError:
            logger.info("etcd has dropped changes that were not seen: everything is read again")
            raise

    def _take(self, change: StoreChange) -> None:
        key = change.key.removeprefix(self._prefix)
        self._next_revision = max(self._next_revision, change.revision + 1)
        if not key.startswith(GATEWAYS):
            has_place = key in self._values or len(self._values) < _MOST_KEYS
            if change.entry is not None and not self._has_room(change.entry, has_place):
                return
            (self._values.discard if change.entry is None else self._values.add)(key)
            self._owner.take_value(key, None if change.entry is None else change.entry.value, change.revision)
            return
        name, leader = key.removeprefix(GATEWAYS), self.leader
        if not _NAME.fullmatch(name):
            return
        if change.entry is None:
            if self.members.pop(name, None) is not None:
                logger.warning("gateway %s has left the fleet", name)
        elif self._has_room(change.entry, name in self.members or len(self.members) < _MOST_GATEWAYS):
            if name not in self.members:
                logger.info("gateway %s has joined the fleet", name)
            self.members[name] = change.entry
        if name == self.name and change.entry is None:
            raise StoreError("the lease has ended; etcd had not heard of this gateway for too long")
        if self.leader != leader:
            logger.warning("%s leads the fleet now", self.leader)

    def _has_room(self, entry: Entry, has_place: bool) -> bool:
        """Whether a value is kept, if one more may be; this gateway's own always is."""
        fits = len(entry.key) <= _MOST_KEY_CHARS and len(entry.value) <= _MOST_VALUE_BYTES
        if (fits and has_place) or entry.key == self._prefix + GATEWAYS + self.name:
            return True
        logger.warning("etcd has more than a fleet writes, and it is left out here: %.100s", entry.key)
        return False

    def _lost(self, reason: str) -> None:
        if self.is_connected or self.problem is None:
            self.losses += 1
            logger.warning("the fleet goes on by what it knows: %s", reason)
        elif reason != self.problem:
            logger.warning("not a member of the fleet: %s", reason)
        self.is_connected, self.problem = False, reason
