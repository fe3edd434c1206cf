"""What the long-term side of the scheduler costs: per request, per measured prefill, and per evaluation.

    python bench/allocation.py [--json FILE] [--repeat N]

Per request it must not be felt (the aim for a prefill's predicted seconds: 0.5 µs); an evaluation runs in a thread.
Exit code 1 if an aim is missed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.core.deployment import load_planned
from prfaas.core.latency.files import load_profile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanProblem, best_operation, problem_of
from prfaas.core.scheduling.allocation import Allocator, PdInstance, PdLoad, StageLoad
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.rebalancing import Rebalancer
from prfaas.core.scheduling.threshold import ThresholdOptimiser
from prfaas.core.scheduling.view import LinkView

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAMPLES = 20_000


@dataclass(frozen=True)
class Row:
    what: str
    microseconds: float
    aim_microseconds: float | None


def fastest_us(work: Callable[[], object], calls: int, repeat: int) -> float:
    """Microseconds per call, of the fastest of `repeat` runs of `work`, which makes `calls` calls."""
    times = []
    for _ in range(repeat):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return min(times) / calls * 1e6


def drawn() -> list[float]:
    """Lengths of the paper's distribution."""
    lengths = np.random.default_rng(0).lognormal(9.9, 1.0, 2 * SAMPLES)
    kept: list[float] = lengths[(lengths >= 128) & (lengths <= 131072)][:SAMPLES].tolist()
    return kept


def per_request(lengths: list[float], repeat: int) -> list[Row]:
    """What every request or every measured prefill costs."""
    window, curve = LengthWindow(600), ServiceCurve.of_profile(load_profile("internal-1t-h20"))
    seconds = curve.seconds
    seconds_of = [2 * seconds(length) for length in lengths]

    def observe() -> None:
        for i, length in enumerate(lengths):
            window.add(length, 0.001 * i)

    def predict() -> None:
        for length in lengths:
            seconds(length)

    def correct() -> None:
        for i, (length, measured) in enumerate(zip(lengths, seconds_of, strict=True)):
            curve.add(length, measured, 0.01 * i)

    rebalancer = Rebalancer()

    def miss() -> None:
        for i in range(SAMPLES):
            rebalancer.observe(i % 3000, 4096, 10**8, "home", ("east",), 0.01 * i)

    rows = [
        Row("LengthWindow.add", fastest_us(observe, SAMPLES, repeat), 2.0),
        Row("ServiceCurve.seconds", fastest_us(predict, SAMPLES, repeat), 0.5),
        Row("ServiceCurve.add, 100 a second", fastest_us(correct, SAMPLES, repeat), 10.0),
        Row("Rebalancer.observe", fastest_us(miss, SAMPLES, repeat), 5.0),
        Row("LengthWindow.lengths", fastest_us(lambda: window.lengths(20.0), 1, repeat), None),
    ]
    # A link without a byte to spare: everything is looked at, each time.
    links = [LinkView("east", "home", 1.0)]
    decide = fastest_us(lambda: rebalancer.decide(links, 0.01 * SAMPLES), 1, repeat)
    return [*rows, Row("Rebalancer.decide, 3,000 prefixes", decide, None)]


def per_evaluation(example: str, lengths: list[float], repeat: int) -> list[Row]:
    """What a look at thresholds and roles costs for a planned deployment, with lengths as a window gives them."""
    window = LengthWindow(600)
    for length in lengths:
        window.add(length, 0.0)
    seen = window.lengths(0.0)
    assert seen is not None
    base = problem_of(load_planned(EXAMPLES / example))
    problem = replace(base, workload=replace(base.workload, lengths=seen))
    prefill = {roles.cluster: roles.prefill for roles in best_operation(problem).roles}
    current = dict.fromkeys(prefill, 10_000.0)
    optimiser = ThresholdOptimiser()
    propose = fastest_us(
        lambda: optimiser.propose(problem, prefill, current, sample_count=SAMPLES), 1, repeat
    )
    loads = _loads(problem)
    decide = fastest_us(lambda: Allocator(persist=1).decide(loads, problem, 0.0), 1, repeat)
    return [
        Row(f"ThresholdOptimiser.propose, {example}", propose, 1e6),
        Row(f"Allocator.decide, {example}", decide, 4e6),
    ]


def _loads(problem: PlanProblem) -> list[PdLoad]:
    """One prefill instance in every PD cluster, and too much for it: the allocator has to ask the planner."""
    return [
        PdLoad(
            pd.name,
            tuple(PdInstance(f"{pd.name}{i}", i == 0, i > 0) for i in range(pd.instances)),
            StageLoad(1.0, 10),
            StageLoad(0.5),
        )
        for pd in problem.pd
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--repeat", type=int, default=5, help="take the fastest of this many runs")
    options = parser.parse_args()
    lengths = drawn()
    rows = per_request(lengths, options.repeat)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for example in progress.track(["paper.yaml", "multi.yaml"]):
            rows += per_evaluation(example, lengths, options.repeat)
    table = Table("what", "µs", "aim")
    for row in rows:
        aim = "" if row.aim_microseconds is None else f"<= {row.aim_microseconds:,g}"
        table.add_row(row.what, f"{row.microseconds:,.2f}", aim)
    Console(width=110).print(table)
    if options.json is not None:
        document = {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(row.aim_microseconds is not None and row.microseconds > row.aim_microseconds for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
