"""A deployment of 26 stand-in engines under a replayed burst: does its scheduler do what the planner would?

    python bench/burst.py [--json FILE] [--scenario link|mix] [--speedup X] [--load X]

`prfaas up` runs in a process of its own (engines in others), and this one replays the Mooncake slice of
examples/traces against it, faster than recorded and over and over. Two scenarios, each on a fresh start:
(link) roles are fixed, and a link loses most of its bandwidth for a while; (mix) answers get longer.
It prints thresholds, roles and lost requests of each phase, beside what the planner finds best for the uncached
lengths that the gateway saw in it. Ends with 1 if a request was lost, the threshold didn't move and come back, or
the roles are more than one instance off the optimum. Takes about 14 minutes.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from rich.console import Console
from rich.progress import Progress

from burst_deployment import derived, problem_of, running
from burst_report import (
    Found,
    Phase,
    Sample,
    Verdict,
    judged,
    none_lost,
    phases_table,
    role_verdicts,
    threshold_verdicts,
)
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.deployment.peers import engine_share_bits_per_s
from prfaas.core.planner import best_operation
from prfaas.core.units import format_s
from prfaas.core.workload.requests import RequestTrace, TracedRequest, read_requests
from prfaas.core.workload.traffic import ReplayedTraffic
from prfaas.tools.replay import ReplayedRequest, ReplayOptions, find_target, replay

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TRACE = EXAMPLES / "traces" / "mooncake_burst.jsonl.gz"
# The trace's longest prompt is 126,195 tokens, the deployment's context 40,960.
INPUT_FACTOR = 0.3
JITTER_S = 3.0
# Answers token by token cost three processes time for every few tokens; one of so many shows the times.
STREAMED_EACH = 4
WATCH_S = 0.5
# Ids of a phase's blocks are so far from those of the phase before: nothing is cached when it begins.
PHASE_IDS = 1 << 40


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
            async with self._session.get(f"{self._deployment.gateway.admin.url}/prfaas/state") as response:
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


async def set_link(
    session: aiohttp.ClientSession, deployment: Deployment, link_name: str, factor: float
) -> None:
    """Gives every sender of a link its share of a part of the link's bandwidth, or all that it is told it may use."""
    link = next(each for each in deployment.links if each.name == link_name)
    most = link.bandwidth_bits_per_s if factor == 1 else engine_share_bits_per_s(deployment, link) * factor
    body = {"link": link.name, "bits_per_s": most}
    for instance in deployment.cluster(link.source).instances:
        async with session.post(f"{instance.url}/synthetic/link", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{instance.name} answers POST /synthetic/link with {response.status}")


async def set_links(
    session: aiohttp.ClientSession,
    deployment: Deployment,
    link_name: str,
    phases: Sequence[Phase],
    started_s: float,
) -> None:
    """Gives the link its bandwidth at the beginning of each phase where that changes."""
    factor, start_s = 1.0, 0.0
    for phase in phases:
        if phase.link_factor != factor:
            await asyncio.sleep(max(started_s + start_s - asyncio.get_running_loop().time(), 0))
            factor = phase.link_factor
            await set_link(session, deployment, link_name, factor)
        start_s += phase.duration_s


async def phases_of(
    deployment: Deployment, phases: Sequence[Phase], per_s: float, link_name: str
) -> tuple[list[Found], list[dict[str, Any]], float]:
    """What was found in each phase, the conversions, and how late the latest request was sent."""
    requests = list(requests_of(read_requests(TRACE), phases, per_s))
    streamed = [each for place, each in enumerate(requests) if place % STREAMED_EACH == 0]
    whole = [each for place, each in enumerate(requests) if place % STREAMED_EACH]
    async with aiohttp.ClientSession() as session:
        target = await find_target(session, deployment.gateway.url)
        if any(phase.link_factor != 1 for phase in phases):
            # Better now than in a minute.
            await set_link(session, deployment, link_name, 1.0)
        watch = Watch(session, deployment)
        started_s = asyncio.get_running_loop().time()
        beside = [
            asyncio.create_task(watch.run(started_s)),
            asyncio.create_task(set_links(session, deployment, link_name, phases, started_s)),
        ]
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(f"{len(requests)} requests", total=len(requests))

            def ended(_record: ReplayedRequest) -> None:
                progress.advance(task)

            results = await asyncio.gather(
                replay(target, [request for _, request in streamed], ReplayOptions(), ended),
                replay(target, [request for _, request in whole], ReplayOptions(stream=False), ended),
            )
        for other in beside:
            other.cancel()
        for outcome in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    by_phase: list[list[ReplayedRequest]] = [[] for _ in phases]
    for sent, result in zip((streamed, whole), results, strict=True):
        for (number, _), record in zip(sent, result.records, strict=True):
            by_phase[number].append(record)
    found, start_s = [], 0.0
    for phase, records in zip(phases, by_phase, strict=True):
        # The last phase's end state is that after its last answer.
        end_s = math.inf if phase is phases[-1] else start_s + phase.duration_s
        samples = [each for each in watch.samples if start_s <= each.at_s < end_s]
        found.append(judged(deployment, phase, link_name, records, samples))
        start_s = end_s
    return found, watch.conversions, max(result.max_behind_s for result in results)


def scenario(
    title: str, phases: Sequence[Phase], options: argparse.Namespace, *, allocation: bool
) -> tuple[list[Found], dict[str, Any]]:
    """Starts the deployment, sends the phases' traffic, prints what was found, and gives it as JSON too."""
    with tempfile.TemporaryDirectory(prefix="prfaas-burst-") as name:
        directory = Path(name)
        path = derived(
            options.deployment, directory, options.speedup, options.first_port, allocation=allocation
        )
        with running(path, directory):
            deployment = load_deployment(path, state_dir=directory / "home")
            recorded = read_requests(TRACE)
            lengths = recorded.uncached.scaled(INPUT_FACTOR)
            carried_per_s = best_operation(
                problem_of(deployment, lengths, recorded.mean_output_tokens, {})
            ).lambda_max
            per_s = options.load * carried_per_s
            print(
                f"{title}: {len(deployment.instances)} engines, which can carry {carried_per_s:.1f} requests/s "
                f"as the planner says; {per_s:.1f} are sent for {sum(phase.duration_s for phase in phases):g} s",
                file=sys.stderr,
            )
            found, conversions, behind_s = uvloop.run(phases_of(deployment, phases, per_s, options.link))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(phases_table(title, found, options.link))
    for each in conversions:
        console.print(f"{each['instance']}: {each['from_role']} -> {each['to_role']} ({each['reason']})")
    for phase in found:
        for reason, count in phase.errors.most_common(5):
            console.print(f"{phase.phase.name}: {count} x {reason}")
    console.print(
        f"requests were sent up to {format_s(behind_s)} late; {os.cpu_count()} cores had "
        f"{os.getloadavg()[1]:.1f} processes to run in the last 5 minutes\n"
    )
    return found, {
        "engines": len(deployment.instances),
        "per_s": per_s,
        "phases": [phase.to_json() for phase in found],
        "conversions": conversions,
        "behind_s": behind_s,
        "load_average": os.getloadavg()[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployment", type=Path, default=EXAMPLES / "synthetic.yaml")
    parser.add_argument("--scenario", choices=["link", "mix"], help="only this one")
    parser.add_argument("--speedup", type=float, default=1.0, help="of the engines; the file's own is 4")
    parser.add_argument(
        "--load", type=float, default=0.45, help="of what the planner says it can carry as recorded"
    )
    parser.add_argument("--link", default="east->tokyo", help="which gets slow")
    parser.add_argument("--link-factor", type=float, default=0.03, help="what the slow link keeps")
    parser.add_argument("--output-factor", type=float, default=2.0, help="of the longer answers")
    parser.add_argument("--settle-s", type=float, default=60.0, help="before anything changes")
    parser.add_argument("--slow-s", type=float, default=60.0, help="with a slow link")
    parser.add_argument("--recover-s", type=float, default=150.0, help="with the link as before")
    parser.add_argument("--shift-s", type=float, default=480.0, help="with longer answers")
    parser.add_argument("--first-port", type=int, default=27000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    recorded = Phase("as recorded", options.settle_s)
    documents = {}
    checks: list[Verdict] = []
    if options.scenario != "mix":
        phases = (
            recorded,
            Phase("link slow", options.slow_s, link_factor=options.link_factor),
            Phase("link as before", options.recover_s),
        )
        found, documents["link"] = scenario("a link gets slow", phases, options, allocation=False)
        target = options.link.partition("->")[2]
        checks += [none_lost(found), *threshold_verdicts(found, target)]
    if options.scenario != "link":
        longer = Phase(
            f"answers x {options.output_factor:g}", options.shift_s, output_factor=options.output_factor
        )
        found, documents["mix"] = scenario("answers get longer", (recorded, longer), options, allocation=True)
        checks += [none_lost(found), *role_verdicts(found)]
    for good, sentence in checks:
        print(f"{'yes' if good else 'NO '}  {sentence}")
    if options.json is not None:
        verdicts = [{"good": good, "text": sentence} for good, sentence in checks]
        options.json.write_text(json.dumps({**documents, "verdicts": verdicts}, indent=2) + "\n")
    return 0 if all(good for good, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
