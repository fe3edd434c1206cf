"""A compiled copy of the package for long simulations: `make fast`.

    python requirements/compiled.py build/fast
    PYTHONPATH=build/fast prfaas simulate examples/paper.yaml

The files below, which are most of a simulation's time, are compiled by mypyc, which comes with mypy; a C compiler and
Python's headers are needed. The source stays as it is: in the copy alone it is rewritten (`native_source.py`).
Results are the same to the last bit (`python -m tests.lab.simulator.golden_decisions --results`).
The copy is for simulations, plans and studies; engines and gateways are not tested with it.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from native_source import native_source

SOURCE = Path(__file__).resolve().parent.parent / "src" / "prfaas"
COMPILED = (
    "core/latency/cached_prefix.py",
    "core/latency/curve_reader.py",
    "core/link/send_order.py",
    "core/planner/fixed_roles.py",
    "core/planner/loads.py",
    "core/planner/problem.py",
    "core/planner/ttft.py",
    "core/planner/two_clusters.py",
    "core/scheduling/allocation.py",
    "core/scheduling/baselines.py",
    "core/scheduling/cache_transfers.py",
    "core/scheduling/candidates.py",
    "core/scheduling/decision.py",
    "core/scheduling/decoders.py",
    "core/scheduling/egress.py",
    "core/scheduling/hazard.py",
    "core/scheduling/length_window.py",
    "core/scheduling/link_choice.py",
    "core/scheduling/live_problem.py",
    "core/scheduling/paper.py",
    "core/scheduling/pd_candidate.py",
    "core/scheduling/prefill_order.py",
    "core/scheduling/prefill_pool.py",
    "core/scheduling/routing.py",
    "core/scheduling/stage_utilisation.py",
    "core/scheduling/threshold.py",
    "core/scheduling/tilted.py",
    "core/scheduling/view.py",
    "lab/simulator/answers.py",
    "lab/simulator/columns.py",
    "lab/simulator/control_loops.py",
    "lab/simulator/events.py",
    "lab/simulator/flow.py",
    "lab/simulator/instance.py",
    "lab/simulator/link.py",
    "lab/simulator/monitored_link.py",
    "lab/simulator/prefix_caches.py",
    "lab/simulator/send_queue.py",
    "lab/simulator/simulation.py",
    "lab/simulator/time_series.py",
    "lab/simulator/token_clock.py",
    "lab/simulator/transfer.py",
    "lab/simulator/world.py",
)


def build(target: Path) -> None:
    """Make the copy; what was there goes."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(SOURCE, target / "prfaas", ignore=shutil.ignore_patterns("__pycache__"))
    # As a wheel has them (core/shipped.py).
    for shipped in ("docs", "examples"):
        folder = SOURCE.parent.parent / shipped
        pictures = shutil.ignore_patterns("img")
        shutil.copytree(folder, target / "prfaas" / shipped, ignore=pictures, dirs_exist_ok=True)
    for name in COMPILED:
        path = target / "prfaas" / name
        path.write_text(native_source(path.read_text(encoding="utf-8")), encoding="utf-8")
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "2", "MYPYPATH": ".", "PYTHONPATH": "."}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "mypyc",
            "--config-file=",
            "--ignore-missing-imports",
            "--follow-imports=silent",
            *(f"prfaas/{name}" for name in COMPILED),
        ],
        cwd=target,
        env=environment,
        check=True,
    )
    shutil.rmtree(target / "build", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="folder of the copy")
    target = parser.parse_args().target
    build(target)
    print(f"compiled {len(COMPILED)} files; use it with PYTHONPATH={target}")


if __name__ == "__main__":
    main()
