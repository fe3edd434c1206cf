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
from pathlib import Path

from wan import mid_run, outages, overlap, peer, resumption
from wan.laboratory import ending_on_sigterm, missing

OVERLAP = {trial.name: trial for trial in overlap.TRIALS}
MID_RUN = {f"drop-{policy}": policy for policy in mid_run.POLICIES}
OUTAGES = {outage.name: outage for outage in outages.OUTAGES}
RESUMED = {f"transfer-{name}": name for name in resumption.INTERRUPTIONS}
PEER = {f"{name}-nixl": trial for name, trial in OVERLAP.items()}
TRIALS = (*OVERLAP, *MID_RUN, *OUTAGES, *RESUMED, *PEER)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trial",
        default=",".join(name for name in TRIALS if name not in PEER),
        help=f"of {', '.join(TRIALS)}; all without NIXL if not given",
    )
    parser.add_argument("--rounds", type=int, default=3, help="per trial, after one that warms up")
    parser.add_argument("--plain", action="store_true", help="without encryption of the link")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep deployment files and logs there")
    options = parser.parse_args()
    names = options.trial.split(",")
    unknown = [name for name in names if name not in TRIALS]
    if unknown:
        sys.exit(f"no trial is called {unknown[0]}; there are {', '.join(TRIALS)}")
    problem = missing() or (peer.missing_peer() if any(name in PEER for name in names) else None)
    if problem is not None:
        sys.exit(problem)
    load_before = os.getloadavg()
    with ending_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        encryption = not options.plain
        overlapped = overlap.run(
            [OVERLAP[name] for name in names if name in OVERLAP],
            options.rounds,
            directory,
            encryption=encryption,
        )
        dropped = mid_run.run(
            directory, [MID_RUN[name] for name in names if name in MID_RUN], encryption=encryption
        )
        interrupted = outages.run(
            directory, [OUTAGES[name] for name in names if name in OUTAGES], encryption=encryption
        )
        resumed = resumption.run([RESUMED[name] for name in names if name in RESUMED])
        paired = peer.run([PEER[name] for name in names if name in PEER], options.rounds, directory)
    overlap.print_table(overlapped)
    peer.print_table(paired)
    mid_run.print_table(dropped)
    outages.print_table(interrupted)
    resumption.print_table(resumed)
    print(f"load average before {load_before[0]:.1f}, after {os.getloadavg()[0]:.1f}")
    if options.json:
        figures = {
            "overlap": overlapped,
            "peer": paired,
            "rate_drop": dropped,
            "outages": interrupted,
            "resumed_transfers": resumed,
            "load_before": load_before,
            "load_after": os.getloadavg(),
        }
        goals = [goal for row in overlapped for goal in overlap.goals(row)]
        goals += [goal for row in paired for goal in peer.goals(row, overlapped)]
        goals += [goal for row in dropped for goal in mid_run.goals(row)]
        goals += [goal for row in interrupted for goal in outages.goals(row)]
        goals += [goal for row in resumed for goal in resumption.goals(row)]
        document = {"figures": figures, "goals": goals}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
