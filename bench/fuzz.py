"""Fuzz what comes from outside, for as long as is asked: property tests with new random examples, over and over.

    python bench/fuzz.py [--seconds N] [--area AREA ...] [--seed N] [--json FILE]

frames    of the transfer protocol: a producer, a consumer and an observer that send anything
events    KV events, as an engine publishes them and as another machine tells them
pool      messages at the socket of a pool's daemon
files     deployment files, configurations of models, clients, traces
bodies    what clients ask for, at every endpoint
answers   an engine's answers: streams of each API, whole ones, what a stream is gone on with
reports   an engine's metrics and telemetry, etcd's answers and values, tickets, ledgers

Each area has the time for itself. Ends with 1 at the first finding, and says how it is repeated.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "frames": ("tests/serving/transport/test_fuzz.py", "tests/serving/transport/test_wire.py"),
    "events": ("tests/core/prefix/test_fuzz_events.py",),
    "pool": ("tests/serving/pool/test_fuzz_messages.py",),
    "files": ("tests/test_fuzz_files.py",),
    "bodies": ("tests/serving/gateway/test_fuzz_bodies.py",),
    "answers": ("tests/serving/gateway/answers/test_fuzz_answers.py",),
    "reports": ("tests/serving/test_fuzz_reports.py", "tests/serving/control/test_bounds.py"),
}


def fuzzed(area: str, seconds: float, seeds: random.Random) -> dict[str, Any]:
    """How often an area's tests ran in this time, each time with another seed, and what they found."""
    began_s, runs = time.monotonic(), 0
    while True:
        seed = seeds.randrange(1 << 32)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "hypothesis", *AREAS[area]),
            *("--hypothesis-profile=explore", f"--hypothesis-seed={seed}", "--timeout=3600"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        runs += 1
        took_s = time.monotonic() - began_s
        if done.returncode:
            print(done.stdout[-8000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
            return {"area": area, "runs": runs, "took_s": took_s, "finding": " ".join(command[1:])}
        if took_s >= seconds:
            return {"area": area, "runs": runs, "took_s": took_s, "finding": None}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for each area")
    parser.add_argument("--area", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--seed", type=int, help="of the seeds; left out: another one each time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = []
    for area in options.area:
        found.append(fuzzed(area, options.seconds, random.Random(options.seed)))
        finding = found[-1]["finding"]
        said = f"found something; repeat with: python {finding}" if finding else "found nothing"
        print(f"{area}: {found[-1]['runs']} runs in {found[-1]['took_s']:.0f} s, {said}", flush=True)
        if finding:
            break
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found[-1]["finding"] else 0


if __name__ == "__main__":
    sys.exit(main())
