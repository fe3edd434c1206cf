"""A deployment of 26 stand-in engines under a replayed burst: does its scheduler do what the planner would?

    python bench/burst.py [--json FILE] [--deployment FILE] [--speedup X] [--load X]

`prfaas up` runs in a process of its own (engines in others), and this one replays the Mooncake slice of
examples/traces against it, faster than recorded and over and over. Meanwhile it (a) lowers the bandwidth of a link
and gives it back, (b) makes answers longer. It prints thresholds, roles and lost requests of each phase, beside the
roles that the planner finds best for the lengths that the gateway saw in that phase. Ends with 1 if a request
was lost, the threshold didn't move and come back, or the roles are more than one instance off the optimum.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.control.facts import decode_slots
from prfaas.deployment import Deployment, load_deployment
from prfaas.kvmodel import model_from_directory
from prfaas.planner import KvSize, PlanProblem, best_operation
from prfaas.planner.fixed_roles import rate_with_roles
from prfaas.replay import ReplayOptions, ReplayResult, RequestRecord, find_target, replay
from prfaas.replay.result import Percentiles
from prfaas.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.scheduling.service_curve import ServiceCurve
from prfaas.units import format_bits_per_s, format_s, parse_bits_per_s
from prfaas.workload import Empirical, RequestTrace, TracedRequest, read_requests, read_trace
from prfaas.workload.traffic import ReplayedTraffic

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TRACE = EXAMPLES / "traces" / "mooncake_burst.jsonl.gz"
# The trace's longest prompt is 126,195 tokens, the deployment's context 40,960.
INPUT_FACTOR = 0.3
JITTER_S = 3.0
# Answers token by token cost three processes time for every few tokens; one of so many shows the times.
STREAMED_EACH = 4
READY_S = 120.0
WATCH_S = 0.5
# Ids of a phase's blocks are so far from those of the phase before: nothing is cached when it begins.
PHASE_IDS = 1 << 40


@dataclass(frozen=True)
class Phase:
    """So many seconds of traffic whose answers are `output_factor` times as long as recorded, with the chosen
    link at `link_factor` of its bandwidth."""

    name: str
    duration_s: float
    output_factor: float = 1.0
    link_factor: float = 1.0


@dataclass(frozen=True)
class Sample:
    """What the gateway said of itself. Thresholds by PD cluster in tokens (None: never offload), prefill
    instances by PD cluster, capacities by link."""

    at_s: float
    thresholds: dict[str, float | None]
    prefill: dict[str, int]
    capacity_bits_per_s: dict[str, float]


@dataclass
class Found:
    """One phase, when all its answers have come."""

    phase: Phase
    records: list[RequestRecord]
    samples: list[Sample]
    problem: PlanProblem
    optimum: dict[str, int]
    optimum_rate: float
    rate_with_roles: float
    notes: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return sum(record.is_lost for record in self.records)

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    def to_json(self) -> dict[str, Any]:
        ttft = Percentiles.of(record.ttft_s for record in self.records if not record.is_lost)
        return {
            "phase": self.phase.name,
            "requests": len(self.records),
            "lost": self.lost,
            "offloaded": self.offloaded,
            "ttft_s": ttft and ttft.to_json(),
            "thresholds": {
                "first": self.samples[0].thresholds,
                "last": self.last.thresholds,
                "all": [(round(sample.at_s, 1), sample.thresholds) for sample in changes(self.samples)],
            },
            "prefill_instances": {"first": self.samples[0].prefill, "last": self.last.prefill},
            "optimum": self.optimum,
            "optimum_per_s": self.optimum_rate,
            "with_these_roles_per_s": self.rate_with_roles,
            "capacity_bits_per_s": self.last.capacity_bits_per_s,
        }

    @property
    def offloaded(self) -> float:
        return sum(record.route == "offload" for record in self.records) / max(len(self.records), 1)


def derived(path: Path, directory: Path, speedup: float, first_port: int) -> Path:
    """The deployment at another speed, links and SLO in proportion, and with ports of its own."""
    document = yaml.safe_load(path.read_text())
    slower = speedup / document["clusters"][0]["speedup"]
    ports = iter(range(first_port, first_port + 1000))
    for cluster in document["clusters"]:
        cluster["speedup"] *= slower
        for instance in cluster["instances"]:
            instance |= {"http_port": next(ports), "kv_port": next(ports)}
    for link in document["links"]:
        link["bandwidth"] = parse_bits_per_s(link["bandwidth"]) * slower
    document["slo"]["tokens_per_s"] *= slower
    document["gateway"]["port"] = next(ports)
    derived_path = directory / f"{path.stem}-burst.yaml"
    derived_path.write_text(yaml.safe_dump(document, sort_keys=False))
    return derived_path


@contextlib.contextmanager
def running(path: Path, directory: Path) -> Iterator[Path]:
    """The deployment as `prfaas up` runs it, ready; gives the file that its messages go to."""
    log_path = directory / "up.log"
    with log_path.open("w") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "prfaas.cli.main", "up", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PRFAAS_HOME": str(directory / "home")},
        )
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            if not line.startswith("ready:"):
                raise SystemExit(f"the deployment did not start:\n{log_path.read_text()[-2000:]}")
            yield log_path
        finally:
            up.terminate()
            up.wait(60)


def problem_of(deployment: Deployment, lengths: Empirical, output_tokens: float) -> PlanProblem:
    """What the planner is asked: the file's profiles and links, and these uncached lengths and answers."""
    clusters = []
    for cluster in deployment.clusters:
        assert cluster.profile is not None
        curve = ServiceCurve.of_profile(cluster.profile, cluster.speedup)
        if cluster.kind == "prfaas":
            clusters.append(ClusterFacts(cluster.name, cluster.kind, len(cluster.instances), curve))
        else:
            batch = decode_slots(deployment, cluster)
            step_s = cluster.profile.decode_step_s(batch) / cluster.speedup
            clusters.append(
                ClusterFacts(cluster.name, cluster.kind, len(cluster.instances), curve, batch, step_s)
            )
    links = [LinkFacts(link.source, link.target, link.bandwidth_bits_per_s) for link in deployment.links]
    model = model_from_directory(deployment.model.path, name=deployment.model.served_name)
    return problem_now(clusters, links, lengths, output_tokens, KvSize(model))


