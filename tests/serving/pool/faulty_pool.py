"""A pool's daemon and engines in processes that can be killed, and a disk that can be damaged."""

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import uvloop
import xxhash

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.eviction import LruEviction
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.daemon import DaemonOptions, PoolDaemon
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.ssd_tier import FileTier, SsdOptions

from .pool_daemon import (
    TENANT,
    chain_of,
    packed_chain,
    pages_of,
    part_of,
    pool_options,
    state_of,
    wait_until,
    write_part,
)

GEOMETRY = PoolGeometry(
    "faulty",
    1,
    (PageGroup(0, GroupKind.FULL, 16, 0, 4096), PageGroup(1, GroupKind.STATE, 16, 0, 16384)),
)
MEMORY_BYTES = 1 << 20
SSD_BYTES = 2 << 20
PROMPTS = range(5)
PROMPT_BLOCKS = 4
PROMPT_TOKENS = 16 * PROMPT_BLOCKS
PROMPT_PAGES = 2 * PROMPT_BLOCKS

# Processes are forked off one that has everything imported and no threads.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["prfaas.serving.pool.node", "prfaas.serving.pool.client", "uvloop"])


def prompt(number: int) -> list[int]:
    return [number * 1000 + token for token in range(PROMPT_TOKENS)]


def store(client: PoolClient, number: int, *, then: Callable[[], None] = lambda: None) -> int:
    """Store what there is room for of a prompt. Returns how many pages."""
    pages = pages_of(GEOMETRY, prompt(number))
    refs = client.reserve(TENANT, pages)
    if refs is None:
        return 0
    ends = []
    for (page, _), ref in zip(pages, refs, strict=True):
        if ref is not None:
            then()
            try:
                ends.append((ref, write_part(client, ref, page)))
            except AssertionError:
                # The daemon that made the reservation is gone.
                return 0
    client.commit(ends)
    return len(ends)


def load(client: PoolClient, number: int, limit_tokens: int = PROMPT_TOKENS) -> int:
    """Load a prompt as a worker does. Returns its tokens, 0 if that failed; wrong bytes are an error."""
    chain = chain_of(GEOMETRY, prompt(number))
    match = client.match(packed_chain(chain), 0, limit_tokens, whole=True, tenant=TENANT, pin=True)
    if match is None or not match.usable_tokens:
        return 0
    refs = [ref for _, _, refs in match.pages for ref in refs]
    for ref in refs:
        wait_until(lambda slot=ref.slot: state_of(client, slot) is not PageState.PROMOTING)  # type: ignore[misc]
    copies, is_right = [], all(state_of(client, ref.slot).is_readable for ref in refs)
    for group, first, group_refs in match.pages:
        for block, ref in enumerate(group_refs, first):
            page = chain.key_at((block + 1) * 16) + bytes((group,))
            expected = part_of(GEOMETRY, page)
            copy = bytes(client.arena[ref.offset : ref.offset + len(expected)])
            checksum = client.checksums_to_verify([ref]).get(ref.slot)
            is_right = is_right and (checksum is None or checksum == xxhash.xxh3_64_intdigest(copy))
            copies.append((page, copy, expected))
    is_right = is_right and client.intact(match.epoch, refs)
    client.unpin(match.pin)
    if is_right:
        assert all(copy == expected for _, copy, expected in copies), "wrong bytes were served"
    return match.usable_tokens if is_right else 0


