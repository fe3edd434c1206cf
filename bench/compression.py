"""What lossless compression gives on the KVCache of trained models and of tiny ones, and what it costs.

    python bench/compression.py [--json FILE] [--tokens N] [--models NAME ...] [--cpu-only]

A real engine prefills one prompt, the documentation of this repository. Every page that it wrote is then compressed in
chunks, layer by layer, as a sender would. `below` is the rate of a connection under which one core spares more link
time than it and the receiver's core spend. The tiny models have random weights. The first rows are normal random
numbers, for comparison. `--cpu-only` stops after these.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from prfaas.core.deployment.model import default_state_dir, made_model, made_model_names
from prfaas.serving.engines.fetching import LoggedFetch
from prfaas.serving.engines.preparation import make_model
from prfaas.serving.transport.protocol.compression import (
    PREFIX_BYTES,
    compress,
    decompress,
    decompressed_bytes,
    element_bytes,
)

CHUNK_BYTES = 1 << 20
ROUNDS = 3
TEXTS = ("docs/explanation/request.md", "docs/explanation/simulator.md", "docs/explanation/scheduling.md")
_ROOT = Path(__file__).parents[1]
# As ChunkCompressor: a longer result is not worth its time, and the chunk leaves as it is.
WORTH_SHARE = 0.95


def random_numbers(kind: str, nbytes: int = 8 << 20) -> bytes:
    """Normal numbers with a spread of scales, as the bytes of a type."""
    rng = np.random.default_rng(1)
    count = nbytes // {"bf16": 2, "fp32": 4, "fp8 (e5m2)": 1}[kind]
    numbers = (rng.standard_normal(count) * rng.lognormal(0, 1, count // 64).repeat(64)).astype(np.float32)
    if kind == "fp32":
        return numbers.tobytes()
    if kind == "bf16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return (numbers.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8).tobytes()


def written_pages(worker: Any) -> dict[str, bytes]:
    """Runs inside the engine: what it has written, by the kind of its layers."""
    from prfaas.serving.engines.vllm.layout import KvLayout

    runner = worker.model_runner
    context = runner.vllm_config.compilation_config.static_forward_context
    config = runner.kv_cache_config
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    layout = KvLayout.of_engine(config, {name: context[name].kv_cache for name in names})
    found: dict[str, list[bytes]] = defaultdict(list)
    for region in layout.regions:
        blocks = np.arange(1, config.num_blocks, dtype=np.int64)
        data = bytearray(len(blocks) * region.page_bytes)
        region.pages.read(blocks, 0, memoryview(data))
        rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, region.page_bytes)
        found[region.group.kind.value].append(rows[rows.any(axis=1)].tobytes())
    return {kind: b"".join(parts) for kind, parts in found.items()}


def prefilled(name: str, num_tokens: int) -> dict[str, bytes]:
    """Layer kind → the bytes that a model's engine has written for one prompt."""
    from vllm import LLM, SamplingParams

    source = made_model(name)
    assert source is not None
    checkpoint = source.directory(default_state_dir(), "compression")
    make_model(source, checkpoint, LoggedFetch())
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode("\n".join((_ROOT / text).read_text() for text in TEXTS)).ids[:num_tokens]
    llm = LLM(
        str(checkpoint),
        enforce_eager=True,
        max_model_len=num_tokens + 16,
        num_gpu_blocks_override=256,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
    )
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    (pages,) = llm.collective_rpc(written_pages)
    return dict(pages)


def chunks(data: bytes) -> Iterator[memoryview]:
    """As a sender cuts a region."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield memoryview(data)[start : start + CHUNK_BYTES]


def compressed(data: bytes) -> dict[str, float]:
    """Share of the length that is left, and CPU seconds per GB of either side; every byte is compared."""
    payloads: list[bytearray | None] = []
    sizes: set[int] = set()
    encode_s, decode_s = [], []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        payloads = []
        for chunk in chunks(data):
            size, share = element_bytes(chunk)
            payload = compress(chunk, size) if share <= WORTH_SHARE else None
            if payload is not None and len(payload) > WORTH_SHARE * len(chunk):
                payload = None
            payloads.append(payload)
            if payload is not None:
                sizes.add(size)
        encode_s.append(time.thread_time() - began_s)
        target = memoryview(bytearray(CHUNK_BYTES))
        spent_s = 0.0
        for chunk, payload in zip(chunks(data), payloads, strict=True):
            if payload is None:
                continue
            began_s = time.thread_time()
            out = target[: decompressed_bytes(payload[:PREFIX_BYTES])]
            done = decompress(memoryview(payload), [out])
            spent_s += time.thread_time() - began_s
            if not done or out != chunk:
                raise RuntimeError("a decompressed chunk is not the one that was compressed")
        decode_s.append(spent_s)
    left = sum(len(c) if p is None else len(p) for c, p in zip(chunks(data), payloads, strict=True))
    gigabytes = len(data) / 1e9
    spent = (min(encode_s) + min(decode_s)) / gigabytes
    return {
        "MB": len(data) / 1e6,
        "share left": left / len(data),
        "compress s/GB": min(encode_s) / gigabytes,
        "decompress s/GB": min(decode_s) / gigabytes,
        "below Mbit/s": 8e3 * (1 - left / len(data)) / spent,
        "element bytes": float(max(sizes, default=0)),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the prompt")
    parser.add_argument("--models", nargs="*", default=list(made_model_names()), choices=made_model_names())
    parser.add_argument("--cpu-only", action="store_true", help="only random numbers; starts no engine")
    options = parser.parse_args()
    figures = {f"normal {kind}": compressed(random_numbers(kind)) for kind in ("bf16", "fp32", "fp8 (e5m2)")}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    for name in () if options.cpu_only else options.models:
        for kind, data in prefilled(name, options.tokens).items():
            figures[f"{name}, {kind}"] = compressed(data)
    table = Table("KVCache", *next(iter(figures.values())))
    for what, each in figures.items():
        table.add_row(what, *(f"{value:.2f}" for value in each.values()))
    Console(width=118).print(table)
    print(f"load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        goals = [
            {
                "name": f"share left, {what}",
                "value": each["share left"],
                "unit": "x",
                "goal": "none",
                "met": True,
            }
            for what, each in figures.items()
        ]
        options.json.write_text(
            json.dumps({"figures": figures, "goals": goals}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
