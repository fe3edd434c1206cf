"""The global prefix index at a million blocks: speed of lookups and of events, bytes per block, hashing.

    python bench/index.py [--json FILE] [--blocks N]

CPU time of one core; of repeated measurements the median. The peers' figures are from notes/gateway.md, of another
day on the same kind of machine: the plain dict neither translates engine hashes nor knows of holes or states.
Other work on the machine shows even in CPU time (caches, memory): one row inserts into a plain dict for comparison.
Exit code 1 if an aim is missed.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from prfaas.core.prefix.digests import (
    EventDigests,
    HeldEvent,
    RemovedHashes,
    StoredDigests,
    decode_events,
    encode_events,
    word_of,
)
from prfaas.core.prefix.events import EngineHash, StoredBlocks, decode_batch
from prfaas.core.prefix.hashing import BlockHasher, PromptChains
from prfaas.core.prefix.index import GlobalIndex

INSTANCES = 64
SEED = 1
BLOCK_TOKENS = 16
EVENT_BLOCKS = 32
PROMPT_BLOCKS = 256
PROMPT_EVENTS = PROMPT_BLOCKS // EVENT_BLOCKS
LONG_PROMPT_TOKENS = 128 * 1024
VOCABULARY = 150_000


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    aim: float | None = None
    plain_dict: str = ""
    dynamo: str = ""

    @property
    def is_missed(self) -> bool:
        if self.aim is None:
            return False
        return self.value < self.aim if self.unit.endswith("/s") else self.value > self.aim


@dataclass(frozen=True)
class Prompt:
    """What a prompt is and what its engine says of it: `hashes` are the engine's, one per block."""

    instance: str
    token_ids: list[int]
    hashes: list[EngineHash]

    def told(self, *, with_states: bool = False) -> list[list[StoredDigests]]:
        """One batch per prefill step of 32 blocks, as it comes to the gateway."""
        chain = BlockHasher(block_tokens=BLOCK_TOKENS, seed=SEED).hashes(self.token_ids)
        batches = []
        for start in range(0, PROMPT_BLOCKS, EVENT_BLOCKS):
            hashes = [word_of(each) for each in self.hashes[start : start + EVENT_BLOCKS]]
            stored = StoredDigests(
                hashes=hashes,
                digests=list(chain[start : start + EVENT_BLOCKS]),
                parent=word_of(self.hashes[start - 1]) if start else None,
                block_tokens=BLOCK_TOKENS,
                group=1,
                kind="full_attention",
                medium="GPU",
            )
            state = StoredDigests(hashes=hashes[-1:], block_tokens=BLOCK_TOKENS, group=0, kind="mamba")
            batches.append([state, stored] if with_states else [stored])
        return batches

    def events(self) -> list[list[StoredBlocks]]:
        """The same as the engine publishes it."""
        batches = []
        for start in range(0, PROMPT_BLOCKS, EVENT_BLOCKS):
            hashes = self.hashes[start : start + EVENT_BLOCKS]
            ids = self.token_ids[start * BLOCK_TOKENS : (start + EVENT_BLOCKS) * BLOCK_TOKENS]
            parent = self.hashes[start - 1] if start else None
            batch = [
                StoredBlocks(
                    hashes=hashes,
                    block_tokens=BLOCK_TOKENS,
                    parent=parent,
                    token_ids=ids,
                    extra_keys=[None] * EVENT_BLOCKS,
                    group=1,
                    kind="full_attention",
                    medium="GPU",
                )
            ]
            batches.append(batch)
        return batches


def prompts(count: int, seed: int, holders: int = 1) -> Iterator[list[Prompt]]:
    """`count` different prompts, each at `holders` instances, which hash it in their own ways."""
    draw = random.Random(seed)
    for number in range(count):
        ids = draw.choices(range(VOCABULARY), k=PROMPT_BLOCKS * BLOCK_TOKENS)
        yield [
            Prompt(
                f"instance-{(number + each * 7) % INSTANCES}",
                ids,
                [draw.getrandbits(64) for _ in range(PROMPT_BLOCKS)],
            )
            for each in range(holders)
        ]


