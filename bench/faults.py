"""Seeded faults under load: does every request get its right answer, and does the gateway blame the right engine?

    python bench/faults.py [--faults N] [--seed N] [--only KIND] [--load PER_S] [--json FILE] [--keep-logs DIR]

Nine stand-in engines, each in a process of its own, behind one gateway process. Transport, gateway and control plane
are the real ones; an answer depends on every byte of the KVCache, and the right one is computed here beside.
Up to five faults go on at once: two at prefill engines, two at decode engines, one at the gateway.

kill          SIGKILL, and a start some time later
freeze        SIGSTOP for 1 to 60 s, then SIGCONT
incompatible  a restart with KV blocks of another size, and later one with the right size
garbage       bytes that are no request and no frame, to the HTTP and KV port or to the gateway
stall         streams and prefills stand still while every port answers, as when a GPU hangs
files         no file descriptors are left: of an engine, or of the gateway for idle connections
flood         250 connections to a KV port, each with a byte every 3 s
restart       the gateway ends (asked or killed) and starts again; its clients try once more

Ends with 1 if a token was wrong, a request had no answer (429 and 503 with Retry-After are answers), a frozen engine
was noticed too late, a healthy one was out of routing for longer than a probe period, or something is left over.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from faults_kinds import GATEWAY, KINDS, DoneFault, Fault, FaultMaker, Lane, plan
from faults_load import Answers, FaultLoad, SentRequest
from faults_stack import FaultStack, taken_ports
from faults_watch import (
    NOTICE_S,
    PROBE_S,
    Baseline,
    Notice,
    Watch,
    WronglyOut,
    left_processes,
    leftovers,
    notices,
    recoveries,
    tracebacks,
    wrongly_out,
)

WARM_S = 5.0
# Faults of engines that prefill, of engines that decode, and of the gateway, at the same time at most.
LANES: Sequence[Lane] = ("prefill", "prefill", "decode", "decode", "gateway")
# A target rests in between: what comes late still belongs to its fault.
REST_S = 1.0
HEALTHY_AGAIN_S = 15.0


@dataclass
class Run:
    """One run, judged."""

    requests: list[SentRequest]
    faults: list[DoneFault]
    notices: list[Notice]
    wrongly_out: list[WronglyOut]
    recoveries: list[float]
    left: list[str]
    quiet_s: float
    tracebacks: list[str]
    seconds: float

    def count(self, outcome: str) -> int:
        return sum(request.outcome == outcome for request in self.requests)

    def verdicts(self) -> list[tuple[bool, str]]:
        total = len(self.requests)
        late = [each for each in self.notices if each.after_s > NOTICE_S]
        broken = [done for done in self.faults if done.problem]
        noticed = [each.after_s for each in self.notices]
        longest = f", the latest after {_seconds(max(noticed))}" if noticed else ""
        return [
            (not self.count("wrong"), f"{self.count('wrong')} of {total} answers have wrong tokens"),
            (not self.count("none"), f"{self.count('none')} of {total} requests have no answer"),
            (
                not late,
                f"{len(late)} of {len(noticed)} frozen engines noticed after more than {NOTICE_S:g} s{longest}",
            ),
            (
                not self.wrongly_out,
                f"{len(self.wrongly_out)} times a healthy engine was out of routing for over {PROBE_S:g} s",
            ),
            (not self.left, f"{len(self.left)} things left over after {self.quiet_s:.0f} s of quiet"),
            (not broken, f"{len(broken)} of {len(self.faults)} faults could not be done as planned"),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "requests": len(self.requests),
            "outcomes": {name: self.count(name) for name in ("right", "refused", "wrong", "none")},
            "retried": sum(request.retried for request in self.requests),
            "kinds": [dict(zip(COLUMNS, row, strict=True)) for row in rows(self)],
            "without_answer": [asdict(r) for r in self.requests if r.outcome in ("none", "wrong")],
            "faults": [
                {
                    **asdict(done.fault),
                    "target": done.target,
                    "began_s": done.began_s,
                    "ended_s": done.ended_s,
                }
                | {"problem": done.problem}
                for done in self.faults
            ],
            "notices": [
                {"target": each.fault.target, "after_s": each.after_s, "reason": each.reason}
                for each in self.notices
            ],
            "wrongly_out": [asdict(each) for each in self.wrongly_out],
            "recovery_s": self.recoveries,
            "left_over": self.left,
            "tracebacks": self.tracebacks,
        }


COLUMNS = ("kind", "faults", "requests", "wrong", "no answer", "refused", "slowest", "noticed", "others out")


def rows(run: Run) -> list[tuple[str, ...]]:
    """By kind: the requests that were open during such a fault, so that one counts for several kinds."""
    found = []
    for kind in KINDS:
        of_kind = [done for done in run.faults if done.fault.kind == kind]
        if not of_kind:
            continue
        met = [
            request
            for request in run.requests
            if any(done.began_s < request.ended_s and request.sent_s < done.ended_s for done in of_kind)
        ]
        outcomes = Counter(request.outcome for request in met)
        noticed = [each.after_s for each in run.notices if each.fault.fault.kind == kind]
        shown = f"{_seconds(statistics.median(noticed))} / {_seconds(max(noticed))}" if noticed else ""
        blamed = sum(any(what.startswith(kind) for what in each.beside) for each in run.wrongly_out)
        found.append(
            (
                kind,
                str(len(of_kind)),
                str(len(met)),
                *(str(outcomes[name]) for name in ("wrong", "none", "refused")),
                _seconds(max((request.took_s for request in met), default=0.0)),
                shown,
                str(blamed),
            )
        )
    return found


class Lanes:
    """Makes the faults of a plan, a few at once."""

    def __init__(self, stack: FaultStack, watch: Watch, faults: Sequence[Fault], seed: int) -> None:
        self._stack = stack
        self._watch = watch
        self._maker = FaultMaker(stack, seed)
        self._todo = list(faults)
        self._busy: set[str] = set()
        self.done: list[DoneFault] = []

    async def run(self, progress: Progress) -> None:
        task = progress.add_task("faults", total=len(self._todo))
        async with asyncio.TaskGroup() as group:
            for lane in LANES:
                group.create_task(self._lane(lane, lambda: progress.advance(task)))

    async def _lane(self, lane: Lane, ended: Any) -> None:
        while fault := next((each for each in self._todo if each.lane == lane), None):
            self._todo.remove(fault)
            # No lane is far ahead of the others: every kind meets every other.
            while len(self.done) < fault.number - len(LANES):
                await asyncio.sleep(0.1)
            target = await self._target(lane)
            done = DoneFault(fault, target, time.monotonic())
            self.done.append(done)
            try:
                await self._maker.make(fault, target)
            except Exception as error:
                done.problem = f"{type(error).__name__}: {error}"[:300]
            done.ended_s = time.monotonic()
            await asyncio.sleep(REST_S)
            self._busy.discard(target)
            ended()

    async def _target(self, lane: Lane) -> str:
        """One without a fault that is in routing; after a while one that isn't, too."""
        if lane == "gateway":
            return GATEWAY
        of_lane = [each.name for each in self._stack.deployment.with_role(lane)]
        until_s = time.monotonic() + HEALTHY_AGAIN_S
        at = len(self.done)
        while True:
            free = [name for name in of_lane if name not in self._busy]
            well = [name for name in free if self._watch.is_healthy(name)]
            if well or (free and time.monotonic() > until_s):
                chosen = (well or free)[at % len(well or free)]
                self._busy.add(chosen)
                return chosen
            await asyncio.sleep(0.1)


