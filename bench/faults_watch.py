"""What the gateway says of its engines while `faults.py` breaks them, how right it is, and what is left over."""

import asyncio
import contextlib
import gc
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from faults_kinds import GATEWAY, HARMLESS, DoneFault
from faults_stack import FaultStack, open_files
from prfaas.core.deployment import Deployment

POLL_S = 0.1
PROBE_S = 1.0
"""One probe period: a healthy engine may be out of routing for so long because of another's fault."""
NOTICE_S = 3.0
"""A frozen engine is to be noticed within so long."""
RECOVERY_S = 10.0
"""After its own fault an engine may be out of routing for so long."""
GATEWAY_START_S = 3.0
"""After its start a gateway may take engines for away for so long."""
QUIET_S = 75.0
"""What is left over by then stays: staging that nobody asks for is freed after a minute."""
_MORE_FILES = 64
_CLOSE_WAIT = "08"


@dataclass(slots=True)
class Out:
    """An instance was out of routing. Times are the monotonic clock's."""

    name: str
    since_s: float
    reason: str
    until_s: float = math.inf


@dataclass(slots=True)
class Watch:
    """Asks the gateway for its state ten times a second."""

    stack: FaultStack
    outs: list[Out] = field(default_factory=list)
    _open: dict[str, Out] = field(default_factory=dict)
    _known: bool = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            run = self.stack.gateways[-1]
            state = await self.stack.state()
            if run is self.stack.gateways[-1]:
                self._take(state, time.monotonic())
            await asyncio.sleep(POLL_S)

    def is_healthy(self, name: str) -> bool:
        return self._known and name not in self._open

    def _take(self, state: dict[str, Any] | None, now_s: float) -> None:
        if state is None and not self.stack.is_gateway_away:
            return
        self._known = state is not None
        instances = {} if state is None else instances_of(state)
        for name in [*self._open]:
            # A gateway that is gone leaves nobody out of routing.
            if name not in instances or instances[name]["healthy"]:
                self._open.pop(name).until_s = now_s
        for name, instance in instances.items():
            if not instance["healthy"] and name not in self._open:
                self._open[name] = Out(name, now_s, str(instance["suspicion"]))
                self.outs.append(self._open[name])


def instances_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: each for cluster in state["clusters"].values() for name, each in cluster["instances"].items()
    }


@dataclass(frozen=True, slots=True)
class Notice:
    """When a frozen engine was noticed; infinite if it never was."""

    fault: DoneFault
    after_s: float
    reason: str


def notices(stack: FaultStack, faults: Sequence[DoneFault], outs: Sequence[Out]) -> Iterator[Notice]:
    """One for each freeze that lasted so long that it has to be noticed, by one and the same gateway."""
    for done in faults:
        if done.fault.kind != "freeze" or done.problem:
            continue
        starts_s = [run.ready_s for run in stack.gateways if run.ready_s < done.ended_s]
        from_s = max(done.began_s, starts_s[-1])
        if done.ended_s - from_s < NOTICE_S + 2 * POLL_S or stack.restarted_within(
            from_s + 1e-3, done.ended_s
        ):
            continue
        first = next(
            (
                out
                for out in outs
                if out.name == done.target and out.until_s > from_s and out.since_s < done.ended_s
            ),
            None,
        )
        if first is None:
            yield Notice(done, math.inf, "")
        else:
            yield Notice(done, max(0.0, first.since_s - from_s), first.reason)


@dataclass(frozen=True, slots=True)
class WronglyOut:
    """An engine without a fault of its own was out of routing for too long."""

    out: Out
    seconds: float
    beside: tuple[str, ...]
    """The faults of others meanwhile, "kind of target"."""


def wrongly_out(
    stack: FaultStack, faults: Sequence[DoneFault], outs: Sequence[Out], end_s: float
) -> Iterator[WronglyOut]:
    for out in outs:
        own = [
            (done.began_s, done.ended_s + RECOVERY_S)
            for done in faults
            if done.target == out.name and done.fault.kind not in HARMLESS
        ]
        own += [(run.ready_s, run.ready_s + GATEWAY_START_S) for run in stack.gateways]
        seconds = _outside(out.since_s, min(out.until_s, end_s), own)
        if seconds > PROBE_S + 2 * POLL_S:
            beside = tuple(
                f"{done.fault.kind} of {done.target}"
                for done in faults
                if done.began_s < out.since_s + 0.5 and out.since_s - RECOVERY_S < done.ended_s
            )
            yield WronglyOut(out, seconds, beside)


def _outside(since_s: float, until_s: float, excused: list[tuple[float, float]]) -> float:
    """The longest part of [since_s, until_s] that lies in none of the others."""
    longest = 0.0
    for begin_s, end_s in sorted(excused):
        longest = max(longest, min(begin_s, until_s) - since_s)
        since_s = max(since_s, end_s)
    return max(longest, until_s - since_s)


