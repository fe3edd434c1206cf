"""The connector's workers against tensors of a device, in the layouts that vLLM gives them.

    python bench/gpu/workers.py [--device cpu] [--json FILE] [--tokens N]

A prompt's KV is computed on the device behind matrix products, sent through producer, loopback and consumer, and
loaded into another engine's blocks. What is there then must be what was computed: byte for byte where both keep it
alike, token by token where blocks or orders are unlike, rounded once where one keeps 8 bits. Without the right order
between streams it is not: the products are still running when the hooks are called.

`--device cpu` runs the same path in host memory, less streams, events and pinned memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moved_prompt import Way
from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.vllm.arena_pages import ArenaPages
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout, Packing, opaque_layout, page_layout
from prfaas.serving.engines.vllm.metadata import BlockRun
from prfaas.serving.engines.vllm.pages import raw_pages

LAYERS = tuple(f"layer.{number}" for number in range(8))
HEADS, WIDTH = 8, 256
LATENT = 576
STATE_BYTES, STATE_STRIDE_BYTES = 98_304, 98_816
# The side of the matrices that KV waits for; where there is no stream nothing waits.
MATRIX, PRODUCTS = {"cuda": 4096, "cpu": 16}, 20
DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
LARGEST_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Keeping:
    """How an engine keeps KV: the order of a block's dimensions, tokens of a block, and what an element is."""

    order: str
    block_tokens: int = 16
    element: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.order} {self.block_tokens}" + (" fp8" if self.element.startswith("fp8") else "")


PAIRS = (
    (Keeping("HND"), Keeping("HND")),
    (Keeping("NHD"), Keeping("NHD")),
    (Keeping("BLHNC"), Keeping("BLHNC")),
    (Keeping("MLA", 64), Keeping("MLA", 64)),
    (Keeping("state", 256), Keeping("state", 256)),
    (Keeping("HND"), Keeping("HND", 128)),
    (Keeping("NHD", 128), Keeping("NHD")),
    (Keeping("HND", 128), Keeping("NHD", 16)),
    (Keeping("BLHNC"), Keeping("HND", 64)),
    (Keeping("HND"), Keeping("HND", 16, "fp8_e4m3")),
    (Keeping("NHD", 16, "fp8_e4m3"), Keeping("NHD", 64)),
)


