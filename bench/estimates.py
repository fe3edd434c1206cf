"""How far estimates are from public measurements: the bands and the table of docs/explanation/estimates.md.

Run: python bench/estimates.py
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.core.latency.profile import ProfileError
from prfaas.core.latency.roofline import Roofline, gpu
from prfaas.core.latency.work import WEIGHT_FORMATS, model_work

DATA = Path(__file__).parents[1] / "tests" / "core" / "latency"


@dataclass(frozen=True)
class PublicTime:
    """One published measurement."""

    model: str
    gpu: str
    engine: str
    weights: str
    ranks: int
    batch: int
    prompt_tokens: int
    answer_tokens: int
    prefill_s: float | None
    step_s: float | None

    @property
    def context_tokens(self) -> int:
        """Of a request in the middle of its answer."""
        return self.prompt_tokens + self.answer_tokens // 2


def public_times() -> list[PublicTime]:
    """All rows of the file, each configuration once: the median of what was measured again."""
    lines = [
        line for line in (DATA / "public_times.csv").read_text().splitlines() if not line.startswith("#")
    ]
    rows: dict[tuple[Any, ...], list[tuple[str, str]]] = defaultdict(list)
    for row in csv.DictReader(lines):
        key = (row["model"], row["gpu"], row["engine"], row["weights"],
               *(int(row[name]) for name in ("ranks", "batch", "prompt_tokens", "answer_tokens")))  # fmt: skip
        rows[key].append((row["prefill_s"], row["step_s"]))
    return [
        PublicTime(*key, *(_median([pair[i] for pair in pairs]) for i in range(2)))
        for key, pairs in rows.items()
    ]


def _median(texts: list[str]) -> float | None:
    numbers = [float(text) for text in texts if text]
    return statistics.median(numbers) if numbers else None


def models() -> dict[str, dict[str, Any]]:
    """Configurations of the models."""
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "public_models.yaml").read_text())
    return {name: entry["config"] for name, entry in loaded.items()}


def by_roofline(row: PublicTime) -> Roofline:
    """The roofline of the row's instance."""
    work = model_work(models()[row.model], row.model, WEIGHT_FORMATS[row.weights])
    return Roofline(work, gpu(row.gpu), row.ranks)


def ratios() -> Iterator[tuple[str, PublicTime, float]]:
    """(what, row, measured over estimated) for all that can be estimated."""
    made: dict[tuple[Any, ...], Roofline | None] = {}
    for row in public_times():
        key = (row.model, row.gpu, row.weights, row.ranks)
        if key not in made:
            try:
                made[key] = by_roofline(row)
            except ProfileError as error:
                print(f"# {key}: {error}")
                made[key] = None
        times = made[key]
        if times is None:
            continue
        try:
            if row.prefill_s is not None:
                yield "prefill", row, row.prefill_s / times.prefill_s(row.prompt_tokens)
            if row.step_s is not None:
                yield "decode", row, row.step_s / times.decode_step_s(row.batch, row.context_tokens)
        except ProfileError as error:
            print(f"# {row}: {error}")


def print_table() -> None:
    """Measured over estimated: the ends of the band of 8 in 10, and the median, by model and GPU."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for what, row, ratio in ratios():
        for group in ("all", row.model, row.gpu, row.engine, f"{row.engine} {row.gpu}"):
            groups[what, group].append(ratio)
    print("measured / estimated")
    print(f"{'':8} {'':16} {'rows':>5} {'P10':>6} {'P50':>6} {'P90':>6}")
    for (what, group), values in sorted(groups.items()):
        deciles = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
        print(f"{what:8} {group:16} {len(values):5} {deciles[0]:6.2f} {deciles[4]:6.2f} {deciles[8]:6.2f}")


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print_table()


if __name__ == "__main__":
    main()