class FaultyPool:
    """A daemon process over a folder, killed and started at will. As a context manager: nothing stays."""

    def __init__(self, folder: Path) -> None:
        self.options = pool_options(folder, MEMORY_BYTES, keep_arena=True)
        self.disk = folder / "disk"
        self._daemon: BaseProcess | None = None
        self._engines: list[BaseProcess] = []

    def __enter__(self) -> "FaultyPool":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self._engines, *([] if self._daemon is None else [self._daemon])]:
            process.kill()
            process.join()

    def start(self) -> None:
        """Start the daemon, and wait until it listens."""
        self.options.socket.unlink(missing_ok=True)
        self._daemon = _CONTEXT.Process(target=_serve, args=(self.options, self.disk))
        self._daemon.start()
        wait_until(self.options.socket.exists)

    def kill(self) -> None:
        """The daemon, with -9."""
        assert self._daemon is not None and self._daemon.exitcode is None
        self._daemon.kill()
        self._daemon.join()

    def stop(self) -> None:
        """The daemon, in good order."""
        assert self._daemon is not None and self._daemon.pid is not None
        os.kill(self._daemon.pid, signal.SIGTERM)
        self._daemon.join()
        assert self._daemon.exitcode == 0

    def start_engine(self, first_prompt: int) -> BaseProcess:
        """Another engine, which stores prompts without end."""
        engine = _CONTEXT.Process(target=_store_prompts, args=(self.options, first_prompt))
        engine.start()
        self._engines.append(engine)
        return engine

    def fill_disk(self, at_bytes: int | None) -> None:
        """Files can't be written from there on; None: they can be again."""
        assert self._daemon is not None and self._daemon.pid is not None
        limit = resource.RLIM_INFINITY if at_bytes is None else at_bytes
        resource.prlimit(self._daemon.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def files(self, suffix: str) -> Path:
        """The tier's file of that kind."""
        (found,) = self.disk.glob(f"*{suffix}")
        return found

    def flip_a_byte(self, suffix: str, chosen: random.Random) -> None:
        """Anywhere in the journal, or in one of the pages of the first prompts that the file has."""
        path = self.files(suffix)
        with path.open("r+b") as file:
            content = file.read()
            place = chosen.randrange(len(content))
            if suffix == ".pages":
                pages = [page for number in PROMPTS for page, _ in pages_of(GEOMETRY, prompt(number))]
                parts = [part for page in pages if (part := part_of(GEOMETRY, page)) in content]
                part = chosen.choice(parts or [content])
                place = content.find(part) + chosen.randrange(len(part))
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes((byte ^ 1 << chosen.randrange(8),)))
            file.flush()
            os.fsync(file.fileno())

    def check_caps(self) -> None:
        """Memory and disk stay within what they may take."""
        if self.options.arena.exists():
            assert self.options.arena.stat().st_size <= MEMORY_BYTES
        assert sum(file.stat().st_size for file in self.disk.iterdir()) <= SSD_BYTES


@contextlib.contextmanager
def surviving_client(pool: FaultyPool) -> Iterator[PoolClient]:
    """A client of this process, which no fault may disturb."""
    client = PoolClient(pool.options.socket, "worker", GEOMETRY)
    try:
        reconnect(client)
        yield client
    finally:
        client.close()


def reconnect(client: PoolClient) -> None:
    """Wait until the daemon serves it and has its memory."""
    wait_until(client.connect)

    def has_memory() -> bool:
        figures = client.stats()
        return bool(figures) and figures["provided_bytes"] == figures["memory_bytes"]

    wait_until(has_memory)


def _serve(options: DaemonOptions, disk: Path) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        serving = asyncio.current_task()
        assert serving is not None
        loop.add_signal_handler(signal.SIGTERM, serving.cancel)

        def make_ssd(geometry: PoolGeometry, arena: memoryview) -> FileTier:
            in_loop = partial(_in_loop, loop)
            return FileTier(geometry, arena, SsdOptions(disk, SSD_BYTES, retry_s=0.05), LruEviction, in_loop)

        with contextlib.suppress(asyncio.CancelledError):
            await PoolDaemon(options, make_ssd=make_ssd).serve()

    # Its log is of no interest, and a full disk is what some tests want.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.close(2)
    os.open(os.devnull, os.O_WRONLY)
    uvloop.run(serve())


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _store_prompts(options: DaemonOptions, first_prompt: int) -> None:
    # As `prfaas up` starts engines. What a killed engine leaves is free once nobody of its process group lives.
    os.setsid()
    client = PoolClient(options.socket, "worker", GEOMETRY)
    wait_until(client.connect)
    number = first_prompt
    while True:
        store(client, number)
        load(client, number)
        number += 1