def requests_of(
    trace: RequestTrace, phases: Sequence[Phase], per_s: float
) -> Iterator[tuple[int, TracedRequest]]:
    """All phases' requests one after the other, each with the number of its phase."""
    rng = np.random.default_rng(0)
    start_s = 0.0
    for number, phase in enumerate(phases):
        recorded = ReplayedTraffic(trace, jitter_s=JITTER_S, rounds=None)
        traffic = ReplayedTraffic(
            trace,
            speed=per_s / recorded.mean_per_s,
            jitter_s=JITTER_S,
            rounds=None,
            input_factor=INPUT_FACTOR,
            output_factor=phase.output_factor,
        )
        for request in (each for chunk in traffic.chunks(rng) for each in chunk.requests()):
            if request.arrival_s >= phase.duration_s:
                break
            blocks = tuple(block + number * PHASE_IDS for block in request.block_ids)
            yield (
                number,
                TracedRequest(
                    start_s + request.arrival_s,
                    request.input_tokens,
                    request.output_tokens,
                    blocks,
                    request.block_tokens,
                ),
            )
        start_s += phase.duration_s


class Watch:
    """Asks the gateway for its state twice a second."""

    def __init__(self, session: aiohttp.ClientSession, deployment: Deployment) -> None:
        self._session = session
        self._deployment = deployment
        self.samples: list[Sample] = []
        self.conversions: list[dict[str, Any]] = []

    async def run(self, started_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._session.get(f"{self._deployment.gateway.url}/prfaas/state") as response:
                state = await response.json()
            self.conversions = state["roles"]["conversions"]
            pd = [cluster.name for cluster in self._deployment.pd_clusters]
            clusters = state["clusters"]
            self.samples.append(
                Sample(
                    loop.time() - started_s,
                    {name: clusters[name]["threshold_tokens"] for name in pd},
                    {
                        name: sum("prefill" in each["role"] for each in clusters[name]["instances"].values())
                        for name in pd
                    },
                    {name: link["capacity_bits_per_s"] for name, link in state["links"].items()},
                )
            )
            await asyncio.sleep(WATCH_S)


async def set_links(
    session: aiohttp.ClientSession,
    deployment: Deployment,
    link_name: str,
    phases: Sequence[Phase],
    started_s: float,
) -> None:
    """Gives the link its bandwidth at the beginning of each phase where that changes."""
    loop = asyncio.get_running_loop()
    link = next(each for each in deployment.links if each.name == link_name)
    senders = deployment.cluster(link.source).instances
    share = deployment.share_bits_per_s(link)
    factor, start_s = 1.0, 0.0
    for phase in phases:
        if phase.link_factor != factor:
            await asyncio.sleep(started_s + start_s - loop.time())
            factor = phase.link_factor
            for instance in senders:
                body = {"link": link.name, "bits_per_s": share * factor}
                async with session.post(f"{instance.url}/synthetic/link", json=body) as response:
                    response.raise_for_status()
        start_s += phase.duration_s


async def run_phases(
    deployment: Deployment, trace: RequestTrace, phases: Sequence[Phase], per_s: float, link_name: str
) -> tuple[list[Found], list[dict[str, Any]], list[ReplayResult]]:
    async with aiohttp.ClientSession() as session:
        target = await find_target(session, deployment.gateway.url)
        requests = list(requests_of(trace, phases, per_s))
        watch = Watch(session, deployment)
        started_s = asyncio.get_running_loop().time()
        beside = [
            asyncio.create_task(watch.run(started_s)),
            asyncio.create_task(set_links(session, deployment, link_name, phases, started_s)),
        ]
        streamed = [each for place, each in enumerate(requests) if place % STREAMED_EACH == 0]
        whole = [each for place, each in enumerate(requests) if place % STREAMED_EACH]
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(f"{len(requests)} requests", total=len(requests))

            def ended(_record: RequestRecord) -> None:
                progress.advance(task)

            results = await asyncio.gather(
                replay(target, [request for _, request in streamed], ReplayOptions(), ended),
                replay(target, [request for _, request in whole], ReplayOptions(stream=False), ended),
            )
        for other in beside:
            other.cancel()
        ended_well = await asyncio.gather(*beside, return_exceptions=True)
        for outcome in ended_well:
            if isinstance(outcome, Exception):
                raise outcome
    by_phase: list[list[RequestRecord]] = [[] for _ in phases]
    for sent, result in zip((streamed, whole), results, strict=True):
        for (number, _), record in zip(sent, result.records, strict=True):
            by_phase[number].append(record)
    found, start_s = [], 0.0
    for phase, records in zip(phases, by_phase, strict=True):
        end_s = start_s + phase.duration_s
        is_last = phase is phases[-1]
        samples = [
            each for each in watch.samples if start_s <= each.at_s < end_s or (is_last and each.at_s >= end_s)
        ]
        found.append(judged(deployment, phase, records, samples))
        start_s = end_s
    return found, watch.conversions, list(results)


def judged(
    deployment: Deployment, phase: Phase, records: list[RequestRecord], samples: list[Sample]
) -> Found:
    uncached = [
        int(record.route_fields["uncached"]) for record in records if "uncached" in record.route_fields
    ]
    answers = [record.answered_tokens for record in records if record.answered_tokens]
    problem = problem_of(
        deployment, Empirical([max(each, 1) for each in uncached]), sum(answers) / len(answers)
    )
    best = best_operation(problem)
    # At least one instance of each role, as the scheduler keeps it.
    optimum = {
        roles.cluster: min(max(roles.prefill, 1), len(deployment.cluster(roles.cluster).instances) - 1)
        for roles in best.roles
    }
    rate = rate_with_roles(problem, samples[-1].prefill)
    return Found(phase, records, samples, problem, optimum, rate_with_roles(problem, optimum), rate)


def changes(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample, and those whose thresholds differ from the one before."""
    return [
        sample
        for place, sample in enumerate(samples)
        if place == 0 or sample.thresholds != samples[place - 1].thresholds
    ]


def verdicts(found: Sequence[Found], cluster: str) -> list[tuple[bool, str]]:
    """What the issue asks for, and whether it is so."""
    settled, dropped, recovered, shifted = found
    lost = sum(each.lost for each in found)
    before, after = (each.last.thresholds[cluster] or math.inf for each in (settled, recovered))
    during = max(sample.thresholds[cluster] or math.inf for sample in dropped.samples)
    roles = {name: (shifted.samples[0].prefill[name], shifted.last.prefill[name]) for name in shifted.optimum}
    off = {name: abs(last - shifted.optimum[name]) for name, (_, last) in roles.items()}
    moved = ", ".join(f"{name} {first} -> {last}" for name, (first, last) in roles.items())
    best = ", ".join(f"{name} {count}" for name, count in shifted.optimum.items())
    return [
        (lost == 0, f"{lost} requests lost"),
        (
            during > before * 1.1,
            f"threshold of {cluster} went from {shown(before)} to {shown(during)} tokens when the link got slow",
        ),
        (abs(after / before - 1) < 0.25, f"and came back to {shown(after)}"),
        (
            any(first != last for first, last in roles.values()),
            f"prefill instances when answers got longer: {moved}",
        ),
        (
            max(off.values()) <= 1,
            f"the planner's optimum for that mix: {best} ({shifted.optimum_rate:.1f} requests/s, "
            f"with these roles {shifted.rate_with_roles:.1f})",
        ),
    ]


def shown(tokens: float | None) -> str:
    return "never" if tokens is None or math.isinf(tokens) else f"{tokens:.0f}"


def phases_table(found: Sequence[Found], link_name: str) -> Table:
    clusters = list(found[0].optimum)
    table = Table(title="phases", title_justify="left")
    for name in ("phase", "requests", "lost", "offloaded", "TTFT P50", "P90", link_name):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for cluster in clusters:
        table.add_column(f"t {cluster}", justify="right")
    for name in ("prefill", "best", "rate", "best rate"):
        table.add_column(name, justify="right")
    for each in found:
        ttft = Percentiles.of(record.ttft_s for record in each.records if not record.is_lost)
        table.add_row(
            each.phase.name,
            str(len(each.records)),
            str(each.lost),
            f"{each.offloaded:.0%}",
            *((format_s(ttft.p50), format_s(ttft.p90)) if ttft else ("-", "-")),
            format_bits_per_s(each.last.capacity_bits_per_s[link_name]),
            *(shown(each.last.thresholds[cluster]) for cluster in clusters),
            " + ".join(str(each.last.prefill[cluster]) for cluster in clusters),
            " + ".join(str(each.optimum[cluster]) for cluster in clusters),
            f"{each.rate_with_roles:.1f}",
            f"{each.optimum_rate:.1f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployment", type=Path, default=EXAMPLES / "synthetic.yaml")
    parser.add_argument("--speedup", type=float, default=2.0, help="of the engines; the file's own is 4")
    parser.add_argument(
        "--load", type=float, default=0.45, help="of what the planner says it can carry at first"
    )
    parser.add_argument("--link", default="east->tokyo")
    parser.add_argument("--link-factor", type=float, default=0.03, help="what the slow link keeps")
    parser.add_argument("--output-factor", type=float, default=2.0, help="of answers in the last phase")
    parser.add_argument("--seconds", type=float, nargs=4, default=[60, 60, 120, 270], help="of the phases")
    parser.add_argument("--first-port", type=int, default=27000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    settle_s, drop_s, recover_s, shift_s = options.seconds
    phases = (
        Phase("as recorded", settle_s),
        Phase("link slow", drop_s, link_factor=options.link_factor),
        Phase("link as before", recover_s),
        Phase(f"answers x {options.output_factor:g}", shift_s, output_factor=options.output_factor),
    )
    with tempfile.TemporaryDirectory(prefix="prfaas-burst-") as name:
        directory = Path(name)
        path = derived(options.deployment, directory, options.speedup, options.first_port)
        with running(path, directory):
            deployment = load_deployment(path, state_dir=directory / "home")
            recorded = read_trace(TRACE)
            assert recorded.uncached is not None
            start = problem_of(deployment, recorded.uncached.scaled(INPUT_FACTOR), recorded.output_tokens)
            carried_per_s = best_operation(start).lambda_max
            per_s = options.load * carried_per_s
            print(
                f"{len(deployment.instances)} engines; the planner says {carried_per_s:.1f} requests/s, "
                f"{per_s:.1f} are sent, for {sum(options.seconds):.0f} s",
                file=sys.stderr,
            )
            trace = read_requests(TRACE)
            found, conversions, results = uvloop.run(
                run_phases(deployment, trace, phases, per_s, options.link)
            )
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(phases_table(found, options.link))
    for conversion in conversions:
        console.print(conversion)
    checks = verdicts(found, options.link.partition("->")[2])
    for good, sentence in checks:
        console.print(f"{'yes' if good else 'NO '}  {sentence}")
    behind = max(result.max_behind_s for result in results)
    console.print(f"requests were sent up to {format_s(behind)} late")
    if options.json is not None:
        document = {
            "engines": len(deployment.instances),
            "per_s": per_s,
            "phases": [each.to_json() for each in found],
            "conversions": conversions,
            "behind_s": behind,
            "verdicts": [{"good": good, "text": sentence} for good, sentence in checks],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(good for good, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
