"""The cross-datacenter link, end to end, in the laboratory of `bench/wan`.

    python bench/wan_e2e.py [--trial dense-2k,dense-4k,…] [--rounds 3] [--plain] [--json FILE]

Needs root: the traffic goes through network namespaces that it makes, over an emulated line of 30 ms. Engines of both
sites run on cores of their own. The table says what was exposed: the time to the first token beyond the ideal, which
is max(prefill, bytes / goodput) + round trip. The prefill is the producer's own, measured in the same round.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wan import overlap
from wan.laboratory import ending_on_sigterm, missing

TRIALS = {trial.name: trial for trial in overlap.TRIALS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trial", default=",".join(TRIALS), help=f"of {', '.join(TRIALS)}; all if not given")
    parser.add_argument("--rounds", type=int, default=3, help="per trial, after one that warms up")
    parser.add_argument("--plain", action="store_true", help="without encryption of the link")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep deployment files and logs there")
    options = parser.parse_args()
    names = options.trial.split(",")
    unknown = [name for name in names if name not in TRIALS]
    if unknown:
        sys.exit(f"no trial is called {unknown[0]}; there are {', '.join(TRIALS)}")
    problem = missing()
    if problem is not None:
        sys.exit(problem)
    load_before = os.getloadavg()
    with ending_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        rows = overlap.run(
            [TRIALS[name] for name in names], options.rounds, directory, encryption=not options.plain
        )
    print_overlap(rows)
    print(f"load average before {load_before[0]:.1f}, after {os.getloadavg()[0]:.1f}")
    if options.json:
        figures = {"overlap": rows, "load_before": load_before, "load_after": os.getloadavg()}
        document = {"figures": figures, "goals": goals(rows)}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def print_overlap(rows: Sequence[Mapping[str, Any]]) -> None:
    print("trial           MB  prefill s  ideal s  TTFT s  exposed s (worst)   goal  tokens")
    for row in rows:
        print(
            f"{row['trial']:14} {row['kv_mb']:5.1f} {row['prefill_s']:9.2f} {row['ideal_s']:8.2f} {row['ttft_s']:7.2f}"
            f"  {row['exposed_s']:8.3f} ({row['exposed_s_worst']:.3f})  {row['goal_s']:6.3f}  "
            f"{'equal' if row['equal'] else 'DIFFERENT'}{'' if row['met'] else '  (missed)'}"
        )


def goals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        found.append(
            {
                "name": f"{row['trial']}: time exposed",
                "value": row["exposed_s"],
                "unit": "s",
                "goal": row["goal_s"],
                "met": row["met"],
            }
        )
        found.append(
            {
                "name": f"{row['trial']}: answers equal to plain vLLM",
                "value": sum(each != "no" for each in row["equalities"]),
                "unit": "answers",
                "goal": len(row["equalities"]),
                "met": row["equal"],
            }
        )
    return found


if __name__ == "__main__":
    main()
