"""Many schedules of faults on all cores: `python -m tests.world.swarm --seeds 100000`, or `make swarm SEEDS=100000`.

`--replay SEED` prints what a seed's schedule does, up to the violation if there is one.
"""

import argparse
import os
import sys
import time
from collections import Counter
from multiprocessing import get_context

from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import TransferPhase

from .world import UNKNOWN, Coverage, Violation, World

LEAST_EVENTS = 20
_BATCH = 100
_MOST_SHOWN = 10
_TO_CONSUMER = ("OPEN", "DATA", "END", "ABORT")
_TO_PRODUCER = ("ACCEPT", "REFUSE", "ACK", "NACK", "ABORT")
PAIRS = {("consumer", kind, phase) for kind in _TO_CONSUMER for phase in (*TransferPhase, UNKNOWN)} | {
    ("producer", kind, phase) for kind in _TO_PRODUCER for phase in SendPhase
}
IMPOSSIBLE = {
    # A producer sends chunks, and the end of a prefill, once it was let in.
    ("consumer", "END", "waiting"),
    # What was never let in has no chunk to answer.
    *(("producer", kind, "opening") for kind in ("ACK", "NACK")),
    # Of a complete transfer all was answered, each on the connection that waited for it.
    *(("producer", kind, "complete") for kind in ("ACK", "NACK", "ABORT")),
}


def run(first: int, seeds: int) -> tuple[list[tuple[int, str]], Coverage, int]:
    """The violations of these seeds, the frames met in each state, and the number of events."""
    coverage: Coverage = Counter()
    violations, events = [], 0
    for seed in range(first, first + seeds):
        world = World(seed, coverage)
        try:
            world.run()
            if world.events.happened < LEAST_EVENTS:
                violations.append((seed, f"only {world.events.happened} events happened"))
        except Violation as violation:
            violations.append((seed, str(violation)))
        events += world.events.happened
    return violations, coverage, events


def replay(seed: int) -> int:
    world, violation = World(seed), ""
    try:
        world.run()
    except Violation as found:
        violation = f"VIOLATION {found}"
    print("\n".join((*world.log, violation or "nothing is wrong")))
    return 1 if violation else 0


def swarm(first: int, seeds: int, jobs: int) -> int:
    began_s = time.perf_counter()
    coverage: Coverage = Counter()
    violations: list[tuple[int, str]] = []
    events = 0
    batches = [(at, min(_BATCH, first + seeds - at)) for at in range(first, first + seeds, _BATCH)]
    with get_context("spawn").Pool(jobs) as pool:
        for found, met, happened in pool.starmap(run, batches):
            violations += found
            coverage += met
            events += happened
    elapsed_s = time.perf_counter() - began_s
    for side, kind, phase in sorted(coverage):
        print(f"{side:9} {kind:8} {phase:10} {coverage[side, kind, phase]:10,}")
    missing = sorted(PAIRS - IMPOSSIBLE - coverage.keys())
    print("not met:", "; ".join(" ".join(pair) for pair in missing) or "nothing")
    print(
        f"{seeds:,} schedules from seed {first}, {events / seeds:.0f} events each, "
        f"{seeds / elapsed_s:.0f} a second on {jobs} cores: {len(violations)} violations"
    )
    for seed, what in violations[:_MOST_SHOWN]:
        print(f"  {what}\n    python -m tests.world.swarm --replay {seed}")
    return 1 if violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="SEED")
    asked = parser.parse_args()
    if asked.replay is not None:
        return replay(asked.replay)
    if asked.seeds < 1 or asked.jobs < 1 or asked.first < 0:
        parser.error("--seeds and --jobs must be at least 1, --first at least 0")
    return swarm(asked.first, asked.seeds, asked.jobs)


if __name__ == "__main__":
    sys.exit(main())
