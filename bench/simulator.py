"""Simulated requests per second of wall time on one core: the paper's case, and a trace with prefix caches.

    python bench/simulator.py [--trace FILE] [--requests N ...] [--load SHARE] [--repeat N] [--json FILE]
    make fast && PYTHONPATH=build/fast python bench/simulator.py        # the compiled copy

The goals: for examples/paper.yaml with policy `paper` 100,000 per second, 60,000 with the slow loops; 50,000 for a
trace (Mooncake's conversations, https://github.com/kvcache-ai/Mooncake, FAST25-release/traces) that is repeated, with a
prefix cache of 64 GiB on every instance; a time per request that is within 20 % of the same from 10,000 to 1,000,000
requests.
`--splitwise DIR` runs splitwise-sim in the same sitting.

Each case with the slow loops as `prfaas simulate` has them (a search for the threshold every 30 simulated seconds, one
for the roles every 60), and without. Requests are made up beforehand, which is told apart. The best of the repeats, for
wall and for CPU time. Machines differ and are shared: the reference is a bare loop of events, a heap of (time, number,
callback, argument) with 4 events per request, timed before every run; its ratio to the simulator can be compared.
Memory per request: what the process has grown by at most, in a run before all others whose traffic is made as it goes.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.cli.simulate_inputs import caches_asked
from prfaas.core.deployment import load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.requests import read_requests
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic, RequestChunk, Traffic
from prfaas.lab.simulator import simulation
from prfaas.lab.simulator.scenario import Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate
from simulator_splitwise import splitwise_rps

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "paper.yaml"
REFERENCE_EVENTS = 200_000
MEMORY_REQUESTS = 300_000
SPLITWISE_REQUESTS = 2_000
EVENTS_PER_REQUEST = 4


@dataclass(frozen=True)
class Case:
    name: str
    scenario: Scenario
    traffic: Traffic
    goal_per_s: float | None


@dataclass(frozen=True)
class Row:
    case: str
    requests: int
    wall_per_s: float
    cpu_us: float
    events_per_request: float
    traffic_us: float
    reference_us: float
    goal_per_s: float | None

    @property
    def slowness(self) -> float:
        """Times as long as the reference takes."""
        return self.cpu_us / self.reference_us


class Reference:
    """Nothing but events: as many wait as in the paper's case, each puts another."""

    def __init__(self) -> None:
        self.heap = [(float(number), number, self.happen, None) for number in range(100)]
        heapify(self.heap)
        self.now_s, self.number = 0.0, len(self.heap)

    def happen(self, _argument: object) -> None:
        self.number = number = self.number + 1
        heappush(self.heap, (self.now_s + 100.0, number, self.happen, None))

    def request_us(self) -> float:
        """Microseconds of CPU time of as many events as a request has."""
        heap = self.heap
        started_s = time.process_time()
        for _ in range(REFERENCE_EVENTS):
            self.now_s, _, callback, argument = heappop(heap)
            callback(argument)
        return (time.process_time() - started_s) / REFERENCE_EVENTS * EVENTS_PER_REQUEST * 1e6


def cases(load: float, trace: Path | None, policy: str) -> Iterator[Case]:
    planned = load_planned(EXAMPLE)
    problem = problem_of(planned)
    rate_rps = load * best_operation(problem).lambda_max
    goal_per_s: int | None
    for slow in (True, False):
        label = "slow loops" if slow else "bare"
        scenario = scenario_of(planned, policy=policy, adapts=slow, allocation=slow)
        workload = problem.workload
        traffic = IndependentTraffic(Poisson(rate_rps), workload.uncached, fixed(workload.output_tokens))
        goal_per_s = 60_000 if slow else 100_000
        yield Case(f"paper.yaml, {label}", scenario, traffic, goal_per_s if policy == "paper" else None)
    if trace is None:
        return
    caches = caches_asked(planned, True, "64 GiB")
    goal_per_s = 50_000 if policy == "paper" else None
    for slow in (True, False):
        label = "slow loops" if slow else "bare"
        scenario = scenario_of(planned, policy=policy, adapts=slow, allocation=slow, caches=caches)
        yield Case(f"trace, caches, {label}", scenario, replayed(trace, rate_rps), goal_per_s)


def replayed(path: Path, rate_rps: float) -> ReplayedTraffic:
    """The trace again and again, its clock's steps filled evenly, at another rate."""
    trace = read_requests(path)
    recorded_rps = ReplayedTraffic(trace, jitter_s=trace.quantum_s, rounds=None).mean_per_s
    return ReplayedTraffic(trace, speed=rate_rps / recorded_rps, jitter_s=trace.quantum_s, rounds=None)