class Engine:
    """Memory of an engine on a device, with blocks for one prompt."""

    def __init__(self, keeping: Keeping, num_tokens: int, device: torch.device) -> None:
        self.keeping = keeping
        # Pages of states and latents are moved as they are, whatever a token of them is.
        self.group = EngineGroup(0, GroupKind.FULL, keeping.block_tokens, 0, LAYERS)
        self.blocks = -(-num_tokens // keeping.block_tokens) + 1
        self.tensors = self._tensors(device)
        pages, layouts = {}, {}
        for name, tensor in self.tensors.items():
            content_bytes = STATE_BYTES if keeping.order == "state" else None
            raw = raw_pages(tensor, self.blocks, content_bytes)
            pages[name] = [DevicePages(raw)]
            layouts[name] = [
                page_layout(
                    self.group, tensor, HEADS, Packing.PLAIN, pages[name][0].page_bytes, keeping.element
                )
                if tensor.dim() == 4
                else opaque_layout(self.group, pages[name][0].page_bytes)
            ]
        self.layout = KvLayout([self.group], pages, page_layouts=layouts)
        random = np.random.default_rng(len(str(keeping)))
        self.table = (random.permutation(self.blocks - 1) + 1).tolist()
        side = MATRIX[device.type]
        self._matrix = torch.randn(side, side, device=device) / side**0.5

    def _tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        blocks, tokens = self.blocks, self.keeping.block_tokens
        dtype = DTYPES[self.keeping.element]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        match self.keeping.order:
            case "HND":
                return {name: zeros(blocks, HEADS, tokens, WIDTH) for name in LAYERS}
            case "NHD":
                return {name: zeros(blocks, tokens, HEADS, WIDTH).permute(0, 2, 1, 3) for name in LAYERS}
            case "BLHNC":
                whole = zeros(blocks, len(LAYERS), HEADS, tokens, WIDTH)
                return {name: whole[:, layer] for layer, name in enumerate(LAYERS)}
            case "MLA":
                return {name: zeros(blocks, tokens, LATENT) for name in LAYERS}
            case "state":
                size, stride = STATE_BYTES // dtype.itemsize, STATE_STRIDE_BYTES // dtype.itemsize
                return {name: zeros(blocks, stride)[:, :size] for name in LAYERS}
            case order:
                raise ValueError(f"no such order: {order}")

    def run(self, first: int, end: int) -> tuple[BlockRun, ...]:
        return (BlockRun(0, first, tuple(self.table[first:end])),)

    def compute(self, seed: int) -> None:
        """Queue a prefill: some matrix products, behind them the KV of all blocks; returns before it is there."""
        generator = torch.Generator(self._matrix.device).manual_seed(seed)
        for tensor in self.tensors.values():
            product = self._matrix
            for _ in range(PRODUCTS):
                product = product @ self._matrix
            noise = torch.empty(tensor.shape, device=tensor.device).normal_(0, 50, generator=generator)
            # Of the products nothing is left but that this waits for them.
            tensor.copy_((noise + product[0, 0] * 0).to(tensor.dtype))

    def prompt(self, name: str, num_tokens: int) -> torch.Tensor:
        """What a layer has of the prompt: (tokens, heads, width), of opaque pages (blocks, …)."""
        count = -(-num_tokens // self.keeping.block_tokens)
        kept = self.tensors[name][torch.tensor(self.table[:count], device=self._matrix.device)]
        if kept.dim() != 4:
            return kept
        return kept.permute(0, 2, 1, 3).reshape(-1, HEADS, WIDTH)[:num_tokens]


@dataclass(frozen=True, slots=True)
class Found:
    """One pair of engines."""

    kind: str
    is_exact: bool
    kv_bytes: int
    gb_per_s: float
    """Of the whole way: hooks, gathers, digests, loopback, scatters."""
    plain_gb_per_s: float
    """Of one copy of as many bytes to pinned memory and one back."""


def pinned(nbytes: int) -> memoryview:
    """Host memory that a GPU copies to and from by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data


def expected(values: torch.Tensor, kept: torch.dtype, travels_narrow: bool) -> torch.Tensor:
    """What arrives of them where the other side keeps `kept`."""
    if not travels_narrow:
        return values
    narrow = values.float().clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return narrow.to(kept)


def checked(ours: Keeping, theirs: Keeping, num_tokens: int, device: torch.device) -> Found:
    """Move a prompt twice (the first time is not timed), and look at all that arrived."""
    east, home = Engine(ours, num_tokens, device), Engine(theirs, num_tokens, device)
    way = Way(east, home, num_tokens, pinned if device.type == "cuda" else None)
    try:
        is_exact = True
        for seed in (1, 2):
            east.compute(seed)
            began_s = time.perf_counter()
            way.transfer()
            took_s = time.perf_counter() - began_s
            for name in LAYERS:
                sent, there = east.prompt(name, num_tokens), home.prompt(name, num_tokens)
                wanted = expected(sent, there.dtype, ours.element != theirs.element)
                is_exact &= torch.equal(wanted.view(torch.uint8), there.view(torch.uint8))
        return Found(
            f"{ours} to {theirs}",
            is_exact,
            way.kv_bytes,
            way.kv_bytes / took_s / 1e9,
            plain(way.kv_bytes, device),
        )
    finally:
        way.close()


def plain(nbytes: int, device: torch.device) -> float:
    """GB/s of a copy out and a copy in, one after the other."""
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for _ in range(2):
        settle(device)
        began_s = time.perf_counter()
        host.copy_(there, non_blocking=True)
        there.copy_(host, non_blocking=True)
        settle(device)
        took_s = time.perf_counter() - began_s
    return nbytes / took_s / 1e9


def settle(device: torch.device) -> None:
    """Wait for all that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pool_pages(num_tokens: int, device: torch.device) -> Found:
    """Pages go into a pool's shared memory, and from there into other blocks."""
    keeping = Keeping("HND")
    east, home = Engine(keeping, num_tokens, device), Engine(keeping, num_tokens, device)
    east.compute(1)
    count = -(-num_tokens // keeping.block_tokens)
    is_exact, moved_bytes = True, 0
    began_s = time.perf_counter()
    for region, other in zip(east.layout.regions, home.layout.regions, strict=True):
        page_bytes = region.pages.page_bytes
        arena = np.zeros(count * page_bytes, dtype=np.uint8)
        offsets = [number * page_bytes for number in range(count)]
        region.pages.mark_written()
        region.pages.store_to(ArenaPages(arena, east.table[:count], offsets), 0)
        other.pages.load_from(ArenaPages(arena, home.table[:count], offsets), 0)
        other.pages.flush()
        moved_bytes += arena.nbytes
    took_s = time.perf_counter() - began_s
    for name in LAYERS:
        is_exact &= torch.equal(east.prompt(name, num_tokens), home.prompt(name, num_tokens))
    return Found(
        "pool and back", is_exact, moved_bytes, moved_bytes / took_s / 1e9, plain(moved_bytes, device)
    )


def check(device: torch.device, num_tokens: int) -> list[Found]:
    """All pairs, and the pool."""
    found = [checked(ours, theirs, num_tokens, device) for ours, theirs in PAIRS]
    return [*found, pool_pages(num_tokens, device)]


def table(found: Sequence[Found]) -> str:
    """For people."""
    lines = [f"{'pages':<26}{'exact':>7}{'MB':>9}{'GB/s':>8}{'plain copies':>14}"]
    lines += [
        f"{each.kind:<26}{'yes' if each.is_exact else 'NO':>7}{each.kv_bytes / 1e6:>9.1f}"
        f"{each.gb_per_s:>8.2f}{each.plain_gb_per_s:>14.2f}"
        for each in found
    ]
    return "\n".join(lines)


def main() -> int:
    """Print a table; 1 if anything arrived wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where the KV lies")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the prompt")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/gpu/workers.py finds no CUDA device here; --device cpu runs what needs none")
    found = check(torch.device(options.device), options.tokens)
    print(table(found))
    if options.json is not None:
        document: dict[str, Any] = {"device": options.device, "workers": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each.is_exact for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
