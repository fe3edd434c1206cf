"""How far simulated times are from real ones.

Live: three vLLM servers and the gateway on this machine. `profile` measures them one request at a time, `drive` sends
Poisson traffic at three loads through the gateway, `simulate` gives the same requests and the measured profile to the
simulator, `report` compares. All of it is in one JSON file, so the last two need no engine. The engines share the
machine's cores with the gateway and the client; what that costs is measured, and the simulation is reported with and
without it.

    python bench/fidelity.py all /tmp/fidelity.json          # 15 minutes on two cores that do nothing else
    python bench/fidelity.py report /tmp/fidelity.json

Recorded: single vLLM engines on GPUs (files of LLMServingSim's bench), see `fidelity_recorded.py`.

    python bench/fidelity.py recorded bench/data/*.jsonl.gz
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fidelity_live import (
    OFFLOADED_ABOVE,
    QUICK,
    Depth,
    driven,
    lengths_spec,
    profile_files,
    profiled,
    requests_at,
)
from fidelity_recorded import compared, errors_of, limits_of, table_of
from fidelity_stack import EAST_PREFILL, HOME, HOME_PREFILL, running, write_deployment
from prfaas.core.deployment import PlannedDeployment
from prfaas.core.deployment.load import load_planned
from prfaas.core.latency import Curve, DecodeCurve, LatencyProfile
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.workload.traffic import RequestChunk
from prfaas.lab.simulator import Overheads, Result, Scenario, scenario_of, simulate

MAX_MODEL_LEN, CHUNK_TOKENS = 16384, 1024
WARMUP_SHARE = 0.1
APART_S = 1000.0
"""Between two requests that shall not meet."""

DECODE_STEP_LIMIT_S = 1.0
"""No real limit: as many requests may decode together as were measured."""


def profile(document: dict[str, Any], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="prfaas-fidelity-") as name:
        directory = Path(name)
        path = write_deployment(
            directory,
            max_model_len=MAX_MODEL_LEN,
            chunk_tokens=CHUNK_TOKENS,
            bandwidth=options.bandwidth,
            policy="static_threshold",
            threshold_tokens=OFFLOADED_ABOVE,
        )
        with running(path, directory) as stack:
            document["measured"] = asyncio.run(profiled(stack, QUICK if options.quick else Depth()))
    document["bandwidth"] = options.bandwidth
    document["machine"] = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[1]}


def drive(document: dict[str, Any], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="prfaas-fidelity-") as name:
        directory = Path(name)
        planned = planned_of(document, directory)
        capacity_per_s = best_operation(problem_of(planned)).lambda_max
        threshold = round(scenario_of(planned).threshold_tokens[HOME])
        print(f"capacity {capacity_per_s:.3f} requests/s, threshold {threshold} tokens", file=sys.stderr)
        path = write_deployment(
            directory,
            max_model_len=MAX_MODEL_LEN,
            chunk_tokens=CHUNK_TOKENS,
            bandwidth=document["bandwidth"],
            policy=options.policy,
            threshold_tokens=threshold,
            profiles=profile_files(document["measured"]["profiles"], directory),
            **_to_plan(),
        )
        document |= {
            "policy": options.policy,
            "capacity_per_s": capacity_per_s,
            "threshold_tokens": threshold,
            "drives": [],
        }
        with running(path, directory) as stack:
            for number, load in enumerate(options.loads):
                per_s = load * capacity_per_s
                requests = requests_at(per_s, options.duration_s, seed=number)
                print(f"load {load:g}: {len(requests)} requests", file=sys.stderr)
                drives: list[Any] = document["drives"]
                drives.append({"load": load, "per_s": per_s, **asyncio.run(driven(stack, requests))})


def simulated(document: dict[str, Any], _options: argparse.Namespace) -> None:
    """Each drive again, with the profile as measured and with what the shared cores cost."""
    with tempfile.TemporaryDirectory(prefix="prfaas-fidelity-") as name:
        planned = planned_of(document, Path(name))
        for each in document["drives"]:
            each["slowdown"] = slowdown_of(each, document["machine"]["cores"])
            each["simulated"] = {
                "as measured": _simulated(document, planned, each["requests"]),
                "shared cores": _simulated(document, planned, each["requests"], slowdown=each["slowdown"]),
            }
        alone = [
            [place * APART_S, int(tokens), 1]
            for place, tokens in enumerate(document["measured"]["idle_ttft_s"])
            if int(tokens) > 1
        ]
        ttft_s = _simulated(document, planned, alone, policy="static_threshold", threshold=OFFLOADED_ABOVE)[
            "ttft_s"
        ]
        document["idle_simulated_s"] = {str(row[1]): each for row, each in zip(alone, ttft_s, strict=True)}


def slowdown_of(drive_: dict[str, Any], cores: int) -> float:
    """How much longer prefill takes because decode engine, gateway and client run on the same cores.

    With u the share of all cores that these three took: while one prefill engine works, the other one does for a
    part r of the time (its own use of its core). Then there is no idle core for the others, and each prefill engine
    loses u; otherwise they go where nothing else runs.
    """
    used, lasted_s = drive_["cpu_s"], drive_["lasted_s"]
    prefill = [used[EAST_PREFILL], used[HOME_PREFILL]]
    share: float = (sum(used.values()) - sum(prefill)) / (cores * lasted_s)
    both: float = sum(prefill) / len(prefill) / lasted_s
    return 1 / (1 - share * both)


def _simulated(
    document: dict[str, Any],
    planned: PlannedDeployment,
    rows: Sequence[Sequence[Any]],
    *,
    slowdown: float = 1.0,
    policy: str | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """`rows`: arrival (s), prompt and answer (tokens) of every request. Policy and threshold: as driven."""
    measured = document["measured"]
    scenario = scenario_of(
        slower(planned, slowdown),
        policy=policy or document["policy"],
        roles={HOME: 1},
        threshold_tokens=document["threshold_tokens"] if threshold is None else threshold,
        adapts=False,
        allocation=False,
        overheads=Overheads(measured["request_s"], measured["hop_s"], first_step=True),
    )
    return columns_of(result_of(scenario, rows))


def result_of(scenario: Scenario, rows: Sequence[Sequence[Any]]) -> Result:
    """Requests of a drive in the simulator. `rows`: arrival (s), prompt and answer (tokens) of every request."""
    arrivals = np.array([row[0] for row in rows], dtype=np.float64)
    chunk = RequestChunk(
        arrivals,
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        # No two prompts begin alike, so blocks would change nothing.
        np.arange(0),
        np.zeros(len(rows) + 1, dtype=np.int64),
        512,
    )
    return simulate(scenario, [chunk], seed=0, warmup_share=WARMUP_SHARE)


def columns_of(result: Result) -> dict[str, Any]:
    """What a comparison needs of every request; JSON-ready."""
    return {
        "ttft_s": [round(value, 5) for value in result.ttft_s.tolist()],
        "e2e_s": [round(value, 5) for value in result.e2e_s.tolist()],
        "offloaded": result.offloaded.tolist(),
    }


def slower(planned: PlannedDeployment, factor: float) -> PlannedDeployment:
    """The same deployment with all times of its engines `factor` times as long."""
    return replace(
        planned,
        clusters=tuple(replace(each, profile=slowed(each.profile, factor)) for each in planned.clusters),
    )


def slowed(profile_: LatencyProfile, factor: float) -> LatencyProfile:
    """All times `factor` times as long."""

    def curve(of: Curve) -> Curve:
        return replace(of, points=tuple((at, seconds * factor) for at, seconds in of.points))

    decode = profile_.decode and DecodeCurve(curve(profile_.decode.curve), profile_.decode.context_tokens)
    return replace(profile_, prefill=curve(profile_.prefill), decode=decode)


def planned_of(document: dict[str, Any], directory: Path) -> PlannedDeployment:
    folder = directory / "planned"
    folder.mkdir(exist_ok=True)
    path = write_deployment(
        folder,
        max_model_len=MAX_MODEL_LEN,
        chunk_tokens=CHUNK_TOKENS,
        bandwidth=document["bandwidth"],
        policy="paper",
        profiles=profile_files(document["measured"]["profiles"], folder),
        to_run=False,
        **_to_plan(),
    )
    return load_planned(path)


def _to_plan() -> dict[str, Any]:
    from fidelity_live import HIGH_ANSWER, LOW_ANSWER

    answer = (LOW_ANSWER + HIGH_ANSWER) / 2
    return {
        "workload": {"lengths": lengths_spec(), "output_tokens": answer},
        "step_limit_s": DECODE_STEP_LIMIT_S,
    }


def reported(document: dict[str, Any]) -> dict[str, Any]:
    """Errors of every drive, for both simulations."""
    found = []
    for each in document["drives"]:
        rows = each["requests"]
        arrivals = np.array([row[0] for row in rows])
        whole = np.array([row[6] is None for row in rows])
        counted = whole & (arrivals >= WARMUP_SHARE * arrivals[-1])
        first_s, last_s = (np.array([row[place] or np.nan for row in rows]) for place in (3, 4))
        offloaded = np.array([row[5] == "offload" for row in rows])
        entry: dict[str, Any] = {
            "load": each["load"],
            "requests": len(rows),
            "lost": int((~whole).sum()),
            "slowdown": each["slowdown"],
            "strangers": each.get("strangers_cpu_s", 0.0) / each["lasted_s"] / document["machine"]["cores"],
            "offloaded": float(offloaded.mean()),
        }
        for name, made in each["simulated"].items():
            ttft_s, e2e_s = np.array(made["ttft_s"]), np.array(made["e2e_s"])
            entry[name] = {
                "ttft": errors_of(ttft_s[counted], (first_s - arrivals)[counted]),
                "e2e": errors_of(e2e_s[counted], (last_s - arrivals)[counted]),
                "throughput_error": float(last_s[whole].max() / (arrivals + e2e_s)[whole].max() - 1),
                "same_route": float((np.array(made["offloaded"]) == offloaded).mean()),
            }
        found.append(entry)
    together = document["measured"]["together"]
    return {
        "both_prefill_slowdown": float(np.mean(together["both_s"]) / np.mean(together["alone_s"]) - 1),
        "request_s": document["measured"]["request_s"],
        "hop_s": document["measured"]["hop_s"],
        "alone": {
            tokens: {"simulated_s": ours, "real_s": real, "error": ours / real - 1}
            for tokens, ours in document["idle_simulated_s"].items()
            for real in [document["measured"]["idle_ttft_s"][tokens]]
        },
        "capacity_per_s": document["capacity_per_s"],
        "threshold_tokens": document["threshold_tokens"],
        "drives": found,
    }


def table_of_drives(found: dict[str, Any]) -> Table:
    table = Table(title="simulated minus real, of real")
    for column in ("load", "requests", "simulation", "TTFT mean", "P50", "P90", "real mean", "real P90", "throughput",
                   "same route"):  # fmt: skip
        table.add_column(column, justify="right")
    for each in found["drives"]:
        for name in ("as measured", "shared cores"):
            made = each[name]
            table.add_row(
                f"{each['load']:g}",
                str(each["requests"]),
                name if name == "as measured" else f"{name}, {each['slowdown'] - 1:+.1%}",
                *(f"{made['ttft'][key]['error']:+.1%}" for key in ("mean", "p50", "p90")),
                f"{made['ttft']['mean']['real_s']:.3f} s",
                f"{made['ttft']['p90']['real_s']:.3f} s",
                f"{made['throughput_error']:+.1%}",
                f"{made['same_route']:.0%}",
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["profile", "drive", "simulate", "report", "all", "recorded"])
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="of measurements, or recorded runs"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.8], help="of the capacity")
    parser.add_argument("--duration-s", type=float, default=180.0, help="of the arrivals at each load")
    parser.add_argument("--bandwidth", default="100 Mbit/s", help="of the link")
    parser.add_argument("--policy", default="paper")
    parser.add_argument("--quick", action="store_true", help="fewer points and repeats, to try it")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    if options.stage == "recorded":
        runs = [each for path in options.files for each in compared(path, limits_of(path))]
        print(json.dumps(runs, indent=2)) if options.json else console.print(table_of(runs))
        return 0
    path = options.files[0]
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    stages = {"profile": profile, "drive": drive, "simulate": simulated}
    for name, stage in stages.items():
        if options.stage in (name, "all"):
            stage(document, options)
            path.write_text(json.dumps(document) + "\n")
    if options.stage in ("report", "simulate", "all"):
        if options.stage == "report":
            simulated(document, options)
        found = reported(document)
        if options.json:
            print(json.dumps(found, indent=2))
        else:
            console.print(table_of_drives(found))
            strangers = max(each["strangers"] for each in found["drives"])
            print(f"others used up to {strangers:.1%} of the cores meanwhile")
            for tokens, each in found["alone"].items():
                route = "offloaded" if int(tokens) > OFFLOADED_ABOVE else "local"
                print(
                    f"{tokens:>6} tokens alone, {route}: {each['real_s']:.3f} s, simulated {each['error']:+.1%}"
                )
            print(
                f"two prefills at once take {found['both_prefill_slowdown']:+.1%} each; gateway "
                f"{found['request_s'] * 1000:.1f} ms, second hop {found['hop_s'] * 1000:.1f} ms; capacity "
                f"{found['capacity_per_s']:.3f} requests/s, threshold {found['threshold_tokens']:.0f} tokens"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
