"""The paper's claim put to the test: production-like traffic while the link falls below what the plan needs.

Real vLLM engines (PrfaaS prefill, PD prefill, PD decode) run in the laboratory of `bench/wan`, a stretch of Mooncake's
conversation trace comes at their speed, and the line falls in phases to half of what the plan needs, and wanders.
Each policy meets the same traffic and the same line. `report` gives the same requests, the line and the profile
measured on this machine to the simulator, and compares.

    sudo python bench/falsification.py run /tmp/falsification.json          # 30 minutes on two cores
    python bench/falsification.py report /tmp/falsification.json --json figures.json --plots docs/explanation/img

A phase is written name=share or name=share:deviation: the line's payload bandwidth in shares of what the plan sends at
this rate of requests, and the relative deviation of one that wanders.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

from rich.console import Console

import cpu_share
import measured_model
from falsification_live import CHUNK_TOKENS, THRESHOLD_PERIOD_S, measured, reconfigured, run_policy, running
from falsification_phases import PHASES, STATIC, LinkPhase, TraceSlice, pieces_of, telemetry_bits_per_s
from falsification_report import compared, plots_of, table_of, verdict_of
from fidelity import (
    DECODE_STEP_LIMIT_S,
    columns_of,
    pace_of,
    result_of,
    slower,
    unshared,
)
from fidelity_live import Depth, profile_files
from fidelity_stack import EAST
from machine_pace import metered, pace_between, paces_over, readings_in
from measured_model import MeasuredModel
from prfaas.core.deployment import ControlConfig, GatewayLimits, PlannedDeployment, Routing
from prfaas.core.deployment.load import load_planned
from prfaas.core.planner import best_operation, problem_of
from prfaas.core.units import parse_bits_per_s
from prfaas.core.workload.requests import TracedRequest, read_requests
from prfaas.lab.simulator.capacity import Slowdown, Steps
from prfaas.lab.simulator.scenario import Overheads, Scenario, scenario_of
from prfaas.serving.gateway.context import GatewayOptions
from wan.laboratory import ending_on_sigterm, missing
from wan.stack import FAR, HOME, LINK

TRACE = Path(__file__).parents[1] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"
DEFAULT = "default"
MEAN_TOKENS = 4_000
_BLOCK_BITS = 20
SEED = 1
QUICK = Depth(lengths=(512, 2048, 6144, 12288), batches=(1, 4), repeats=1)


def run(document: dict[str, Any], options: argparse.Namespace, path: Path) -> None:
    """Everything that needs engines. The file is written after each step, so that what was measured stays."""
    bandwidth_bits_per_s = parse_bits_per_s(options.bandwidth)
    with tempfile.TemporaryDirectory(prefix="prfaas-falsification-") as name:
        directory = options.keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        stand_ins = options.engines == "synthetic"
        model = MeasuredModel() if stand_ins else MeasuredModel.chosen(options)
        meter = directory / "machine-pace.txt"
        with (
            metered(meter),
            running(directory, bandwidth_bits_per_s, model, stand_ins=stand_ins) as stack,
        ):
            if "measured" not in document:
                began_s = time.monotonic()
                document["measured"] = measured(stack, QUICK if options.quick else Depth())
                document["work_readings"] = readings_in(meter, began_s, time.monotonic())
            document["engines"] = options.engines
            document["model"] = model.to_document()
            document["machine"] = {
                "cores": len(os.sched_getaffinity(0)),
                "load_average": os.getloadavg()[0],
            }
            document["deployment"] = json.loads(stack.wan.deployment.path.read_text())
            plan(document, options, directory)
            path.write_text(json.dumps(document) + "\n")
            pieces = [(at_s, bits_per_s) for at_s, bits_per_s in document["pieces"]]
            profiles = _profiles(document, directory)
            for policy in options.policies:
                if policy in document["drives"]:
                    continue
                requests = requests_of(document, policy)
                print(f"{policy}: {len(requests)} requests", file=sys.stderr)
                routing = {"policy": policy, "threshold_tokens": round(document["threshold_tokens"])}
                sections = document["planning"] | {"routing": routing}
                own = reconfigured(document["deployment"], sections, profiles)
                began_s = time.monotonic()
                document["drives"][policy] = run_policy(stack, own, pieces, requests)
                document["drives"][policy]["work_readings"] = readings_in(meter, began_s, time.monotonic())
                document["drives"][policy]["load_average"] = os.getloadavg()[0]
                path.write_text(json.dumps(document) + "\n")


def plan(document: dict[str, Any], options: argparse.Namespace, directory: Path) -> None:
    """Rate, threshold and need by the planner from the measured profiles; the line over time."""
    settings = {
        "engines": options.engines,
        "model": MeasuredModel.of(document).to_document(),
        "load": options.load,
        "bandwidth": options.bandwidth,
        "start_s": options.start,
        "phase_s": options.seconds,
        "phases": [asdict(each) for each in options.phases],
        "mean_tokens": options.mean_tokens,
    }
    # A run that was broken off goes on; one with other settings begins anew.
    drives = document.get("drives", {}) if document.get("settings") == settings else {}
    lasts_s = options.seconds * len(options.phases)
    traffic = {"start_s": options.start, "lasts_s": lasts_s, "mean_tokens": options.mean_tokens, "seed": SEED}
    cut = TraceSlice.of(read_requests(TRACE), **traffic)
    document["planning"] = {
        "workload": {
            "lengths": {"distribution": "empirical", "lengths": cut.input_tokens.tolist()},
            "output_tokens": float(cut.output_tokens.mean()),
        },
        "slo": {"tpot_s": DECODE_STEP_LIMIT_S},
    }
    planned = planned_of(document, directory)
    best = best_operation(problem_of(planned))
    per_s = options.load * best.lambda_max
    needed = options.load * best.egress_bits_per_s
    most = planned.links[0].bandwidth_bits_per_s
    document |= {
        "load": options.load,
        "capacity_per_s": best.lambda_max,
        "per_s": per_s,
        "needed_bits_per_s": needed,
        "bandwidth_bits_per_s": most,
        "threshold_tokens": scenario_of(planned, roles={HOME: 1}).threshold_tokens[HOME],
        "traffic": traffic,
        "count": min(round(per_s * lasts_s), len(cut.arrival_s)),
        "settings": settings,
        "phase_s": options.seconds,
        "phases": settings["phases"],
        "pieces": pieces_of(options.phases, needed, most, options.seconds, SEED),
        "drives": drives,
    }
    print(
        f"capacity {best.lambda_max:.3f} requests/s, sent {per_s:.3f}; threshold "
        f"{document['threshold_tokens']:.0f} tokens; the plan needs {needed / 1e6:.1f} Mbit/s",
        file=sys.stderr,
    )


def requests_of(document: dict[str, Any], policy: str) -> list[TracedRequest]:
    """The traffic of a drive. Other policies meet the same lengths at the same times, and other tokens: engines still
    have the prompts of the drives before in their prefix caches."""
    cut = TraceSlice.of(read_requests(TRACE), **document["traffic"])
    return cut.thinned(document["count"], first_block=crc32(policy.encode()) << _BLOCK_BITS)


def planned_of(document: dict[str, Any], directory: Path) -> PlannedDeployment:
    """What planner and simulator read of the deployment that ran."""
    folder = directory / "planned"
    folder.mkdir(exist_ok=True)
    config = MeasuredModel.of(document).write(folder / "model", with_weights=False)
    model = document["deployment"]["model"] | {"path": str(config)}
    sections = document["planning"] | {"model": model}
    own = reconfigured(document["deployment"], sections, _profiles(document, folder))
    path = folder / "wan.yaml"
    path.write_text(json.dumps(own))
    return load_planned(path)


def _profiles(document: dict[str, Any], directory: Path) -> dict[str, Path]:
    files = profile_files(document["measured"]["profiles"], directory)
    return {FAR if name == EAST else HOME: path for name, path in files.items()}


def simulate_drives(document: dict[str, Any]) -> None:
    """Each drive again: the same requests over the same line, prefills at the speed that the machine had then.

    The meter says it from second to second. Where a file has no readings, probes around the drive say it. Stand-ins
    don't compute.
    """
    are_real = document["settings"]["engines"] == "vllm"
    with tempfile.TemporaryDirectory(prefix="prfaas-falsification-") as name:
        planned = planned_of(document, Path(name))
    for policy, drive in document["drives"].items():
        readings = document.get("work_readings", ()), drive.get("work_readings", ())
        metered_pace = pace_between(*readings) if are_real else None
        drive["pace"] = metered_pace or pace_of(drive, planned)
        if metered_pace is not None and "began_s" in drive:
            slowdown = Slowdown(paces_over(*readings, drive["began_s"]))
            own = scenario(document, planned, policy, slowdown)
        else:
            own = scenario(document, slower(planned, drive["pace"]), policy)
        result = result_of(own, unshared(drive["requests"]))
        series = result.series
        drive["simulated"] = columns_of(result) | {
            "link_bytes": result.link_bytes.tolist(),
            "series": [
                [round(at_s, 2), tokens if tokens < 1e9 else None]
                for at_s, tokens in zip(
                    series["time_s"].tolist(), series[f"threshold_tokens_{HOME}"].tolist(), strict=True
                )
            ],
        }


def scenario(
    document: dict[str, Any], planned: PlannedDeployment, policy: str, slowdown: Slowdown | None = None
) -> Scenario:
    """The deployment with the line as it was, less the telemetry on it, under a policy."""
    overheads, are_real = document["measured"], document["settings"]["engines"] == "vllm"
    beside = telemetry_bits_per_s(document["drives"][policy]["carried"])
    return scenario_of(
        planned,
        policy=policy,
        roles={HOME: 1},
        threshold_tokens=document["threshold_tokens"],
        adapts=policy != STATIC,
        allocation=False,
        control=ControlConfig(threshold_period_s=THRESHOLD_PERIOD_S, allocation=False),
        links={LINK: Steps(tuple((at_s, max(bits - beside, 0.0)) for at_s, bits in document["pieces"]))},
        overheads=Overheads(overheads["request_s"], overheads["hop_s"], first_step=True),
        transfer_grace_s=GatewayOptions().transfer_grace_s,
        queue_limit_s=GatewayLimits().queue_s,
        # A stand-in computes one prompt at a time, and answers go on meanwhile; the steps of real engines are filled up
        # by the next one, and have a token of each answer.
        mixed_tokens=None if are_real else 0,
        chunk_tokens=CHUNK_TOKENS if are_real else 0,
        kv_block_tokens=MeasuredModel.of(document).block_tokens,
        slowdown=slowdown,
    )


def report(document: dict[str, Any], options: argparse.Namespace) -> None:
    simulate_drives(document)
    with tempfile.TemporaryDirectory(prefix="prfaas-falsification-") as name:
        found = compared(document, problem_of(planned_of(document, Path(name))))
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    console.print(table_of(found))
    for line in verdict_of(found, document):
        console.print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, svg in plots_of(found, document).items():
            (options.plots / f"{name}.svg").write_text(svg)


def default_policy() -> str:
    """What a deployment file without `routing.policy` gets."""
    return str(Routing().policy)


def _policies(text: str) -> list[str]:
    names = [default_policy() if name == DEFAULT else name for name in text.split(",")]
    return list(dict.fromkeys(names))


def _phases(text: str) -> Sequence[LinkPhase]:
    try:
        return [LinkPhase.parse(each) for each in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["run", "report"])
    parser.add_argument("file", type=Path, metavar="FILE", help="of measurements")
    parser.add_argument(
        "--policies",
        type=_policies,
        default=_policies(f"paper,{DEFAULT},{STATIC}"),
        help='by name, with commas; "default": what a deployment file without one gets',
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="of each phase")
    parser.add_argument("--phases", type=_phases, default=PHASES, help="with commas; see above")
    parser.add_argument("--load", type=float, default=0.5, help="of the planner's capacity with --bandwidth")
    parser.add_argument("--bandwidth", default="60 Mbit/s", help="of the link in the deployment file")
    parser.add_argument("--mean-tokens", type=int, default=MEAN_TOKENS, help="of a prompt")
    measured_model.add_arguments(parser)
    parser.add_argument("--start", type=float, default=600.0, help="of the slice, in the trace's seconds")
    parser.add_argument(
        "--quick", action="store_true", help="fewer points and repeats of the profile, to try it"
    )
    parser.add_argument(
        "--engines",
        choices=["vllm", "synthetic"],
        default="vllm",
        help="synthetic: stand-ins that wait in place of computing, for machines with other work",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep deployment file and logs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the compared figures there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the plots (SVG) there")
    options = parser.parse_args()
    document: dict[str, Any] = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.stage == "run":
        problem = missing() or (cpu_share.missing() if options.engines == "vllm" else None)
        if problem is not None:
            sys.exit(problem)
        with ending_on_sigterm():
            run(document, options, options.file)
    if not document.get("drives"):
        sys.exit(f"{options.file} has no drive; measure some with: falsification.py run {options.file}")
    report(document, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