async def run_faults(stack: FaultStack, faults: Sequence[Fault], seed: int, per_s: float) -> Run:
    began_s = time.monotonic()
    answers = Answers(stack.deployment)
    async with stack.running():
        warm = FaultLoad(stack, answers, per_s, seed + 1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WARM_S):
                await warm.run()
        await warm.drained()
        unready = [request.detail for request in warm.done if request.outcome != "right"]
        if unready:
            raise SystemExit(
                f"{len(unready)} of {len(warm.done)} requests fail before any fault: {unready[0]}"
            )
        baseline = Baseline.of(stack)
        load, watch = FaultLoad(stack, answers, per_s, seed), Watch(stack)
        lanes = Lanes(stack, watch, faults, seed)
        beside = [asyncio.create_task(load.run()), asyncio.create_task(watch.run())]
        with Progress(console=Console(stderr=True)) as progress:
            await lanes.run(progress)
        await asyncio.sleep(1.0)
        beside[0].cancel()
        await load.drained()
        end_s = time.monotonic()
        left, quiet_s = await leftovers(stack, baseline)
        beside[1].cancel()
        for outcome in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    left += left_processes(stack.home) + taken_ports(stack.ports())
    return Run(
        load.done,
        lanes.done,
        list(notices(stack, lanes.done, watch.outs)),
        list(wrongly_out(stack, lanes.done, watch.outs, end_s)),
        recoveries(lanes.done, watch.outs),
        left,
        quiet_s,
        tracebacks(stack.deployment, stack.home),
        time.monotonic() - began_s,
    )


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f} s"


