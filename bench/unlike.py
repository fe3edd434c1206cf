"""What it costs that two engines keep the same KV in other blocks: processor time of a whole transfer over loopback.

    python bench/unlike.py [--json] [--rounds N] [--tokens N]

Pages are computed digests of, sent, received, loaded and checked in one process. Each round does the same transfer
between unlike engines, between two like the one that sends, and between two like the one that receives, in turn.

Smaller blocks cost more between equal engines too. So the mapping is what unlike engines take over the mean of both
equal pairs: what the work of the one end and of the other would take without it. The ratio to two engines like the one
that sends is there beside it. Ratios are medians over rounds of paired measurements.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from moved_prompt import Way
from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout, Packing, page_layout
from prfaas.serving.engines.vllm.metadata import BlockRun
from prfaas.serving.engines.vllm.pages import HostPages, raw_pages

LAYERS = tuple(f"layer.{number}" for number in range(8))
# Keys and values of a token: as of a model with 8 heads of 128 elements in bf16.
HEADS, HEAD_BYTES = 8, 512
MOST_RATIO = 1.10


@dataclass(frozen=True, slots=True)
class Keeping:
    """How an engine keeps KV."""

    block_tokens: int
    order: str = "HND"

    @property
    def packing(self) -> Packing:
        """ "CPU" is how vLLM's CPU backend keeps it."""
        return Packing.CPU_VECTORS if self.order == "CPU" else Packing.PLAIN

    def __str__(self) -> str:
        return f"{self.block_tokens} {self.order}"


PAIRS = (
    (Keeping(16), Keeping(32)),
    (Keeping(16), Keeping(128)),
    (Keeping(32), Keeping(128)),
    (Keeping(32), Keeping(16)),
    (Keeping(128), Keeping(16)),
    (Keeping(128), Keeping(32)),
    (Keeping(16, "NHD"), Keeping(128, "NHD")),
    (Keeping(128, "NHD"), Keeping(16, "NHD")),
    (Keeping(128), Keeping(128, "NHD")),
    (Keeping(32, "CPU"), Keeping(128, "CPU")),
    (Keeping(128, "CPU"), Keeping(32, "CPU")),
)


class Engine:
    """Memory of an engine that holds one prompt."""

    def __init__(self, keeping: Keeping, num_tokens: int, seed: int) -> None:
        self.group = EngineGroup(0, GroupKind.FULL, keeping.block_tokens, 0, LAYERS)
        blocks = -(-num_tokens // keeping.block_tokens) + 1
        shape = (keeping.block_tokens, HEADS) if keeping.order == "NHD" else (HEADS, keeping.block_tokens)
        generator = torch.Generator().manual_seed(seed)
        pages, layouts = {}, {}
        for name in LAYERS:
            memory = torch.randint(
                -(1 << 15),
                1 << 15,
                (blocks, *shape, HEAD_BYTES // 2),
                dtype=torch.int16,
                generator=generator,
            )
            tensor = memory.permute(0, 2, 1, 3) if keeping.order == "NHD" else memory
            raw = raw_pages(tensor, blocks)
            pages[name] = [HostPages(raw)]
            layouts[name] = [page_layout(self.group, tensor, HEADS, keeping.packing, raw.shape[1])]
        self.layout = KvLayout([self.group], pages, page_layouts=layouts)
        # As an engine's table after a while.
        self.table = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()

    def run(self, first: int, end: int) -> tuple[BlockRun, ...]:
        return (BlockRun(0, first, tuple(self.table[first:end])),)


@contextmanager
def ways(ours: Keeping, theirs: Keeping, num_tokens: int) -> Iterator[list[Way]]:
    """Between two engines that keep KV as `ours`, two as `theirs`, and from the former kind to the latter."""
    with ExitStack() as opened:
        made = []
        for one, other in ((ours, ours), (theirs, theirs), (ours, theirs)):
            made.append(Way(Engine(one, num_tokens, 1), Engine(other, num_tokens, 2), num_tokens))
            opened.callback(made[-1].close)
        yield made


def measure(ours: Keeping, theirs: Keeping, num_tokens: int, rounds: int) -> dict[str, object]:
    """Medians of one pair of engines."""
    took: list[list[float]] = []
    with ways(ours, theirs, num_tokens) as made:
        for number in range(rounds + 1):
            # Each of them is first, second and last as often.
            order = [(number + turn) % 3 for turn in range(3)]
            seconds = {way: made[way].transfer() for way in order}
            took.append([seconds[way] for way in range(3)])
        gigabytes = made[0].kv_bytes / 1e9
    # The first round touches memory for the first time.
    took = took[1:]
    like_sender, like_receiver, unlike = (
        statistics.median(each) / gigabytes for each in zip(*took, strict=True)
    )
    ratio = statistics.median(2 * unlike_s / (one_s + other_s) for one_s, other_s, unlike_s in took)
    return {
        "from": str(ours),
        "to": str(theirs),
        "equal_s_per_gb": [round(like_sender, 3), round(like_receiver, 3)],
        "unlike_s_per_gb": round(unlike, 3),
        "to_sender_ratio": round(statistics.median(unlike_s / one_s for one_s, _, unlike_s in took), 3),
        "ratio": round(ratio, 3),
        "goal_met": ratio <= MOST_RATIO,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--rounds", type=int, default=7, help="paired transfers of each pair of engines")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt")
    arguments = parser.parse_args(argv)
    rows = [measure(ours, theirs, arguments.tokens, arguments.rounds) for ours, theirs in PAIRS]
    if arguments.json:
        print(json.dumps({"most_ratio": MOST_RATIO, "rows": rows}, indent=2))
        return 0
    print("blocks: tokens and order | as sender, as receiver, unlike: s/GB | over the sender's | over both")
    for row in rows:
        alike = row["equal_s_per_gb"]
        assert isinstance(alike, list)
        print(
            f"{row['from']:>8} to {row['to']:<8} | {alike[0]:.2f} {alike[1]:.2f} {row['unlike_s_per_gb']:.2f} | "
            f"{row['to_sender_ratio']:5} | {row['ratio']:5}"
            f"{'' if row['goal_met'] else f' above the goal of {MOST_RATIO}'}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
