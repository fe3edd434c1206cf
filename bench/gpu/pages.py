"""How fast pages of the KVCache leave an accelerator and come back, and what that costs the compute beside it.

    python bench/gpu/pages.py [--json FILE] [--chunk-mib N]

Runs of scattered pages are read in chunks, as the transport's writer threads read them, by one and by four threads:
page by page with a wait for each (`one by one`), and as `DevicePages` does it (one gather, one copy, one event). The
limit is one plain copy of as many bytes to pinned memory. `beside compute` has matrix products on the compute stream
at the same time. `loads` is the way back.

Needs a CUDA device. It has not been run on one yet: no machine of this project's tests has any.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prfaas.serving.engines.vllm.device_pages import DevicePages

PAGE_BYTES = (8192, 32_768, 131_072, 1_048_576)
POOL_BYTES = 512 << 20
ROUNDS = 5
MATRIX = 4096


def scattered(pages: int, seed: int = 1) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """All blocks of a pool, in random order: no two neighbours in memory follow each other but by chance."""
    return np.random.default_rng(seed).permutation(pages)


def gb_per_s(nbytes: int, work: Callable[[], None]) -> float:
    """Median of some rounds, after one that is not counted."""
    took_s = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return nbytes / statistics.median(took_s[1:]) / 1e9


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` in so many threads."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Pool:
    """Pages of one size on the device."""

    def __init__(self, page_bytes: int, chunk_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.raw = torch.randint(
            0, 256, (POOL_BYTES // page_bytes, page_bytes), dtype=torch.uint8, device="cuda"
        )
        self.pages = DevicePages(self.raw)
        self.blocks = scattered(len(self.raw))
        self.chunk_bytes = max(chunk_bytes, page_bytes)
        self._one_by_one = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._bounce = torch.empty(page_bytes, dtype=torch.uint8, pin_memory=True)
        self._staging = torch.empty(POOL_BYTES, dtype=torch.uint8, pin_memory=True)

    def limit(self) -> None:
        """One copy of the whole pool to pinned memory."""
        self._staging.copy_(self.raw.view(-1), non_blocking=True)

    def read_one_by_one(self) -> None:
        """A copy and a wait for every page."""
        for block in self.blocks.tolist():
            with torch.cuda.stream(self._one_by_one):
                self._bounce.copy_(self.raw[block], non_blocking=True)
            self._one_by_one.synchronize()

    def read(self, threads: int) -> None:
        """All chunks, shared by so many threads."""
        self.pages.mark_written()
        starts = range(0, POOL_BYTES, self.chunk_bytes)

        def work(number: int) -> None:
            for start in starts[number::threads]:
                self.pages.views(self.blocks, start, min(self.chunk_bytes, POOL_BYTES - start))

        in_threads(threads, work)

    def load(self) -> None:
        """All pages from pinned staging."""
        self.pages.write_run(self.blocks.tolist(), [self._staging.numpy().data])
        self.pages.flush()


def products_per_s(beside: Callable[[], None] | None) -> float:
    """Matrix products on the compute stream, alone or while `beside` runs again and again in a thread."""
    left = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda")
    over = threading.Event()

    def repeat() -> None:
        while beside is not None and not over.is_set():
            beside()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        for _ in range(20):
            left @ right
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(300):
            left @ right
        torch.cuda.synchronize()
        return 300 / (time.perf_counter() - began_s)
    finally:
        over.set()
        thread.join()


def measure(chunk_bytes: int) -> dict[str, dict[str, float]]:
    """Page size → figures."""
    figures = {}
    for page_bytes in PAGE_BYTES:
        pool = Pool(page_bytes, chunk_bytes)
        before = pool.raw.clone()
        pool.limit()
        torch.cuda.synchronize()
        figures[f"{page_bytes // 1024} KiB"] = {
            "limit GB/s": gb_per_s(POOL_BYTES, pool.limit),
            "one by one GB/s": gb_per_s(POOL_BYTES, pool.read_one_by_one),
            "1 thread GB/s": gb_per_s(POOL_BYTES, partial(pool.read, 1)),
            "4 threads GB/s": gb_per_s(POOL_BYTES, partial(pool.read, 4)),
            "loads GB/s": gb_per_s(POOL_BYTES, pool.load),
            "compute beside": products_per_s(partial(pool.read, 4)) / products_per_s(None),
        }
        if not torch.equal(pool.raw[torch.from_numpy(pool.blocks).cuda()], before):
            raise RuntimeError("pages that were loaded are not the ones that were staged")
    return figures


def goals(figures: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """What is hoped for: reads near the limit, compute hardly slower."""
    wanted = (
        ("4 threads GB/s", "reads, share of the limit", 0.8),
        ("loads GB/s", "loads, share of the limit", 0.7),
    )
    found = [
        {
            "name": f"{name}, {pages}",
            "value": each[key] / each["limit GB/s"],
            "unit": "x",
            "goal": f">= {least}",
        }
        | {"met": each[key] >= least * each["limit GB/s"]}
        for pages, each in figures.items()
        for key, name, least in wanted
    ]
    return found + [
        {
            "name": f"compute beside reads, {pages}",
            "value": each["compute beside"],
            "unit": "x",
            "goal": ">= 0.95",
        }
        | {"met": each["compute beside"] >= 0.95}
        for pages, each in figures.items()
    ]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--chunk-mib", type=int, default=4, help="bytes that a writer thread reads at once, in MiB"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/gpu/pages.py needs a CUDA device, and torch finds none here")
    figures = measure(options.chunk_mib << 20)
    names = next(iter(figures.values())).keys()
    print(f"{torch.cuda.get_device_name()}, chunks of {options.chunk_mib} MiB")
    print("pages".ljust(10) + "".join(name.rjust(18) for name in names))
    for pages, each in figures.items():
        print(pages.ljust(10) + "".join(f"{value:18.2f}" for value in each.values()))
    if options.json is not None:
        document = {"figures": figures, "goals": goals(figures)}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