def show(run: Run, console: Console) -> None:
    table = Table(title=f"{len(run.faults)} faults in {run.seconds:.0f} s", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in rows(run):
        table.add_row(*row)
    console.print(table)
    for outcome in ("none", "wrong", "refused"):
        details = Counter(request.detail[:140] for request in run.requests if request.outcome == outcome)
        for detail, count in details.most_common(6):
            console.print(f"{outcome}: {count} x {detail}", markup=False)
    for each in run.wrongly_out[:8]:
        beside = ", ".join(each.beside)
        console.print(
            f"{each.out.name} out for {each.seconds:.1f} s: {each.out.reason} ({beside})", markup=False
        )
    for sentence in [
        *run.left[:8],
        *run.tracebacks[:8],
        *(f"{d.fault.kind} of {d.target}: {d.problem}" for d in run.faults if d.problem),
    ]:
        console.print(sentence, markup=False)
    outcomes = Counter(request.outcome for request in run.requests)
    back = f"back in routing after {_seconds(statistics.median(run.recoveries))}, " if run.recoveries else ""
    console.print(
        f"{outcomes['right']} right, {outcomes['refused']} refused; {back}"
        f"{len(run.tracebacks)} tracebacks in the logs; {os.cpu_count()} cores had {os.getloadavg()[0]:.1f} "
        "processes to run in the last minute"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="only faults of this kind")
    parser.add_argument("--load", type=float, default=8.0, help="requests per second")
    parser.add_argument("--longest", type=float, default=math.inf, help="seconds of a fault at most")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="an empty or new folder")
    options = parser.parse_args()
    faults = plan(options.faults, options.seed, options.only, options.longest)
    with contextlib.ExitStack() as held:
        if options.keep_logs is not None:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
            home = options.keep_logs
        else:
            home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-faults-")))
        run = uvloop.run(run_faults(FaultStack(home), faults, options.seed, options.load))
    show(run, Console(width=None if sys.stdout.isatty() else 140, highlight=False))
    for good, sentence in run.verdicts():
        print(f"{'yes' if good else 'NO '}  {sentence}")
    if options.json is not None:
        verdicts = [{"good": good, "text": sentence} for good, sentence in run.verdicts()]
        document = {"seed": options.seed, "load": options.load, **run.to_json(), "verdicts": verdicts}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(good for good, _ in run.verdicts()) else 1


if __name__ == "__main__":
    sys.exit(main())
