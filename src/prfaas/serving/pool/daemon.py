"""The daemon of a pool: it owns arena and store, and serves engines over a Unix socket.

One event loop owns the store. A request is answered as soon as it is read, in the loop: only opening a session and
verifying pages wait for anything.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec

from prfaas.core.pool.eviction import EvictionPolicy, LruEviction
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.core.pool.keys import KEY_BYTES
from prfaas.core.pool.quota import TenantEviction
from prfaas.serving.pool import protocol
from prfaas.serving.pool.arena import (
    Arena,
    ArenaError,
    ArenaLayout,
    check_room,
    create_arena,
    open_arena,
    provide_slabs,
)
from prfaas.serving.pool.events import PoolEventPublisher
from prfaas.serving.pool.processes import Owner, PeerProcess, owner_lives
from prfaas.serving.pool.recovery import recover, verify_pages, verify_recovered
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
_READ_BYTES = 1 << 18
# What a process sends before it has opened a session: of a geometry, some KiB.
_MOST_OPENING_BYTES = 1 << 20
_PAGE_ID_BYTES = KEY_BYTES + 1
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(protocol.Request)


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


class PoolConnection:
    """A connection of an engine or tool: its requests are read and answered one after the other.

    The first one opens the session. Bad input ends this connection and nothing else, and who reads no answers is not
    read either. asyncio's streams cannot pass file descriptors, so this reads and writes the socket itself.
    """

    def __init__(self, connection: socket.socket, daemon: "PoolDaemon") -> None:
        """Serve a non-blocking socket; call it in the event loop.

        Raises:
            ValueError: the process at the other end cannot be seen.
        """
        self.process = PeerProcess.of(connection)
        self.store: PageStore | None = None
        self.session: StoreSession | None = None
        self.said_goodbye = False
        self.received = bytearray()
        """What is not answered yet."""
        self._connection = connection
        self._daemon = daemon
        self._loop = asyncio.get_running_loop()
        # Stays while the connection is read: to wait for the socket anew for each request costs as much as a look-up.
        self._is_read = self._has_hung_up = False
        self._more = asyncio.Event()
        self._task = self._loop.create_task(self._serve())
        self._task.add_done_callback(self._ended)

    def close(self) -> None:
        """End the session now, and the connection as soon as nothing waits for its socket."""
        self._daemon.closed(self)
        self._task.cancel()

    def _ended(self, _task: "asyncio.Task[None]") -> None:
        self._daemon.closed(self)
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()

    async def _serve(self) -> None:
        try:
            await self._open(await self._next(_MOST_OPENING_BYTES))
            while not self.said_goodbye:
                answer = await self._answer_to(await self._next(protocol.MOST_MESSAGE_BYTES))
                await self._loop.sock_sendall(self._connection, _message(answer))
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            # Who has not read what came before does not hear why.
            with suppress(OSError):
                self._connection.send(_message(protocol.Refused(str(error))))
        except (OSError, EOFError):
            pass
        except Exception:
            logger.exception("a request of process %d could not be answered", self.process.pid)

    async def _next(self, most_bytes: int) -> protocol.Request:
        """The next request, as soon as all of it has come."""
        await self._receive(protocol.LENGTH_BYTES)
        length = int.from_bytes(self.received[: protocol.LENGTH_BYTES], "little")
        if not 0 < length <= most_bytes:
            raise ValueError(f"a message of {length} bytes is none of the pool's")
        end = protocol.LENGTH_BYTES + length
        await self._receive(end)
        body = bytes(self.received[protocol.LENGTH_BYTES : end])
        del self.received[:end]
        request: protocol.Request = _DECODER.decode(body)
        return request

    async def _receive(self, wanted_bytes: int) -> None:
        while len(self.received) < wanted_bytes:
            if self._has_hung_up:
                raise EOFError
            if not self._is_read:
                self._is_read = True
                self._loop.add_reader(self._connection.fileno(), self._readable)
            self._more.clear()
            await self._more.wait()
            if len(self.received) > _MOST_OPENING_BYTES and not self._daemon.has_room():
                raise ValueError(
                    "the pool has no memory for this message beside those of others: send it again"
                )

    def _readable(self) -> None:
        try:
            received = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        self.received += received
        self._has_hung_up = not received
        if self._has_hung_up or len(self.received) > _READ_BYTES:
            self._loop.remove_reader(self._connection.fileno())
            self._is_read = False
        self._more.set()

    async def _open(self, request: protocol.Request) -> None:
        if not isinstance(request, protocol.OpenSession):
            raise ValueError("the first message opens the session")
        if request.version != protocol.PROTOCOL_VERSION:
            raise ValueError(f"the pool speaks version {protocol.PROTOCOL_VERSION}, not {request.version}")
        store, self.session = await self._daemon.opened(request, self.process)
        self.store = store
        opened = _message(protocol.Opened(0 if store is None else store.epoch, store is not None))
        descriptors = [] if store is None else [store.memory.arena.fileno]
        socket.send_fds(self._connection, [opened], descriptors)

    async def _answer_to(self, request: protocol.Request) -> protocol.Answer:
        match request:
            case protocol.OpenSession():
                raise ValueError("the session is open already")
            case protocol.Stats():
                return self._daemon.figures()
            case protocol.Verify():
                return await self._daemon.verified()
            case protocol.Goodbye():
                self.said_goodbye = True
                # What the session had is free before the client hears that it is.
                self._daemon.closed(self)
                return protocol.Done()
        store, session = self.store, self.session
        if store is None or session is None:
            raise ValueError("the pool has no pages before the first engine has opened a session")
        self._daemon.used()
        match request:
            case protocol.Match():
                return store.match(session, request)
            case protocol.Reserve():
                pages = zip(_page_ids(request.page_ids), request.identities, strict=True)
                refs = store.reserve(request.tenant, list(pages), session)
                return protocol.Reserved(
                    protocol.packed([-1 if ref is None else ref.slot for ref in refs]),
                    protocol.packed([0 if ref is None else ref.offset for ref in refs]),
                )
            case protocol.Commit():
                checksums = protocol.unpacked(request.checksums, "Q")
                for slot, checksum in zip(protocol.unpacked(request.slots), checksums, strict=True):
                    store.reservations.commit(slot, session.rank, checksum)
            case protocol.Abort():
                for slot in protocol.unpacked(request.slots):
                    if session.kind == "scheduler":
                        store.reservations.abort_all(slot)
                    else:
                        store.reservations.abort(slot, session.rank)
            case protocol.Unpin():
                store.unpin_match(session, request.pin)
            case protocol.Discard():
                store.discard(_page_ids(request.page_ids))
            case protocol.Clear():
                return protocol.Figures({"dropped_pages": store.clear()})
        return protocol.Done()


def _message(answer: protocol.Answer) -> bytes:
    body = _ENCODER.encode(answer)
    return len(body).to_bytes(protocol.LENGTH_BYTES, "little") + body


def _page_ids(page_ids: bytes) -> list[bytes]:
    if len(page_ids) % _PAGE_ID_BYTES:
        raise ValueError(f"{len(page_ids)} bytes of page ids are not a multiple of {_PAGE_ID_BYTES}")
    return [page_ids[at : at + _PAGE_ID_BYTES] for at in range(0, len(page_ids), _PAGE_ID_BYTES)]


class PoolDaemon:
    """Serves one pool, whose geometry is that of its arena, or of the first engine that opens a session.

    1. `serve` takes the lock, opens an earlier daemon's arena if there is one, and accepts connections.
    2. Each `PoolConnection` answers requests from the store, and calls `opened`, `used` and `closed`.
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
        self, message: protocol.OpenSession, process: PeerProcess
    ) -> tuple[PageStore | None, StoreSession | None]:
        """Open a session.

        Raises:
            ValueError: it is refused.
        """
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
        """Close a connection's session, and forget the connection. Idempotent."""
        self._connections.pop(connection, None)
        store, session = connection.store, connection.session
        connection.session = None
        if store is not None and session is not None:
            writes_no_more = connection.said_goodbye or not connection.process.lives
            store.close_session(session, writes_no_more=writes_no_more)
            if session.kind == "worker" and not writes_no_more:
                self._lost[session.owner, session.rank] = connection.process, session

    def has_room(self) -> bool:
        """Whether messages that are not whole yet fit into memory, of all connections together."""
        return sum(len(each.received) for each in self._connections) <= _MOST_HELD_BYTES

    def used(self) -> None:
        """Schedule the store's deferred work."""
        if not self._settles:
            self._settles = True
            asyncio.get_running_loop().call_soon(self._settle)

    def figures(self) -> protocol.Figures:
        """Figures of the pool."""
        return protocol.Figures({} if self.store is None else pool_figures(self.store))

    async def verified(self) -> protocol.Figures:
        """Verify every page, for one who asks at a time."""
        async with self._verifying:
            store = self.store
            right = wrong = ssd_right = ssd_wrong = 0
            if store is not None:
                right, wrong = await verify_pages(store, list(store.memory.rows.values()))
            if store is not None and store.ssd is not None:
                counts: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
                store.ssd.verify(lambda *found: counts.put_nowait(found))
                ssd_right, ssd_wrong = await counts.get()
        return protocol.Figures(
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
        loop = asyncio.get_running_loop()

        def provided(slab: int) -> None:
            loop.call_soon_threadsafe(store.memory.add_slab, slab)

        arguments = (arena, provided, self._stops_providing.is_set)
        self._provider = threading.Thread(target=provide_slabs, args=arguments, name="prfaas-pool-memory")
        self._provider.start()
        if recovered:
            self._checking = asyncio.create_task(verify_recovered(store, recovered))

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