def measure(case: Case, requests: int, repeat: int) -> Row:
    started_s = time.process_time()
    chunks = made(case.traffic, requests)
    traffic_s = time.process_time() - started_s
    wall_s = cpu_s = reference_us = float("inf")
    events = 0
    for _ in range(repeat):
        reference_us = min(reference_us, Reference().request_us())
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        result = simulate(case.scenario, chunks, seed=0, requests=requests)
        wall_s = min(wall_s, time.perf_counter() - started_s)
        cpu_s = min(cpu_s, time.process_time() - started_cpu_s)
        events = result.events
    return Row(
        case.name,
        requests,
        requests / wall_s,
        cpu_s / requests * 1e6,
        events / requests,
        traffic_s / requests * 1e6,
        reference_us,
        case.goal_per_s,
    )


def bytes_per_request(case: Case, requests: int) -> float:
    """Of a run and its result; nothing as large may have happened in this process."""
    before = peak_bytes()
    simulate(case.scenario, case.traffic.chunks(np.random.default_rng(0)), seed=0, requests=requests)
    return (peak_bytes() - before) / requests


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def made(traffic: Traffic, requests: int) -> Sequence[RequestChunk]:
    """Enough chunks for so many requests."""
    chunks: list[RequestChunk] = []
    for chunk in traffic.chunks(np.random.default_rng(0)):
        chunks.append(chunk)
        if sum(map(len, chunks)) >= requests:
            break
    return chunks


def spread(rows: Sequence[Row], case: str) -> float:
    """How far the time per request is from its middle at most."""
    times = [row.cpu_us for row in rows if row.case == case]
    return (max(times) - min(times)) / (max(times) + min(times))


def goal_of(row: Row) -> dict[str, object]:
    assert row.goal_per_s is not None
    met = row.wall_per_s >= row.goal_per_s
    name = f"{row.case}, {row.requests:,} requests"
    return {"name": name, "value": row.wall_per_s, "unit": "requests/s", "goal": row.goal_per_s, "met": met}


def evenness(case_and_spread: tuple[str, float]) -> dict[str, object]:
    case, value = case_and_spread
    return {
        "name": f"{case}, spread over the sizes",
        "value": value,
        "unit": "",
        "goal": 0.2,
        "met": value <= 0.2,
    }


def compiled() -> bool:
    """Whether this is the copy of `make fast`."""
    return not simulation.__file__.endswith(".py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a trace with prefixes; without it that case is left out")
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--load", type=float, default=0.7, help="share of the planner's Λ_max")
    parser.add_argument("--policy", default="paper", help="another one has no goals")
    parser.add_argument("--repeat", type=int, default=3, help="take the fastest of this many runs")
    parser.add_argument(
        "--splitwise", type=Path, metavar="DIR", help="a checkout of splitwise-sim to run beside"
    )
    parser.add_argument("--splitwise-python", default=sys.executable, help="a Python with what that needs")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    every = list(cases(options.load, options.trace, options.policy))
    memory_bytes = bytes_per_request(every[0], MEMORY_REQUESTS)
    runs = [(case, count) for case in every for count in sorted(options.requests)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case, count in progress.track(runs):
            rows.append(measure(case, count, options.repeat))
    splitwise_per_s = None
    if options.splitwise is not None:
        splitwise_per_s = splitwise_rps(options.splitwise, options.splitwise_python, SPLITWISE_REQUESTS)
    columns = (
        "case",
        "requests",
        "req/s",
        "goal",
        "CPU µs/req",
        "× reference",
        "events/req",
        "traffic µs",
    )
    table = Table(
        *columns, title=f"policy {options.policy}, load {options.load:g}{', compiled' if compiled() else ''}"
    )
    for row in rows:
        table.add_row(
            row.case,
            f"{row.requests:,}",
            f"{row.wall_per_s:,.0f}",
            "" if row.goal_per_s is None else f"≥ {row.goal_per_s:,.0f}",
            f"{row.cpu_us:.2f}",
            f"{row.slowness:.2f}",
            f"{row.events_per_request:.2f}",
            f"{row.traffic_us:.2f}",
        )
    console = Console(width=130)
    console.print(table)
    spreads = {name: spread(rows, name) for name in dict.fromkeys(row.case for row in rows)}
    for name, value in spreads.items():
        console.print(f"{name}: time per request ± {value:.0%} over the sizes", highlight=False)
    reference_us = min(row.reference_us for row in rows)
    console.print(f"reference: {reference_us:.2f} µs for {EVENTS_PER_REQUEST} events", highlight=False)
    console.print(f"memory: {memory_bytes:.0f} bytes per request ({every[0].name})", highlight=False)
    if splitwise_per_s is not None:
        console.print(
            f"splitwise-sim, {SPLITWISE_REQUESTS:,} requests: {splitwise_per_s:,.0f} per second",
            highlight=False,
        )
    goals = [
        *map(goal_of, filter(lambda row: row.goal_per_s is not None, rows)),
        *map(evenness, spreads.items()),
    ]
    if options.json is not None:
        figures = {
            "rows": [asdict(row) for row in rows],
            "bytes_per_request": memory_bytes,
            "splitwise_sim_per_s": splitwise_per_s,
            "compiled": compiled(),
        }
        document = {"figures": figures, "goals": goals}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
