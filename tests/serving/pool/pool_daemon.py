"""A pool's daemon in a thread of the test's process, and a small model's geometry."""

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import uvloop
import xxhash

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageGroup, PageIdentity, PoolGeometry
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.daemon import DaemonOptions, PoolDaemon
from prfaas.serving.pool.events import PoolEventPublisher
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PageRef
from prfaas.serving.pool.ssd_tier import SsdFactory

MIB = 1 << 20
TENANT = b"tenant01"
HYBRID = PoolGeometry(
    "tiny hybrid",
    1,
    (
        PageGroup(0, GroupKind.FULL, 32, 0, 4096),
        PageGroup(1, GroupKind.STATE, 32, 0, 65536),
        PageGroup(2, GroupKind.WINDOW, 16, 40, 2048),
    ),
)
DENSE = PoolGeometry("tiny dense", 1, (PageGroup(0, GroupKind.FULL, 16, 0, 8192),))
WAIT_S = 20.0


class DaemonThread:
    """Runs a daemon until it is left; `daemon` belongs to its loop."""

    def __init__(
        self,
        options: DaemonOptions,
        *,
        events: PoolEventPublisher | None = None,
        make_ssd: Callable[[asyncio.AbstractEventLoop], SsdFactory] | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        self.options = options
        self.daemon: PoolDaemon | None = None
        self.error: BaseException | None = None
        self._events = events
        self._make_ssd = make_ssd
        self._tenant_share = tenant_share
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-daemon")

    def start(self) -> "DaemonThread":
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self.error is not None:
            self._thread.join(WAIT_S)
            raise self.error
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            assert self._loop is not None and self._task is not None
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def in_loop(self, function: Callable[[PoolDaemon], object]) -> object:
        """Have a function called in the daemon's loop, and wait for what it returns."""

        async def call() -> object:
            assert self.daemon is not None
            return function(self.daemon)

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(WAIT_S)

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        make_ssd = None if self._make_ssd is None else self._make_ssd(self._loop)
        self.daemon = PoolDaemon(
            self.options, events=self._events, make_ssd=make_ssd, tenant_share=self._tenant_share
        )
        await self.daemon.serve(self._ready.set)


def pool_options(directory: Path, memory_bytes: int = 8 * MIB, *, keep_arena: bool = False) -> DaemonOptions:
    """A daemon whose arena is in `directory` too: tests leave /dev/shm alone."""
    return DaemonOptions(directory / "pool.sock", directory / "pool.arena", memory_bytes, keep_arena)


@contextlib.contextmanager
def running_daemon(
    options: DaemonOptions,
    *,
    events: PoolEventPublisher | None = None,
    make_ssd: Callable[[asyncio.AbstractEventLoop], SsdFactory] | None = None,
    tenant_share: float = 1.0,
) -> Iterator[DaemonThread]:
    """A daemon that serves."""
    thread = DaemonThread(options, events=events, make_ssd=make_ssd, tenant_share=tenant_share).start()
    try:
        yield thread
    finally:
        thread.stop()


@contextlib.contextmanager
def connected(
    options: DaemonOptions,
    kind: str = "scheduler",
    geometry: PoolGeometry | None = HYBRID,
    rank: int = 0,
    engine_id: str = "",
) -> Iterator[PoolClient]:
    """A client whose pool has all its memory."""
    client = PoolClient(options.socket, kind, geometry, rank, engine_id=engine_id)  # type: ignore[arg-type]
    try:
        assert client.connect()
        if geometry is not None:
            wait_until(lambda: is_provided(client))
        yield client
    finally:
        client.close()


def is_provided(client: PoolClient) -> bool:
    """Whether the pool can use all its memory."""
    figures = client.stats()
    return figures is not None and figures["provided_bytes"] == figures["memory_bytes"]


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Until it holds; fails after the timeout."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def chain_of(geometry: PoolGeometry, token_ids: list[int], salt: str = "", adapter: str = "") -> KeyChain:
    """The keys of a prompt."""
    chain = KeyChain(geometry.step_tokens, salt, adapter)
    chain.extend(token_ids)
    return chain


def packed_chain(chain: KeyChain) -> bytes:
    """As `PoolClient.match` takes it."""
    return b"".join(chain.keys)


def pages_of(
    geometry: PoolGeometry, token_ids: list[int], salt: str = "", adapter: str = ""
) -> list[tuple[bytes, PageIdentity | None]]:
    """Every page of every group that a prompt's whole blocks have."""
    chain = chain_of(geometry, token_ids, salt, adapter)
    pages: list[tuple[bytes, PageIdentity | None]] = []
    for group in geometry.groups:
        for end in range(group.block_tokens, len(token_ids) + 1, group.block_tokens):
            identity = None
            if group == geometry.lead:
                start = end - group.block_tokens
                identity = PageIdentity(
                    chain.key_at(start) if start else b"",
                    np.array(token_ids[start:end], "<u4").tobytes(),
                    salt,
                    adapter,
                )
            pages.append((page_id(chain.key_at(end), group.index), identity))
    return pages


def part_of(geometry: PoolGeometry, page: bytes, rank: int = 0) -> bytes:
    """The bytes that a test puts into a rank's part of a page: they follow from its name."""
    size = geometry.group(page[-1]).rank_bytes
    seed = hashlib.blake2b(page + bytes((rank,)), digest_size=64).digest()
    return (seed * (size // 64 + 1))[:size]


def write_part(client: PoolClient, ref: PageRef, page: bytes, rank: int = 0) -> int:
    """Write a rank's part as a worker does. Returns its checksum."""
    geometry = client.geometry
    assert geometry is not None
    part = part_of(geometry, page, rank)
    with client.writing(client.epoch) as allowed:
        assert allowed
        begin = ref.offset + geometry.rank_offset(page[-1], rank)
        client.arena[begin : begin + len(part)] = np.frombuffer(part, np.uint8)
    return xxhash.xxh3_64_intdigest(part)


def read_part(client: PoolClient, ref: PageRef, group: int, rank: int = 0) -> bytes:
    """A rank's part as it lies in the arena."""
    geometry = client.geometry
    assert geometry is not None
    begin = ref.offset + geometry.rank_offset(group, rank)
    return client.arena[begin : begin + geometry.group(group).rank_bytes].tobytes()


def store_prompt(client: PoolClient, token_ids: list[int], salt: str = "", tenant: bytes = TENANT) -> int:
    """Store every page of a prompt by one client that is scheduler and worker. Returns how many were written."""
    geometry = client.geometry
    assert geometry is not None
    pages = pages_of(geometry, token_ids, salt)
    refs = client.reserve(tenant, pages)
    assert refs is not None
    written = [(ref, page) for ref, (page, _) in zip(refs, pages, strict=True) if ref is not None]
    client.commit([(ref, write_part(client, ref, page)) for ref, page in written])
    return len(written)


# Python and its imports take a daemon longer than the rest of a test, so daemons are forked of a process that has them.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["uvloop", "prfaas.serving.pool.client", "prfaas.serving.pool.daemon"])


def _serve(options: DaemonOptions, ready: Connection) -> None:
    os.setsid()
    uvloop.run(PoolDaemon(options).serve(lambda: ready.send_bytes(b"ready")))


@contextlib.contextmanager
def daemon_process(options: DaemonOptions) -> Iterator[BaseProcess]:
    """A daemon that can be killed."""
    told, ready = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_serve, args=(options, ready))
    process.start()
    ready.close()
    try:
        with told:
            assert told.recv_bytes() == b"ready"
        yield process
    finally:
        process.kill()
        process.join(WAIT_S)
        process.close()


_WORK = """
import sys, time
from pathlib import Path
from prfaas.serving.pool.client import PoolClient
from tests.serving.pool.pool_daemon import HYBRID, TENANT, is_provided, pages_of, wait_until

clients = [PoolClient(Path(sys.argv[1]), kind, HYBRID) for kind in ("scheduler", "worker")]
assert all(client.connect() for client in clients)
wait_until(lambda: is_provided(clients[0]))
refs = clients[0].reserve(TENANT, pages_of(HYBRID, list(range(1, 65))))
for ref in refs:
    assert ref is not None
    print(*ref, flush=True)
print("reserved", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def writing_engine(options: DaemonOptions) -> Iterator[tuple["subprocess.Popen[bytes]", list[PageRef]]]:
    """An engine of its own process group that has reserved pages and not committed them."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", _WORK, str(options.socket)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
    )
    try:
        assert process.stdout is not None
        lines: list[bytes] = []
        while (line := process.stdout.readline()) != b"reserved\n":
            assert line, "the engine ended"
            lines.append(line)
        yield process, [PageRef(*map(int, line.split())) for line in lines]
    finally:
        process.kill()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()


def state_of(client: PoolClient, slot: int) -> PageState:
    """State of a page that a match gave, as a client sees it."""
    return PageState(client.page_states([PageRef(slot, 0)])[0])
