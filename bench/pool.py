"""The prefix-cache pool: what its copies, its look-ups and its hits cost, beside doing without it.

    python bench/pool.py [--parts memory ssd lookup step ttft answers] [--rounds 7] [--models …] [--json FILE]

- memory: an engine's worker stores blocks into a pool's pages and loads them again, beside memcpy of as many bytes.
  A store lasts until the blocks are free; until others hit, checksums and the daemon's work are in it too.
- ssd: pages of a pool that lost its memory come back from the disk, beside plain reads of the pool's own file. From the
  question to the last page; `reading alone` leaves out what is before the first read (slots for all pages).
- lookup: 512 keys over the pool's socket.
- step: prefills and decode steps of a real engine that stores, beside one without a pool, in turn.
- ttft: time to first token of a prompt that the pool has, beside computing it, for each tiny model.
- answers: 24 prompts a model: answers of pool hits, of hits in the engine's own blocks, and of plain vLLM.
- mooncake: Mooncake Store's batch get of the same pages (`--mooncake-python`, an interpreter that can import
  `mooncake.store`, with `mooncake_master` beside it).

Each pair is measured in turn, and a ratio is of one round: a busy machine is busy for both. Figures are medians.
vLLM's own offloading connector is no anchor here: it refuses CPUs (`vllm/v1/kv_offload/cpu/spec.py` wants CUDA or XPU).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas.serving.engines.tiny import TINY_MODEL_NAMES

PARTS = ("memory", "ssd", "lookup", "step", "ttft", "answers", "mooncake")


@dataclass(frozen=True)
class Figure:
    """One measured value; `goal` is a bound from below or from above."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each pair")
    parser.add_argument("--models", nargs="+", choices=TINY_MODEL_NAMES, default=list(TINY_MODEL_NAMES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[300, 1000, 3000, 6000], metavar="TOKENS")
    parser.add_argument("--mooncake-python", type=Path, help="an interpreter with mooncake.store")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    console, figures = Console(width=118), list[Figure]()
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            found = _measured(part, options, Path(folder))
        table = Table("what", "measured", "goal", title=part)
        for each in found:
            bound = "" if each.goal is None else f"{'≥' if each.at_least else '≤'} {each.goal:g}"
            table.add_row(each.name, f"{each.value:.3g} {each.unit}", bound + _mark(each))
        console.print(table)
        figures += found
    if options.json is not None:
        document = {
            "figures": {each.name: each.value for each in figures},
            "goals": [{**asdict(each), "met": each.met} for each in figures if each.goal is not None],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _mark(figure: Figure) -> str:
    return {None: "", True: "  ok", False: "  missed"}[figure.met]


def _measured(part: str, options: argparse.Namespace, folder: Path) -> list[Figure]:
    # Late: what needs vLLM, or another package, is only imported for its own part.
    measure: Callable[..., Any]
    if part in ("memory", "ssd", "lookup"):
        import pool_copies

        measure = {"memory": pool_copies.memory, "ssd": pool_copies.ssd, "lookup": pool_copies.lookup}[part]
        rows: Sequence[tuple[Any, ...]] = measure(folder, options.rounds)
    elif part == "mooncake":
        import pool_mooncake

        rows = pool_mooncake.batch_get(options.mooncake_python, folder, options.rounds)
    elif part == "answers":
        import pool_answers

        rows = pool_answers.answers(folder, options.models)
    else:
        import pool_engines

        if part == "step":
            rows = pool_engines.step_cost(folder, options.rounds)
        else:
            rows = pool_engines.ttft(folder, options.models, options.lengths, options.rounds)
    return [Figure(*row) for row in rows]


if __name__ == "__main__":
    main()
