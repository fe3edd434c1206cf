"""Copies between an engine's blocks and a pool's pages, and look-ups (for `pool.py`)."""

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pool_world import MIB, TENANT, Blocks, await_true, pooled_deployment, running_pool, session
from prfaas.serving.engines.vllm.connector_worker import PoolWorker
from prfaas.serving.engines.vllm.metadata import PoolLoad, PoolPages, PoolStore
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PoolMatch

Row = tuple[str, float, str] | tuple[str, float, str, float | None, bool]
COPIED_BYTES = 64 * MIB
PAGE_BYTES = (64 << 10, 256 << 10, 1 << 20)
SSD_BYTES, SSD_PAGE_BYTES = 256 * MIB, (256 << 10, 1 << 20)
KEYS = 512
LOOKUPS = 1000
READ_BYTES = 1 * MIB


def memory(folder: Path, rounds: int) -> list[Row]:
    """Bandwidths of stores and loads, and their ratios to memcpy."""
    rows: list[Row] = []
    for page_bytes in PAGE_BYTES:
        blocks = Blocks(page_bytes, COPIED_BYTES // page_bytes)
        deployment = pooled_deployment(folder, f"pages{page_bytes}", memory=f"{COPIED_BYTES // MIB * 3} MiB")
        with (
            running_pool(deployment),
            session(deployment, "scheduler", blocks.geometry) as scheduler,
            session(deployment, "worker", blocks.geometry) as client,
        ):
            worker = PoolWorker(blocks.layout, blocks.geometry, 0, client, 30.0, ConnectorStats())
            try:
                took = [_round(blocks, scheduler, worker, number) for number in range(rounds + 1)][1:]
            finally:
                worker.close()
        label = f"pages of {page_bytes >> 10} KiB"
        store_s, ready_s, load_s, store_copy_s, load_copy_s = zip(*took, strict=True)
        rows.append(
            (f"store until others hit, {label}", blocks.nbytes / statistics.median(ready_s) / 1e9, "GB/s")
        )
        for name, seconds, plain_s in (("store", store_s, store_copy_s), ("load", load_s, load_copy_s)):
            ratio = statistics.median(b / a for a, b in zip(seconds, plain_s, strict=True))
            rows.append((f"{name}, {label}", blocks.nbytes / statistics.median(seconds) / 1e9, "GB/s"))
            rows.append(
                (
                    f"memcpy beside it ({name}, {label})",
                    blocks.nbytes / statistics.median(plain_s) / 1e9,
                    "GB/s",
                )
            )
            rows.append((f"{name} / memcpy, {label}", ratio, "ratio", 0.7, True))
    return rows


def _round(
    blocks: Blocks, scheduler: PoolClient, worker: PoolWorker, prompt: int
) -> tuple[float, float, float, float, float]:
    """Seconds until the blocks of a store are free and until others hit, of a load, and of plain copies before each."""
    refs = scheduler.reserve(TENANT, blocks.pages(prompt))
    assert refs is not None and all(refs)
    pages = PoolPages(0, 0, blocks.ids, tuple(ref for ref in refs if ref is not None))
    plain_s = [_memcpy_s(blocks, into_arena=True)]
    began_s = time.perf_counter()
    worker.writer.hold(["store"])
    worker.writer.order([PoolStore("store", scheduler.epoch, (pages,), False)])
    await_true(lambda: bool(worker.writer.finished()))
    store_s = time.perf_counter() - began_s
    await_true(lambda: scheduler.page_states(pages.pages[-1:])[0] == PageState.READY)
    ready_s = time.perf_counter() - began_s
    packed = b"".join(blocks.chain(prompt).keys)
    limit = blocks.count * blocks.geometry.step_tokens
    match = scheduler.match(packed, 0, limit, whole=True, tenant=TENANT, pin=True)
    assert match is not None and match.usable_tokens == limit
    plain_s.append(_memcpy_s(blocks, into_arena=False))
    load_s = _load_s(blocks, worker, match)
    scheduler.unpin(match.pin)
    return store_s, ready_s, load_s, plain_s[0], plain_s[1]


def _load_s(blocks: Blocks, worker: PoolWorker, match: PoolMatch) -> float:
    parts = tuple(PoolPages(each.group, each.first_block, blocks.ids, each.refs) for each in match.pages)
    began_s = time.perf_counter()
    worker.reader.order([PoolLoad("load", match.pin, match.epoch, parts)])
    ended: set[str] = set()
    failed: set[str] = set()

    def is_over() -> bool:
        nonlocal ended, failed
        ended, failed = worker.reader.results()
        return bool(ended)

    await_true(is_over)
    if failed:
        raise RuntimeError("a load failed")
    return time.perf_counter() - began_s


_SCRATCH: dict[int, np.ndarray] = {}


def _memcpy_s(blocks: Blocks, *, into_arena: bool) -> float:
    """One thread copies all layers' blocks to one buffer, or from there; whole arrays at once."""
    whole = _SCRATCH.setdefault(blocks.nbytes, np.ones(blocks.nbytes, np.uint8))
    began_s, at = time.perf_counter(), 0
    for each in blocks.memory.values():
        flat = each[1:].reshape(-1)
        piece = whole[at : at + flat.nbytes]
        np.copyto(piece, flat) if into_arena else np.copyto(flat, piece)
        at += flat.nbytes
    return time.perf_counter() - began_s


def ssd(folder: Path, rounds: int) -> list[Row]:
    """What comes back from disk after the memory is gone, and plain reads of the same file."""
    return [row for page_bytes in SSD_PAGE_BYTES for row in _ssd(folder, rounds, page_bytes)]


def _ssd(folder: Path, rounds: int, page_bytes: int) -> list[Row]:
    blocks = Blocks(page_bytes, SSD_BYTES // page_bytes)
    deployment = pooled_deployment(
        folder,
        f"disk{page_bytes}",
        memory=f"{SSD_BYTES // MIB + 64} MiB",
        ssd=f"{2 * SSD_BYTES // MIB + 64} MiB",
    )
    with (
        running_pool(deployment),
        session(deployment, "scheduler", blocks.geometry) as scheduler,
        session(deployment, "worker", blocks.geometry) as client,
    ):
        worker = PoolWorker(blocks.layout, blocks.geometry, 0, client, 30.0, ConnectorStats())
        refs = scheduler.reserve(TENANT, blocks.pages(0))
        assert refs is not None and all(refs)
        began_s = time.perf_counter()
        pages = PoolPages(0, 0, blocks.ids, tuple(ref for ref in refs if ref is not None))
        worker.writer.order([PoolStore("store", scheduler.epoch, (pages,), False)])
        await_true(lambda: _ssd_pages(scheduler) == blocks.count)
        written_s = time.perf_counter() - began_s
        worker.close()
    names = ("one thread", "four threads")
    ratios: dict[str, list[float]] = {
        f"{name}{part}": [] for name in names for part in ("", ", reading alone")
    }
    read_s: list[float] = []
    reading: list[float] = []
    (pages_file,) = [
        each for each in deployment.pools[0].path.rglob("*") if each.is_file() and _is_large(each)
    ]
    for _ in range(rounds):
        plain = {"one thread": _plain_read_s(pages_file, 1), "four threads": _plain_read_s(pages_file, 4)}
        with running_pool(deployment), session(deployment, "scheduler", blocks.geometry) as scheduler:
            read_s.append(_promotion_s(blocks, scheduler))
            reading.append(float((scheduler.stats() or {})["ssd_promoting_s"]))
        for name, seconds in plain.items():
            ratios[name].append(seconds / read_s[-1])
            ratios[f"{name}, reading alone"].append(seconds / reading[-1])
    label = f"pages of {page_bytes >> 10} KiB"
    rows: list[Row] = [
        (f"store until on disk, {label}", blocks.nbytes / written_s / 1e9, "GB/s"),
        (f"from disk into pages, verified, {label}", blocks.nbytes / statistics.median(read_s) / 1e9, "GB/s"),
    ]
    for name, found in ratios.items():
        rows.append(
            (
                f"from disk / plain O_DIRECT read, {label}, {name}",
                statistics.median(found),
                "ratio",
                0.9,
                True,
            )
        )
    return rows


def _promotion_s(blocks: Blocks, scheduler: PoolClient) -> float:
    """From the question to the last page in memory."""
    packed = b"".join(blocks.chain(0).keys)
    limit = blocks.count * blocks.geometry.step_tokens
    began_s = time.perf_counter()
    match = scheduler.match(packed, 0, limit, whole=True, tenant=TENANT, pin=True)
    if match is None or match.usable_tokens < limit or match.memory_tokens:
        raise RuntimeError(f"the pages are not on disk alone: {match and match[1:4]} of {limit}")
    refs = [ref for part in match.pages for ref in part.refs]
    await_true(lambda: bool((scheduler.page_states(refs) == PageState.READY).all()))
    return time.perf_counter() - began_s


def _ssd_pages(client: PoolClient) -> int:
    figures = client.stats() or {}
    return sum(dict(figures.get("ssd_pages", {})).values())


def _is_large(path: Path) -> bool:
    return path.stat().st_size >= SSD_BYTES


def _plain_read_s(path: Path, threads: int) -> float:
    """The first `SSD_BYTES` of the pool's own file, past the page cache, in turns of one MiB."""
    offsets = list(range(0, SSD_BYTES, READ_BYTES))

    def read(mine: list[int]) -> None:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, READ_BYTES) as buffer:
            for offset in mine:
                os.preadv(file, [buffer], offset)
        os.close(file)

    readers = [threading.Thread(target=read, args=(offsets[number::threads],)) for number in range(threads)]
    began_s = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.perf_counter() - began_s


def lookup(folder: Path, rounds: int) -> list[Row]:
    """Medians and 99th percentiles of look-ups at the client, the answer decoded."""
    blocks = Blocks(4096, KEYS)
    deployment = pooled_deployment(folder, "lookup", memory="32 MiB")
    with (
        running_pool(deployment),
        session(deployment, "scheduler", blocks.geometry) as scheduler,
        session(deployment, "worker", blocks.geometry) as client,
    ):
        refs = scheduler.reserve(TENANT, blocks.pages(0))
        assert refs is not None and all(refs)
        client.commit([(ref, 0) for ref in refs if ref is not None])
        packed = b"".join(blocks.chain(0).keys)
        limit = KEYS * blocks.geometry.step_tokens
        await_true(lambda: _found(scheduler, packed, limit) == limit)

        def pinned() -> None:
            match = scheduler.match(packed, 0, limit, whole=True, tenant=TENANT, pin=True)
            assert match is not None
            scheduler.unpin(match.pin)

        one, missing = packed[:16], b"".join(blocks.chain(1).keys)
        cases: dict[str, Callable[[], object]] = {
            "512 keys, all held": lambda: _found(scheduler, packed, limit),
            "512 keys, none held": lambda: _found(scheduler, missing, limit),
            "512 keys, pinned and unpinned": pinned,
            "1 key": lambda: _found(scheduler, one, blocks.geometry.step_tokens),
        }
        rows: list[Row] = []
        for name, ask in cases.items():
            took_us = [_us(ask) for _ in range(LOOKUPS * max(rounds // 7, 1))]
            goal = 200.0 if name == "512 keys, all held" else None
            rows.append((f"look-up of {name}", statistics.median(took_us), "µs", goal, False))
            rows.append(
                (f"look-up of {name}, 99th percentile", statistics.quantiles(took_us, n=100)[-1], "µs")
            )
    return rows


def _found(client: PoolClient, packed: bytes, limit: int) -> int:
    match = client.match(packed, 0, limit, whole=True, tenant=TENANT, pin=False)
    assert match is not None
    return match.usable_tokens


def _us(ask: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    ask()
    return (time.perf_counter() - began_s) * 1e6
