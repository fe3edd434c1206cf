"""How far simulated times are from real ones.

Live: three vLLM servers and the gateway on this machine. `profile` measures them one request at a time, `drive` sends
Poisson traffic at three loads through the gateway, `simulate` gives the same requests and the measured profile to the
simulator, `report` compares. All of it is in one JSON file, so the last two need no engine. Each engine gets a part
of a core (cgroups), and the rest is enough for the others: nobody takes time from it, as on machines of their own.

Traffic is of two kinds. Independent prompts have nothing in common, and the threshold stays. Conversations hit prefix
caches, and the threshold is optimised all the time.

    sudo python bench/fidelity.py all /tmp/fidelity.json     # 40 minutes on two cores that do nothing else
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

import cpu_share
import measured_model
from fidelity_live import (
    OFFLOADED_ABOVE,
    PROBE_TOKENS,
    QUICK,
    Depth,
    driven,
    probes,
    profile_files,
    profiled,
)
from fidelity_recorded import compared, errors_of, limits_of, table_of
from fidelity_stack import HOME, KV_CACHE_GIB, NEVER_S, running, write_deployment
from fidelity_traffic import (
    HIGH_ANSWER,
    KINDS,
    LOW_ANSWER,
    Kind,
    chunk_of,
    planned_lengths,
    requests_at,
    sample_of,
)
from measured_model import MeasuredModel
from prfaas.core.deployment import ControlConfig, PlannedDeployment
from prfaas.core.deployment.load import load_planned
from prfaas.core.latency.profile import Curve, DecodeCurve, LatencyProfile
from prfaas.core.planner import best_operation, problem_of, problem_of_trace, range_tokens
from prfaas.core.units import GIB
from prfaas.core.workload.traffic import RequestChunk
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Overheads, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

MAX_MODEL_LEN, CHUNK_TOKENS = 16384, 1024
WARMUP_SHARE = 0.1
APART_S = 1000.0
"""Between two requests that shall not meet."""

THRESHOLD_PERIOD_S: dict[Kind, float] = {"independent": NEVER_S, "conversations": 15.0}

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
            model=MeasuredModel.chosen(options),
        )
        with running(path, directory) as stack:
            document["measured"] = asyncio.run(profiled(stack, QUICK if options.quick else Depth()))
    document["model"] = MeasuredModel.chosen(options).to_document()
    document["bandwidth"] = options.bandwidth
    document["machine"] = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[1]}


def drive(document: dict[str, Any], options: argparse.Namespace) -> None:
    document |= {"policy": options.policy, "duration_s": options.duration_s, "points": {}, "drives": []}
    for kind in options.traffic:
        with tempfile.TemporaryDirectory(prefix="prfaas-fidelity-") as name:
            _drive(document, options, kind, Path(name))


def _drive(document: dict[str, Any], options: argparse.Namespace, kind: Kind, directory: Path) -> None:
    planned = planned_of(document, kind, directory)
    problem = problem_of(planned)
    if kind == "conversations":
        sample = sample_of(kind)
        problem = problem_of_trace(problem, sample, range_tokens(planned)[0], sample.uncached_tokens())
    best = best_operation(problem)
    assert best.threshold_tokens is not None  # there are two clusters
    capacity_per_s, threshold = best.lambda_max, round(best.threshold_tokens)
    print(f"{kind}: capacity {capacity_per_s:.3f} requests/s, threshold {threshold} tokens", file=sys.stderr)
    document["points"][kind] = {"capacity_per_s": capacity_per_s, "threshold_tokens": threshold}
    path = write_deployment(
        directory,
        max_model_len=MAX_MODEL_LEN,
        chunk_tokens=CHUNK_TOKENS,
        bandwidth=document["bandwidth"],
        policy=options.policy,
        threshold_tokens=threshold,
        threshold_period_s=THRESHOLD_PERIOD_S[kind],
        profiles=profile_files(document["measured"]["profiles"], directory),
        model=MeasuredModel.of(document),
        **_to_plan(kind),
    )
    with running(path, directory) as stack:
        for number, load in enumerate(options.loads):
            per_s = load * capacity_per_s
            requests = requests_at(kind, per_s, options.duration_s, number)
            print(f"{kind} at {load:g}: {len(requests)} requests", file=sys.stderr)
            before_s = asyncio.run(probes(stack))
            found = asyncio.run(driven(stack, requests))
            document["drives"].append(
                {"traffic": kind, "number": number, "load": load, "per_s": per_s}
                | {"probes_s": before_s + asyncio.run(probes(stack))}
                | found
            )


def simulated(document: dict[str, Any], _options: argparse.Namespace) -> None:
    """Each drive again, with the profile at the speed that the machine had then."""
    with tempfile.TemporaryDirectory(prefix="prfaas-fidelity-") as name:
        plans = {kind: planned_of(document, kind, Path(name)) for kind in document["points"]}
        for each in document["drives"]:
            requests = requests_at(each["traffic"], each["per_s"], document["duration_s"], each["number"])
            each["pace"] = pace_of(each, plans[each["traffic"]])
            scenario = _scenario(document, each["traffic"], plans, each["pace"])
            each["simulated"] = columns_of(result_of(scenario, chunk_of(requests)))
        alone = [
            [place * APART_S, int(tokens), 1]
            for place, tokens in enumerate(document["measured"]["idle_ttft_s"])
            if int(tokens) > 1
        ]
        kind = next(iter(plans))
        scenario = replace(
            _scenario(document, kind, plans, 1.0),
            policy="static_threshold",
            params={"threshold_tokens": OFFLOADED_ABOVE},
            adapts=False,
        )
        ttft_s = columns_of(result_of(scenario, unshared(alone)))["ttft_s"]
        document["idle_simulated_s"] = {str(row[1]): each for row, each in zip(alone, ttft_s, strict=True)}


def pace_of(drive_: dict[str, Any], planned: PlannedDeployment) -> float:
    """How much longer single prefills took around the drive than when the profiles were measured."""
    profiled_s = np.mean([each.profile.prefill_s(PROBE_TOKENS) for each in planned.clusters])
    return float(np.median(drive_["probes_s"]) / profiled_s)


def _scenario(
    document: dict[str, Any], kind: Kind, plans: dict[Kind, PlannedDeployment], pace: float
) -> Scenario:
    """As driven."""
    measured = document["measured"]
    planned = slower(plans[kind], pace)
    caches = CacheOptions.of_memory(planned.kv_model, KV_CACHE_GIB * GIB)
    if caches.checkpoint_tokens is not None:
        # An engine keeps a state at the end of each chunk of a prefill.
        caches = replace(caches, checkpoint_tokens=CHUNK_TOKENS)
    return scenario_of(
        planned,
        policy=document["policy"],
        roles={HOME: 1},
        threshold_tokens=document["points"][kind]["threshold_tokens"],
        adapts=THRESHOLD_PERIOD_S[kind] < NEVER_S,
        allocation=False,
        control=ControlConfig(threshold_period_s=THRESHOLD_PERIOD_S[kind], allocation=False),
        caches=caches,
        overheads=Overheads(measured["request_s"], measured["hop_s"], first_step=True),
        chunk_tokens=CHUNK_TOKENS,
        kv_block_tokens=MeasuredModel.of(document).block_tokens,
    )


def unshared(rows: Sequence[Sequence[Any]]) -> RequestChunk:
    """Requests of a drive for the simulator, if no two prompts begin alike.

    `rows`: arrival (s), prompt and answer (tokens) of every request.
    """
    return RequestChunk(
        np.array([row[0] for row in rows], dtype=np.float64),
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        # So blocks would change nothing.
        np.arange(0),
        np.zeros(len(rows) + 1, dtype=np.int64),
        512,
    )


def result_of(scenario: Scenario, requests: RequestChunk) -> Result:
    """Requests of a drive in the simulator."""
    return simulate(scenario, [requests], seed=0, warmup_share=WARMUP_SHARE)


def columns_of(result: Result) -> dict[str, Any]:
    """What a comparison needs of every request; JSON-ready."""
    return {
        "ttft_s": [round(value, 5) for value in result.ttft_s.tolist()],
        "e2e_s": [round(value, 5) for value in result.e2e_s.tolist()],
        # What was given up on its way came from home.
        "offloaded": (result.offloaded.astype(bool) & (result.link_bytes > 0)).tolist(),
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


def planned_of(document: dict[str, Any], kind: Kind, directory: Path) -> PlannedDeployment:
    folder = directory / f"planned-{kind}"
    folder.mkdir(exist_ok=True)
    path = write_deployment(
        folder,
        max_model_len=MAX_MODEL_LEN,
        chunk_tokens=CHUNK_TOKENS,
        bandwidth=document["bandwidth"],
        policy="paper",
        profiles=profile_files(document["measured"]["profiles"], folder),
        model=MeasuredModel.of(document),
        to_run=False,
        **_to_plan(kind),
    )
    return load_planned(path)


def _to_plan(kind: Kind) -> dict[str, Any]:
    answer = (LOW_ANSWER + HIGH_ANSWER) / 2
    return {
        "workload": {"lengths": planned_lengths(kind), "output_tokens": answer},
        "step_limit_s": DECODE_STEP_LIMIT_S,
    }


def reported(document: dict[str, Any]) -> dict[str, Any]:
    """Errors of every drive."""
    found = []
    for each in document["drives"]:
        rows = each["requests"]
        arrivals = np.array([row[0] for row in rows])
        whole = np.array([row[6] is None for row in rows])
        counted = whole & (arrivals >= WARMUP_SHARE * arrivals[-1])
        first_s, last_s = (np.array([row[place] or np.nan for row in rows]) for place in (3, 4))
        offloaded = np.array([row[5] == "offload" for row in rows])
        made = each["simulated"]
        ttft_s, e2e_s = np.array(made["ttft_s"]), np.array(made["e2e_s"])
        found.append(
            {
                "traffic": each["traffic"],
                "load": each["load"],
                "requests": len(rows),
                "lost": int((~whole).sum()),
                "pace": each["pace"],
                "cpu": {name: used / each["lasted_s"] for name, used in each["cpu_s"].items()},
                "strangers": each["strangers_cpu_s"] / each["lasted_s"] / document["machine"]["cores"],
                "offloaded": float(offloaded.mean()),
                "ttft": errors_of(ttft_s[counted], (first_s - arrivals)[counted]),
                "e2e": errors_of(e2e_s[counted], (last_s - arrivals)[counted]),
                "throughput_error": float(last_s[whole].max() / (arrivals + e2e_s)[whole].max() - 1),
                "same_route": float((np.array(made["offloaded"]) == offloaded).mean()),
            }
        )
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
        "points": document["points"],
        "drives": found,
    }


def table_of_drives(found: dict[str, Any]) -> Table:
    table = Table(title="simulated minus real, of real")
    for column in ("traffic", "load", "requests", "machine", "TTFT mean", "P50", "P90", "real mean", "real P90",
                   "throughput", "same route"):  # fmt: skip
        table.add_column(column, justify="right")
    for each in found["drives"]:
        table.add_row(
            each["traffic"],
            f"{each['load']:g}",
            str(each["requests"]),
            f"{each['pace'] - 1:+.1%}",
            *(f"{each['ttft'][key]['error']:+.1%}" for key in ("mean", "p50", "p90")),
            f"{each['ttft']['mean']['real_s']:.3f} s",
            f"{each['ttft']['p90']['real_s']:.3f} s",
            f"{each['throughput_error']:+.1%}",
            f"{each['same_route']:.0%}",
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
    parser.add_argument("--traffic", choices=KINDS, nargs="+", default=list(KINDS), help="what is sent")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.8], help="of the capacity")
    parser.add_argument("--duration-s", type=float, default=180.0, help="of the arrivals at each load")
    parser.add_argument("--bandwidth", default="100 Mbit/s", help="of the link")
    parser.add_argument("--policy", default="paper")
    measured_model.add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="fewer points and repeats, to try it")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    if options.stage == "recorded":
        runs = [each for path in options.files for each in compared(path, limits_of(path))]
        print(json.dumps(runs, indent=2)) if options.json else console.print(table_of(runs))
        return 0
    problem = cpu_share.missing() if options.stage in ("profile", "drive", "all") else None
    if problem is not None:
        sys.exit(problem)
    path = options.files[0]
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    stages = {"profile": profile, "drive": drive, "simulate": simulated}
    for name, stage in stages.items():
        if options.stage in (name, "all"):
            try:
                stage(document, options)
            finally:
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
                f"{found['request_s'] * 1000:.1f} ms, second hop {found['hop_s'] * 1000:.1f} ms"
            )
            for kind, point in found["points"].items():
                print(
                    f"{kind}: capacity {point['capacity_per_s']:.3f} requests/s, "
                    f"threshold {point['threshold_tokens']:.0f} tokens"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
