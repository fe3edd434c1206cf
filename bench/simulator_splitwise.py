"""splitwise-sim (https://github.com/Mutinifni/splitwise-sim, MIT) on traffic of its kind, for bench/simulator.py.

It simulates disaggregated serving too: prefill and decode machines, one fixed class of links, no prefix caches. It runs
as the authors' example of split machines does (scripts/run_splitwise_ha_example.sh), in a process of its own, and with
more servers so that it keeps up.
"""

import csv
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

SERVERS = 8  # of each of its two kinds
RATE_RPS = 20.0
MEAN_PROMPT_TOKENS = 1500.0
MOST_PROMPT_TOKENS = 8000
ANSWER_TOKENS = 128
RUN_LIMIT_S = 600.0
COLUMNS = (
    "request_id",
    "request_type",
    "application_id",
    "arrival_timestamp",
    "batch_size",
    "prompt_size",
    "token_size",
)


def splitwise_rps(checkout: Path, python: str, requests: int) -> float:
    """Requests per second of wall time, without the time that it needs for a trace of one request.

    Args:
        checkout: Folder of the repository.
        python: A Python with the packages of its `requirements.txt`.
        requests: How many the trace has.
    """
    start_up_s = _seconds_of(checkout, python, 1)
    return requests / (_seconds_of(checkout, python, requests) - start_up_s)


def _seconds_of(checkout: Path, python: str, requests: int) -> float:
    draw = np.random.default_rng(0)
    arrivals_s = np.cumsum(draw.exponential(1 / RATE_RPS, requests))
    prompts = np.clip(draw.exponential(MEAN_PROMPT_TOKENS, requests), 1, MOST_PROMPT_TOKENS).astype(int)
    trace = checkout / "traces" / f"prfaas_{requests}.csv"
    with trace.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for number, (arrival_s, prompt) in enumerate(zip(arrivals_s, prompts, strict=True)):
            rows.writerow([number, 2, 0, round(arrival_s, 6), 1, prompt, ANSWER_TOKENS])
    try:
        with tempfile.TemporaryDirectory() as results:
            started_s = time.perf_counter()
            subprocess.run(
                [
                    python,
                    "run.py",
                    "applications.0.scheduler=mixed_pool",
                    "cluster=half_half",
                    f"cluster.servers.0.count={SERVERS}",
                    f"cluster.servers.1.count={SERVERS}",
                    "start_state=splitwise",
                    "start_state.split_type=heterogeneous",
                    "performance_model=db",
                    f"trace.filename={trace.stem}",
                    f"output_dir={results}",
                ],
                cwd=checkout,
                check=True,
                timeout=RUN_LIMIT_S,
                stdout=subprocess.DEVNULL,
            )
            return time.perf_counter() - started_s
    finally:
        trace.unlink()