def cpu_s(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def rss_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fill(blocks: int, what: str) -> GlobalIndex:
    """An index with that many blocks."""
    index = GlobalIndex(seed=1, capacity_blocks=4 * blocks)
    count = blocks // PROMPT_BLOCKS
    for (prompt,) in track(prompts(count, seed=0), what, count, console=Console(stderr=True)):
        apply_all(index, prompt)
    return index


def replace_half(index: GlobalIndex, blocks: int) -> None:
    count = blocks // PROMPT_BLOCKS // 2
    leaving, arriving = prompts(count, seed=0), prompts(count, seed=1)
    for (old,) in track(leaving, "replacing", count, console=Console(stderr=True)):
        index.apply(old.instance, [RemovedHashes([word_of(each) for each in old.hashes[::-1]], group=1)])
        apply_all(index, next(arriving)[0])


def measure_memory(blocks: int) -> tuple[GlobalIndex, list[Row]]:
    """The index after half of its blocks were replaced; bytes per block before and after."""
    # What is loaded on first use is no part of a block.
    fill(4 * PROMPT_BLOCKS * INSTANCES, "warming up")
    tracemalloc.start()
    index = fill(blocks, "filling, traced")
    allocated = tracemalloc.get_traced_memory()[0] / index.stats().blocks
    tracemalloc.stop()
    del index
    before = rss_bytes()
    index = fill(blocks, "filling")
    filled = (rss_bytes() - before) / index.stats().blocks
    replace_half(index, blocks)
    replaced = (rss_bytes() - before) / index.stats().blocks
    return index, [
        Row("allocated bytes per block, filled", allocated, "B", 100, "78", "94"),
        Row("  resident", filled, "B"),
        Row("  resident after half of them were replaced", replaced, "B"),
    ]


def apply_all(index: GlobalIndex, prompt: Prompt, *, with_states: bool = False) -> None:
    for batch in prompt.told(with_states=with_states):
        index.apply(prompt.instance, batch)


def measure_events(index: GlobalIndex, rounds: int = 8, per_round: int = 128) -> list[Row]:
    """Batches with one event of 32 blocks each, into a full index; then their removal."""
    digests: defaultdict[str, EventDigests] = defaultdict(lambda: EventDigests(SEED))
    digesting, decoding, applying = [], [], []
    removing: list[float] = []
    removing_singly: list[float] = []
    for number in range(rounds):
        some = [prompt for (prompt,) in prompts(per_round, seed=100 + number)]
        payloads = [
            (prompt.instance, msgspec.msgpack.encode([0.0, batch, 0]))
            for prompt in some
            for batch in prompt.events()
        ]
        count = len(payloads)
        told: list[tuple[str, bytes]] = []
        batches: list[tuple[str, Sequence[HeldEvent]]] = []

        digesting.append(cpu_s(partial(digest_all, digests, payloads, told)) / count)
        decoding.append(cpu_s(partial(decode_all, told, batches)) / count)
        applying.append(cpu_s(partial(apply_batches, index, batches)) / count)
        singly = number % 2 == 0
        leaving = [(prompt.instance, removals(prompt, singly=singly)) for prompt in some]
        seconds = cpu_s(partial(apply_batches, index, leaving)) / count
        (removing_singly if singly else removing).append(seconds)
    digest_s, decode_s, apply_s = map(statistics.median, (digesting, decoding, applying))
    return [
        Row("events of 32 blocks: apply", 1 / apply_s, "events/s", 100e3, "114k", "41k"),
        Row("  at the engine: decode, digest and encode", 1 / digest_s, "events/s"),
        Row("  at the gateway: decode", 1 / decode_s, "events/s"),
        Row("  all of it", 1 / (digest_s + decode_s + apply_s), "events/s"),
        Row("removals of 32 blocks in one event", 1 / statistics.median(removing), "events/s"),
        Row(
            "removals as vLLM sends them, 1 block each",
            EVENT_BLOCKS / statistics.median(removing_singly),
            "events/s",
            100e3,
        ),
    ]


def measure_plain_dict(blocks: int, rounds: int = 8, per_round: int = 1024) -> Row:
    """What inserting runs of 32 into a dict of that size costs on this machine now, with nothing else done."""
    draw = random.Random(0)
    holders = dict.fromkeys((draw.getrandbits(60) for _ in range(blocks)), 1)
    seconds = []
    for _ in range(rounds):
        runs = [[draw.getrandbits(60) for _ in range(EVENT_BLOCKS)] for _ in range(per_round)]
        seconds.append(cpu_s(partial(insert_all, holders, runs)) / per_round)
    return Row("  only insert into a plain dict, in this run", 1 / statistics.median(seconds), "events/s")


def insert_all(holders: dict[int, int], runs: Sequence[Sequence[int]]) -> None:
    for run in runs:
        if holders.keys().isdisjoint(run):
            holders.update(zip(run, repeat(1)))


def digest_all(
    digests: Mapping[str, EventDigests], payloads: Sequence[tuple[str, bytes]], told: list[tuple[str, bytes]]
) -> None:
    for instance, payload in payloads:
        told.append((instance, encode_events(digests[instance].of(decode_batch(payload).events))))


def decode_all(told: Sequence[tuple[str, bytes]], batches: list[tuple[str, Sequence[HeldEvent]]]) -> None:
    for instance, payload in told:
        batches.append((instance, decode_events(payload)))


def apply_batches(index: GlobalIndex, batches: Sequence[tuple[str, Sequence[HeldEvent]]]) -> None:
    for instance, events in batches:
        index.apply(instance, events)


def removals(prompt: Prompt, *, singly: bool) -> list[HeldEvent]:
    """Tail first, as engines evict."""
    tail_first = [word_of(each) for each in prompt.hashes[::-1]]
    size = 1 if singly else EVENT_BLOCKS
    return [
        RemovedHashes(hashes=tail_first[start : start + size], group=1)
        for start in range(0, PROMPT_BLOCKS, size)
    ]


def match_us(index: GlobalIndex, chains: list[PromptChains], rounds: int = 15) -> float:
    """Microseconds of one lookup, each round through all chains."""

    def look_up() -> None:
        for each in chains:
            index.match(each)

    return statistics.median(cpu_s(look_up) for _ in range(rounds)) / len(chains) * 1e6


def measure_matches(index: GlobalIndex, blocks: int) -> list[Row]:
    some = [prompt for (prompt,) in prompts(blocks // PROMPT_BLOCKS // 2, seed=1)][-500:]
    one = [whole_chain(index, prompt.token_ids) for prompt in some]
    miss = [whole_chain(index, prompt.token_ids) for (prompt,) in prompts(500, seed=2)]
    shared = []
    for everywhere in prompts(16, seed=3, holders=4):
        for prompt in everywhere:
            apply_all(index, prompt)
        shared.append(whole_chain(index, everywhere[0].token_ids))
    # A system prompt of 32 blocks that all instances hold, and what follows it at one of them only.
    head = next(prompts(1, seed=4, holders=INSTANCES))
    forked = []
    for prompt, (tail,) in zip(head, prompts(INSTANCES, seed=5), strict=True):
        ids = prompt.token_ids[: EVENT_BLOCKS * BLOCK_TOKENS] + tail.token_ids[EVENT_BLOCKS * BLOCK_TOKENS :]
        apply_all(index, Prompt(prompt.instance, ids, prompt.hashes))
        forked.append(whole_chain(index, ids))
    return [
        Row("match of 256 blocks: full hit at one of 64", match_us(index, one), "us", 5, "0.74", "16.6"),
        Row("  full hit at four", match_us(index, shared * 20), "us", 5),
        Row("  miss", match_us(index, miss), "us", 5, "0.2", "14.8"),
        Row("  32 blocks at all 64, the rest at one", match_us(index, forked * 5), "us", 5),
    ]


def measure_hybrid_matches(count: int = 512) -> list[Row]:
    index = GlobalIndex(seed=1, needs_states=True)
    one: list[PromptChains] = []
    decoding: list[PromptChains] = []
    for number, (prompt,) in enumerate(prompts(count, seed=6)):
        apply_all(index, prompt, with_states=number % 2 == 0)
        (decoding if number % 2 else one).append(whole_chain(index, prompt.token_ids))
    shared = []
    for everywhere in prompts(16, seed=7, holders=4):
        for prompt in everywhere:
            apply_all(index, prompt, with_states=True)
        shared.append(whole_chain(index, everywhere[0].token_ids))
    return [
        Row("  hybrid, full hit at one", match_us(index, one), "us", 5),
        Row("  hybrid, full hit at four", match_us(index, shared * 16), "us", 5),
        Row("  hybrid, 256 blocks and no state at all", match_us(index, decoding), "us", 5),
    ]


def whole_chain(index: GlobalIndex, token_ids: list[int]) -> PromptChains:
    """A prompt that goes on after these blocks."""
    return index.chains([*token_ids, 0])


def measure_hashing(rounds: int = 25) -> list[Row]:
    ids = random.Random(0).choices(range(VOCABULARY), k=LONG_PROMPT_TOKENS)
    rows = []
    for block_tokens in (16, 64, 256):
        hash_ids = partial(BlockHasher(block_tokens=block_tokens).hashes, ids)
        seconds = statistics.median(cpu_s(hash_ids) for _ in range(rounds))
        rows.append(Row(f"hash 128K token ids, block {block_tokens}", seconds * 1e3, "ms", 2))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index")
    options = parser.parse_args()
    index, memory = measure_memory(options.blocks)
    rows = [
        *measure_matches(index, options.blocks),
        *measure_hybrid_matches(),
        *measure_events(index),
        measure_plain_dict(options.blocks),
        *memory,
        *measure_hashing(),
    ]
    table = Table("what", "measured", "aim", "plain dict", "Dynamo RadixTree")
    for row in rows:
        figure = f"{row.value / 1e3:.1f}k" if row.unit.endswith("/s") else f"{row.value:.2f}"
        aim = (
            "" if row.aim is None else f"{row.aim / 1e3:.0f}k" if row.unit.endswith("/s") else f"{row.aim:g}"
        )
        table.add_row(row.what, f"{figure} {row.unit}", aim, row.plain_dict, row.dynamo)
    Console(width=118).print(table)
    if options.json is not None:
        document = {"blocks": options.blocks, "instances": INSTANCES, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(row.is_missed for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