def recoveries(faults: Sequence[DoneFault], outs: Sequence[Out]) -> list[float]:
    """Seconds from the end of each engine's fault until it was in routing, where it was out at that end."""
    return [
        out.until_s - done.ended_s
        for done in faults
        for out in outs
        if done.target == out.name and out.since_s <= done.ended_s < out.until_s
    ]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Open files by process name before the faults."""

    files: dict[str, int]

    @classmethod
    def of(cls, stack: FaultStack) -> "Baseline":
        pids = {each.name: stack.pid(each.name) for each in stack.deployment.instances}
        pids[GATEWAY] = stack.gateway_pid
        return cls({name: open_files(pid) for name, pid in pids.items()})


async def leftovers(stack: FaultStack, baseline: Baseline) -> tuple[list[str], float]:
    """What is still there when all requests have ended, one sentence each; and how long it took to go."""
    began_s = time.monotonic()
    while True:
        found = await _left(stack, baseline)
        waited_s = time.monotonic() - began_s
        if not found or waited_s > QUIET_S:
            return found, waited_s
        await asyncio.sleep(0.5)


async def _left(stack: FaultStack, baseline: Baseline) -> list[str]:
    state = await stack.state()
    if state is None:
        return ["the gateway does not answer"]
    found = []
    for name, instance in instances_of(state).items():
        found += [
            f"the gateway counts {instance[what]} {word} at {name}"
            for what, word in (("in_flight", "requests"), ("queue", "prefills"))
            if instance[what]
        ]
        if not instance["healthy"]:
            found.append(f"{name} is out of routing: {instance['suspicion']}")
    for name, cluster in state["clusters"].items():
        if cluster["waiting_prefills"]:
            found.append(f"the gateway counts {cluster['waiting_prefills']} waiting prefills in {name}")
    for name, link in state["links"].items():
        if link["transfers"]:
            found.append(f"the gateway counts {link['transfers']} transfers on {name}")
    for each in stack.deployment.instances:
        found += [f"{each.name}: {what}" for what in await _left_at(stack, each.name)]
    for name, files in Baseline.of(stack).files.items():
        if files > baseline.files[name] + _MORE_FILES:
            found.append(f"{name} has {files} open files, before the faults {baseline.files[name]}")
    # The engines that were asked just now close first; this process does so in its loop's next turn.
    await asyncio.sleep(0.1)
    return found + _half_closed(stack)


async def _left_at(stack: FaultStack, name: str) -> list[str]:
    instance = stack.deployment.instance(name)
    try:
        stats, metrics = await stack.kv_stats(instance), await stack.engine_metrics(instance)
    except (OSError, TimeoutError, aiohttp.ClientError) as error:
        return [f"it does not answer: {error or type(error).__name__}"]
    facts = {
        "blocks of staging": stats["staging_used_blocks"],
        "incoming transfers": stats["transfers"]["receiving"],
        "errors of its threads": stats["thread_errors"],
        "running requests": metrics["vllm:num_requests_running"],
        "waiting requests": metrics["vllm:num_requests_waiting"],
        "of its KV cache in use": metrics["vllm:kv_cache_usage_perc"],
        "loads of damaged KV": metrics["vllm:prfaas_damaged_loads_total"],
    }
    return [f"{value:g} {what}" for what, value in facts.items() if value]


def _half_closed(stack: FaultStack) -> list[str]:
    """Connections to or from what listens here that their other side has closed, with who still holds them."""
    # A client of this process that gave up while it connected leaves its socket to the collector, which is idle now.
    gc.collect()
    ports = {port for _, port in stack.ports()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        here, there = (int(row[at].rpartition(":")[2], 16) for at in (1, 2))
        if row[3] == _CLOSE_WAIT and ports & {here, there}:
            unread_bytes = int(row[4].rpartition(":")[2], 16)
            holder = _holder(row[9]) or "nobody (it was never accepted)"
            found.append(
                f"the connection from {there} to {here} is closed at {there} only: {unread_bytes} bytes of it are"
                f" unread by {holder}"
            )
    return found


def _holder(inode: str) -> str | None:
    """The process that has a socket open: its id and command line."""
    for files in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) == f"socket:[{inode}]" for file in files.iterdir()):
                command = (
                    (files.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                return f"process {files.parent.name}, {command[:120]}"
    return None


def left_processes(home: Path) -> list[str]:
    """Engines and gateways of files in `home`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "-m prfaas." in command and str(home) in command:
                found.append(f"process {entry.name} still runs: {command[:100]}")
    return found


# Of a traceback, to be read by a person.
_MOST_SHOWN = 4000


def tracebacks(deployment: Deployment, home: Path) -> list[str]:
    """What the logs of gateway and engines have of each exception, of those in one line too."""
    # Not what aiohttp says where bytes are no HTTP; it answers 400.
    mark = re.compile(r'Traceback \(most recent call last\)| exception="(?!Bad\w+ in aiohttp\._http_parser)')
    found = []
    for log in [*deployment.logs_dir.glob("*.log*"), *home.glob("*.log")]:
        text = log.read_text(errors="replace")
        for each in mark.finditer(text):
            begin = text.rfind("\n", 0, each.start()) + 1
            found.append(f"{log.name}: {text[begin : each.start() + _MOST_SHOWN]}")
    return found
