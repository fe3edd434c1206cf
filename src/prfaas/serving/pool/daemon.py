"""The daemon of a pool: it owns arena and store, and serves engines over a Unix socket.

One event loop owns the store. A request is answered as soon as it is read, in the loop: none of them waits.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import xxhash

from prfaas.core.pool.eviction import EvictionPolicy, LruEviction
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.core.pool.quota import TenantEviction
from prfaas.serving.pool.arena import (
    Arena,
    ArenaError,
    ArenaLayout,
    check_room,
    create_arena,
    open_arena,
    provide_slabs,
)
from prfaas.serving.pool.connection import PoolConnection
from prfaas.serving.pool.events import PoolEventPublisher
from prfaas.serving.pool.memory_tier import NO_SLOT, PoolPage
from prfaas.serving.pool.page_table import Owner, row_of
from prfaas.serving.pool.processes import PeerProcess, owner_lives
from prfaas.serving.pool.protocol import Figures, OpenSession, PageRef
from prfaas.serving.pool.recovery import recover
from prfaas.serving.pool.ssd_tier import SsdFactory
from prfaas.serving.pool.store import PageStore, StoreSession
from prfaas.serving.tasks import LoopFailures

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_BACKLOG = 128
# Engines have one for each rank, and one more each.
_MOST_CONNECTIONS = 512
_MOST_HELD_BYTES = 256 << 20
_MOST_LOST_SESSIONS = 64


class PoolError(Exception):
    """Failure to start or go on; the message says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of a daemon."""

    socket: Path
    arena: Path
    """The file of shared memory, as `arena_path` names it."""
    memory_bytes: int
    """Limit of the arena, page table included."""
    keep_arena: bool = False
    """Leave the arena to the next daemon at an orderly end, too."""


def arena_path(pool_socket: Path, directory: Path = Path("/dev/shm")) -> Path:
    """Path of the arena of the pool with that socket; no two sockets share one."""
    digest = hashlib.blake2b(str(pool_socket.absolute()).encode(), digest_size=6).hexdigest()
    return directory / f"prfaas-{pool_socket.stem}-{digest}.arena"


class PoolDaemon:
    """Serves one pool, whose geometry is that of its arena, or of the first engine that opens a session.

    1. `serve` takes the lock, opens an earlier daemon's arena if there is one, and accepts connections.
    2. Each `PoolConnection` answers requests from the store, and calls `opened`, `used` and `closed` here.
    3. `_begin` makes a store for an arena, recovers its pages and provides its memory in a thread; `_end` closes it.
    4. Twice a second, slots that ended processes have left behind are freed.
    """

    def __init__(
        self,
        options: DaemonOptions,
        *,
        events: PoolEventPublisher | None = None,
        make_ssd: SsdFactory | None = None,
        make_policy: Callable[[PoolGeometry], EvictionPolicy[bytes]] = lambda _: LruEviction(),
        tenant_share: float = 1.0,
    ) -> None:
        self.store: PageStore | None = None
        """None until the geometry is known. Another geometry brings another store."""
        self._options = options
        self._events = events
        self._make_ssd = make_ssd
        self._make_policy = make_policy
        self._tenant_share = tenant_share
        self._connections: dict[PoolConnection, None] = {}
        # The newest session of each worker that ended without goodbye, and whose process may still write.
        self._lost: dict[tuple[Owner, int], tuple[PeerProcess, StoreSession]] = {}
        self._opening, self._verifying = asyncio.Lock(), asyncio.Lock()
        self._provider: threading.Thread | None = None
        self._stops_providing = threading.Event()
        self._checking: asyncio.Task[None] | None = None
        self._settles = False

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until cancelled. `ready` is called when engines can connect.

        Raises:
            PoolError: another daemon has the socket, or it cannot be made.
            ArenaError: the machine has too little memory.
        """
        options = self._options
        with _lock(options.socket):
            check_room(options.arena, options.memory_bytes)
            arena = open_arena(options.arena, options.memory_bytes)
            if arena is not None:
                arena.begin_epoch(_epoch_after(arena.epoch))
                await self._begin(arena)
            try:
                with _listening(options.socket) as listener:
                    await self._accept_until_cancelled(listener, ready)
            finally:
                await self._end()
                if not options.keep_arena:
                    options.arena.unlink(missing_ok=True)

    async def opened(
        self, message: OpenSession, process: PeerProcess
    ) -> tuple[PageStore | None, StoreSession | None]:
        """Open a session, as `PoolHost.opened`."""
        async with self._opening:
            if sum(lost == process for lost, _ in self._lost.values()) >= _MOST_LOST_SESSIONS:
                raise ValueError(f"{_MOST_LOST_SESSIONS} sessions of this process ended without a goodbye")
            if message.geometry is not None and message.kind == "tool":
                raise ValueError("a tool takes the geometry that the pool has")
            if message.geometry is not None:
                await self._agree_on(PoolGeometry.decode(message.geometry))
            store = self.store
            owner = process.owner(message.engine)
            if message.kind == "scheduler" and message.geometry is None:
                # The geometry comes from its engine's worker.
                sessions = () if store is None else store.sessions
                if not any(each.kind == "worker" and each.owner == owner for each in sessions):
                    raise ValueError("no worker of this engine has connected yet")
            if store is None:
                return None, None
            if not 0 <= message.rank < store.geometry.ranks:
                raise ValueError(
                    f"rank {message.rank} is none of the {store.geometry.ranks} that the pool has"
                )
            return store, store.open_session(message.kind, message.rank, owner)

    def closed(self, connection: PoolConnection) -> None:
        """Close a connection's session, as `PoolHost.closed`."""
        self._connections.pop(connection, None)
        store, session = connection.store, connection.session
        connection.session = None
        if store is not None and session is not None:
            writes_no_more = connection.said_goodbye or not connection.process.lives
            store.close_session(session, writes_no_more=writes_no_more)
            if session.kind == "worker" and not writes_no_more:
                self._lost[session.owner, session.rank] = connection.process, session

    def has_room(self) -> bool:
        """Whether messages that are not whole yet fit into memory, as `PoolHost.has_room`."""
        return sum(len(each.received) for each in self._connections) <= _MOST_HELD_BYTES

    def used(self) -> None:
        """Schedule deferred work, as `PoolHost.used`."""
        if not self._settles:
            self._settles = True
            asyncio.get_running_loop().call_soon(self._settle)

    def figures(self) -> Figures:
        """Figures of the pool, as `PoolHost.figures`."""
        return Figures({} if self.store is None else pool_figures(self.store))

    async def verified(self) -> Figures:
        """Verify every page, as `PoolHost.verified`: for one who asks at a time."""
        async with self._verifying:
            store = self.store
            right = wrong = ssd_right = ssd_wrong = 0
            if store is not None:
                right, wrong = await verify_pages(store, list(store.memory.rows.values()))
            if store is not None and store.ssd is not None:
                counts: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
                store.ssd.verify(lambda *found: counts.put_nowait(found))
                ssd_right, ssd_wrong = await counts.get()
        return Figures(
            {
                "right_pages": right,
                "wrong_pages": wrong,
                "ssd_right_pages": ssd_right,
                "ssd_wrong_pages": ssd_wrong,
            }
        )

    async def _agree_on(self, geometry: PoolGeometry) -> None:
        """Make sure that the store has that geometry.

        Raises:
            ValueError: engines of another one are connected, or there cannot be an arena.
        """
        if self.store is not None:
            if self.store.geometry == geometry:
                return
            if any(session.kind != "tool" for session in self.store.sessions):
                raise ValueError(
                    f"the pool serves engines of fingerprint {self.store.geometry.fingerprint}, and this one has "
                    f"{geometry.fingerprint} or another layout: it can connect when they have ended"
                )
            logger.warning("an engine of another model has connected: the pool drops what it has")
            await self._end()
        options = self._options
        try:
            layout = ArenaLayout.of(geometry, options.memory_bytes)
            arena = await asyncio.to_thread(create_arena, options.arena, layout, _epoch_after(0))
        except (ArenaError, OSError) as error:
            logger.warning("there is no arena for this engine: %s", error)
            raise ValueError(f"there is no arena: {error}") from None
        await self._begin(arena)

    async def _begin(self, arena: Arena) -> None:
        geometry = arena.layout.geometry
        ssd = None
        if self._make_ssd is not None:
            try:
                ssd = await asyncio.to_thread(self._make_ssd, geometry, arena.view)
            except (OSError, ValueError) as error:
                logger.warning("the pool goes on without SSD: %s", error)
        eviction = TenantEviction(
            arena.layout.pages_bytes, partial(self._make_policy, geometry), self._tenant_share
        )
        store = PageStore(arena, eviction, events=self._events, ssd=ssd)
        if self._events is not None:
            self._events.opened(geometry, arena.epoch)
        recovered = recover(store, owner_lives)
        self.store = store
        self._stops_providing = threading.Event()
        self._provider = threading.Thread(
            target=provide_slabs,
            args=(arena, partial(_in_loop, asyncio.get_running_loop(), store), self._stops_providing.is_set),
            name="prfaas-pool-memory",
        )
        self._provider.start()
        if recovered:
            self._checking = asyncio.create_task(_check(store, recovered))

    async def _end(self) -> None:
        """Close every connection, and let go of the store."""
        for connection in list(self._connections):
            if connection.session is not None:
                connection.close()
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
            self._checking = None
        self._stops_providing.set()
        if self._provider is not None:
            await asyncio.to_thread(self._provider.join)
            self._provider = None
        self._lost.clear()
        if self.store is not None:
            if self.store.ssd is not None:
                await asyncio.to_thread(self.store.ssd.close)
            self.store.memory.arena.close()
            self.store = None

    async def _accept_until_cancelled(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        loop, failures = asyncio.get_running_loop(), LoopFailures()
        loop.add_reader(listener.fileno(), self._accept, listener)
        try:
            ready()
            while True:
                await asyncio.sleep(_POLL_S)
                # It is not heard for a while where no descriptor was left.
                loop.add_reader(listener.fileno(), self._accept, listener)
                with failures.spared("PoolDaemon", "what ended processes left"):
                    self._free_what_ended_processes_left()
        finally:
            loop.remove_reader(listener.fileno())
            for connection in list(self._connections):
                connection.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            logger.warning("a connection was not accepted: %s", error.strerror)
            # It stays ready to be read, again and again.
            asyncio.get_running_loop().remove_reader(listener.fileno())
            return
        connection.setblocking(False)
        try:
            if len(self._connections) >= _MOST_CONNECTIONS:
                self._close_oldest()
            self._connections[PoolConnection(connection, self)] = None
        except (OSError, ValueError) as error:
            logger.warning("a connection was not accepted: %s", error)
            connection.close()

    def _close_oldest(self) -> None:
        others = [each for each in self._connections if each.session is None or each.session.kind == "tool"]
        if not others:
            raise ValueError(f"{_MOST_CONNECTIONS} of engines are open")
        others[0].close()

    def _free_what_ended_processes_left(self) -> None:
        store = self.store
        if store is None:
            return
        for place, (process, session) in list(self._lost.items()):
            if process.lives:
                continue
            del self._lost[place]
            store.reservations.worker_ended(session.owner, session.rank, session)
        for owner in store.reservations.owners():
            if owner.process_group and not owner_lives(owner):
                store.reservations.owner_ended(owner)

    def _settle(self) -> None:
        self._settles = self.store is not None and self.store.settle()
        if self._settles:
            asyncio.get_running_loop().call_soon(self._settle)


_BATCH_BYTES = 64 << 20


async def verify_pages(store: PageStore, pages: Sequence[PoolPage]) -> tuple[int, int]:
    """Hash these pages, a bounded number of bytes at a time, in a thread. Wrong ones are dropped.

    Returns:
        How many pages were in memory and right, and how many wrong.
    """
    right = wrong = 0
    batch: list[PoolPage] = []
    batch_bytes = 0
    for page in pages:
        batch.append(page)
        batch_bytes += store.geometry.page_bytes(page.group)
        if batch_bytes >= _BATCH_BYTES or page is pages[-1]:
            rights = await _verify(store, batch)
            right, wrong = right + rights.count(True), wrong + rights.count(False)
            batch, batch_bytes = [], 0
    return right, wrong


async def _verify(store: PageStore, pages: Sequence[PoolPage]) -> list[bool]:
    present = [page for page in pages if page.slot != NO_SLOT and page.state.is_readable]
    refs = [PageRef(page.slot, page.offset) for page in present]
    for page in present:
        page.pins += 1
    parts = [(page.offset, page.group, tuple(page.checksums)) for page in present]
    try:
        rights = await asyncio.to_thread(_are_right, store.geometry, store.memory.arena.view, parts)
    finally:
        store.unpin(refs)
    for page, right in zip(present, rights, strict=True):
        if right:
            store.memory.table.set_must_verify(row_of(page.slot), False)
        else:
            store.drop_wrong(page)
    return rights


def _are_right(
    geometry: PoolGeometry, view: memoryview, pages: Sequence[tuple[int, int, tuple[int, ...]]]
) -> list[bool]:
    return [
        all(
            xxhash.xxh3_64_intdigest(view[begin : begin + geometry.group(group).rank_bytes]) == checksum
            for rank, checksum in enumerate(checksums)
            for begin in [offset + geometry.rank_offset(group, rank)]
        )
        for offset, group, checksums in pages
    ]


def pool_figures(store: PageStore) -> dict[str, int | float | str | dict[str, int]]:
    """Counters and gauges of a store.

    The keys of inner dictionaries are numbers of KV groups.
    """
    geometry, memory = store.geometry, store.memory
    in_memory, on_ssd = store.tier_pages["memory"], store.tier_pages["ssd"]
    pinned = {page for session in store.sessions for match in session.pins.values() for page in match}
    layout = memory.arena.layout
    of_tier = {} if store.ssd is None else store.ssd.figures()
    return {
        **{f"ssd_{name}": figure for name, figure in of_tier.items()},
        "epoch": store.epoch,
        "fingerprint": geometry.fingerprint,
        "engine_sessions": sum(session.kind != "tool" for session in store.sessions),
        "memory_bytes": layout.pages_bytes,
        "provided_bytes": memory.provided_slabs * layout.slab_bytes,
        "used_bytes": memory.used_bytes(),
        "ssd_bytes": sum(count * geometry.page_bytes(group) for group, count in on_ssd.items()),
        "memory_pages": {str(group): count for group, count in in_memory.items()},
        "ssd_pages": {str(group): count for group, count in on_ssd.items()},
        "pinned_pages": len(pinned),
        "writing_pages": len(store.reservations),
        **asdict(store.counters),
    }


async def _check(store: PageStore, recovered: Sequence[PoolPage]) -> None:
    """Verify recovered pages, so that readers need not."""
    right, wrong = await verify_pages(store, recovered)
    logger.info("%d pages of the last daemon were verified, %d were wrong", right, wrong)


def _in_loop(loop: asyncio.AbstractEventLoop, store: PageStore, slab: int) -> None:
    loop.call_soon_threadsafe(store.memory.add_slab, slab)


def _epoch_after(epoch: int) -> int:
    return max(epoch + 1, time.time_ns() // 1_000_000)


@contextmanager
def _lock(pool_socket: Path) -> Iterator[None]:
    """Held while a daemon serves that socket.

    Raises:
        PoolError: another daemon has it, or its directory cannot be used.
    """
    path = pool_socket.with_suffix(".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PoolError(f"the pool's lock {path} cannot be made: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise PoolError(f"another daemon serves the pool at {pool_socket}") from None
    finally:
        os.close(file)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket at that path, which only this user can connect to.

    Raises:
        PoolError: it cannot be made.
    """
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    ) as listener:
        try:
            path.unlink(missing_ok=True)
            # Permissions before anybody can connect: a socket takes no connections until it listens.
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise PoolError(f"the pool's socket {path} cannot be made: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)
