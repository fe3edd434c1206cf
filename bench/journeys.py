"""How many files and functions one thing passes through in the gateway's process.

    python bench/journeys.py [--against COMMIT] [--list] [--json FILE]

Example, before and after a change: python bench/journeys.py --against HEAD~1 --list

Four stand-in engines run behind a gateway whose process is recorded by `sys.setprofile` (journeys_recorder.py). Three
things are followed through it:

- request: an offloaded, streamed text completion of 25,000 token ids, from the first function that aiohttp's server
  calls until the record is complete. All tasks and threads that the request starts belong to it, and what comes in over
  connections that requests opened; the control plane's loops don't. Of five requests the one with the median of moves.
- event → decision: KV events of one engine step, from the answer of the KV port that tells them until they are applied,
  then all of the routing decision for a prompt that begins with these blocks. What the loop does while nothing comes is
  left out.
- link report → threshold: one round of reports, from the bytes that come from a sender to the question for a new
  threshold, then the search that moves the threshold. The link has lost most of its bandwidth before.

functions: different functions of the package that were entered. A comprehension belongs to its function, a lambda is
one itself, generated methods (of dataclasses) are none. files: the files that these functions are in. moves: of the
functions in the order of their entry, repeated as often as they were entered, how often the next one is in another
file. Going back to a caller is no move, and going on after an `await` is none.

Exit code 0 if all was measured, whether the goals are met or not. About 40 s for each of the two trees.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import random
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDER = Path(__file__).with_name("journeys_recorder.py")

# The only names from inside of the package, as module:function; `prfaas.` is left out. The first table belongs to the
# layout in which `prfaas.gateway` exists.
NAMES_BEFORE = {
    "event loop": "control.feed:EventFeed.run",
    "event thread": "control.feed:EventFeed._receive",
    "decision": "control.plane:LivePlane.route",
    "link loop": "control.telemetry:LinkTelemetry.run",
    "threshold loop": "control.thresholds:Thresholds.run",
    "threshold question": "control.thresholds:Thresholds.ask",
}
NAMES_NOW = {
    "event loop": "serving.control.kv_events:EventFeed._follow.<locals>.<lambda>",
    "decision": "serving.control.router:Router.route",
    "link loop": "serving.control.link_monitor:LinkMonitor.run",
    "threshold loop": "serving.control.thresholds:Thresholds.run",
    "threshold question": "serving.control.thresholds:Thresholds.ask",
}

REQUEST, EVENT, REPORT = "request", "event → decision", "link report → threshold"
GOALS = [(REQUEST, "files", 30), (REQUEST, "moves", 100), (EVENT, "files", 14), (REPORT, "files", 15)]

ATTEMPTS = 3
REQUESTS = 5
PROMPT_TOKENS = 25_000
ANSWER_TOKENS = 4
# Two blocks and some, then what the second prompt has of its own.
BLOCK_TOKENS = 256
SHARED_TOKENS = 600
OWN_TOKENS = 50
# From so many requests on there are lengths that a threshold can be searched on.
OBSERVED_REQUESTS = 60
SLOW_BITS_PER_S = 5e6
READY_TIMEOUT_S = 180.0
DRIVE_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
# Engines are known and nothing is left of the last request.
SETTLE_S = 2.0
# What a handler does after its last byte has gone.
RECORD_S = 0.05
# Between two searches there is more time, within one less.
SEARCH_GAP_S = 0.5

Json = dict[str, Any]
Span = tuple[float, float]


class NotSeenError(Exception):
    """What was to be followed has not happened in the way that was meant."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A function is entered, or goes on if not `begins`. `stack`: itself last. `way`: what the work belongs to."""

    at_s: float
    begins: bool
    stack: tuple[int, ...]
    way: tuple[int, ...]

    @property
    def function(self) -> int:
        return self.stack[-1]


@dataclass(frozen=True, slots=True)
class Log:
    """`functions`: file and name, by number. `from_http`: those that the HTTP server calls."""

    functions: Sequence[tuple[str, str]]
    entries: Sequence[Entry]
    from_http: frozenset[int]

    @classmethod
    def read(cls, path: Path) -> "Log":
        functions, stacks, ways, entries, from_http = pickle.loads(path.read_bytes())
        return cls(
            functions,
            [Entry(at_s, begins, stacks[stack], ways[way]) for at_s, begins, stack, way in entries],
            frozenset(from_http),
        )

    def number(self, name: str) -> int:
        """The number of a function that one of the tables names."""
        module, _, function = name.partition(":")
        wanted = (module.replace(".", "/") + ".py", function)
        if wanted not in self.functions:
            raise SystemExit(f"{name} was never entered: put its new name into the table of {__file__}")
        return self.functions.index(wanted)

    def on_way(self, of: set[int] | frozenset[int]) -> list[Entry]:
        """What one of these functions has started, itself included."""
        return [entry for entry in self.entries if not of.isdisjoint(entry.way)]


@dataclass(frozen=True, slots=True)
class Spans:
    """When things were done, by `time.monotonic`, which is the same clock in all processes."""

    requests: Sequence[Span]
    idle: Span
    event: Span
    decision: Span
    threshold: Span


@dataclass(frozen=True, slots=True)
class Journey:
    """`functions`: (file, name) in the order of their entry, repeated as often as they were entered."""

    name: str
    functions: Sequence[tuple[str, str]]

    @property
    def moves(self) -> int:
        files = [file for file, _ in self.functions]
        return sum(before != after for before, after in pairwise(files))

    @property
    def by_file(self) -> Mapping[str, Sequence[str]]:
        """Files and their functions in the order of their first entry."""
        found: dict[str, dict[str, None]] = {}
        for file, function in self.functions:
            found.setdefault(file, {})[function] = None
        return {file: list(functions) for file, functions in found.items()}

    @property
    def figures(self) -> dict[str, int]:
        return {
            "functions": len(set(self.functions)),
            "files": len(self.by_file),
            "moves": self.moves,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit, too")
    parser.add_argument("--list", action="store_true", help="also print every journey's files and functions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    # Worktrees and engines are cleaned up in `finally` blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trees: dict[str, Sequence[Journey]] = {}
    if options.against is not None:
        with worktree(options.against) as tree:
            trees[options.against] = measure(tree)
    trees["now"] = measure(REPOSITORY)
    Console(width=110).print(table_of(trees))
    if options.list:
        for label, journeys in trees.items():
            for journey in journeys:
                print_list(label, journey)
    if options.json is not None:
        options.json.write_text(json.dumps(document_of(trees), indent=2, ensure_ascii=False) + "\n")


def measure(tree: Path) -> Sequence[Journey]:
    """The three journeys in the tree's source; again if chance was against it, as on a busy machine."""
    for attempt in range(1, ATTEMPTS + 1):
        print(f"recording a gateway of {tree}", file=sys.stderr)
        try:
            return measure_once(tree)
        except (NotSeenError, TimeoutError, aiohttp.ClientError) as error:
            print(f"attempt {attempt} of {ATTEMPTS}: {type(error).__name__}: {error}", file=sys.stderr)
    raise SystemExit(1)


def measure_once(tree: Path) -> Sequence[Journey]:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        log_path = home / "entries.pickle"
        document = deployment()
        with gateway(tree / "src", document, home, log_path):
            spans = asyncio.run(drive(document))
        log = Log.read(log_path)
    names = NAMES_BEFORE if (tree / "src/prfaas/gateway").is_dir() else NAMES_NOW
    numbers = {what: log.number(name) for what, name in names.items()}
    return [
        request_journey(log, spans),
        event_journey(log, spans, numbers),
        report_journey(log, spans, numbers),
    ]


def request_journey(log: Log, spans: Spans) -> Journey:
    journeys = [journey_of(REQUEST, log, within(log.on_way(log.from_http), span)) for span in spans.requests]
    median = statistics.median_low(journey.moves for journey in journeys)
    return next(journey for journey in journeys if journey.moves == median)


def event_journey(log: Log, spans: Spans, numbers: Mapping[str, int]) -> Journey:
    # Events that come over ZMQ have a thread; those that KV ports tell come in the loop that asks for them.
    begins = {numbers[each] for each in ("event loop", "event thread") if each in numbers}
    entries = log.on_way(begins)
    idle = {entry.function for entry in within(entries, spans.idle)}
    after = within(entries, spans.event)
    busy = [place for place, entry in enumerate(after) if entry.function not in idle]
    if not busy:
        raise NotSeenError("no KV event came")
    applied = with_callers(after[busy[0] : busy[-1] + 1])
    decided = [
        entry
        for entry in within(log.on_way(log.from_http), spans.decision)
        if numbers["decision"] in entry.stack
    ]
    return journey_of(EVENT, log, [*applied, *decided])


def report_journey(log: Log, spans: Spans, numbers: Mapping[str, int]) -> Journey:
    loop, question = numbers["link loop"], numbers["threshold question"]
    search = last_without_gap(within(log.on_way({numbers["threshold loop"]}), spans.threshold), SEARCH_GAP_S)
    reports = [entry for entry in log.on_way({loop}) if entry.at_s < search[0].at_s]
    asked = max((place for place, entry in enumerate(reports) if entry.function == question), default=None)
    if asked is None:
        raise NotSeenError("the threshold moved for another reason than a link report")
    # The loop goes on twice in a round: to ask, and to conclude from the answers that have come in between.
    loop_goes_on = [place for place, entry in enumerate(reports[:asked]) if entry.stack == (loop,)]
    in_round = reports[loop_goes_on[-2] + 1 : asked + 1]
    # Questions begin tasks; what goes on first is a task that has waited for bytes.
    come = next(place for place, entry in enumerate(in_round) if len(entry.stack) == 1 and not entry.begins)
    return journey_of(REPORT, log, [*with_callers(in_round[come:]), *search])


def journey_of(name: str, log: Log, entries: Sequence[Entry]) -> Journey:
    """A function that only goes on counts where it is first seen: what waits was entered before its event came."""
    functions: list[tuple[str, str]] = []
    seen: set[int] = set()
    for entry in entries:
        if entry.begins or entry.function not in seen:
            functions.append(log.functions[entry.function])
        seen.add(entry.function)
    return Journey(name, functions)


def with_callers(entries: Sequence[Entry]) -> Sequence[Entry]:
    """With the functions that the first one was called by, which had been entered before."""
    first = entries[0]
    callers = [
        Entry(first.at_s, False, first.stack[:depth], first.way) for depth in range(1, len(first.stack))
    ]
    return [*callers, *entries]


def within(entries: Sequence[Entry], span: Span) -> list[Entry]:
    begin_s, end_s = span
    return [entry for entry in entries if begin_s <= entry.at_s <= end_s]


def last_without_gap(entries: Sequence[Entry], gap_s: float) -> Sequence[Entry]:
    begin = len(entries) - 1
    while begin > 0 and entries[begin].at_s - entries[begin - 1].at_s < gap_s:
        begin -= 1
    return entries[begin:]


async def drive(document: Json) -> Spans:
    """Make happen what is followed, and say when it did."""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=DRIVE_TIMEOUT_S)
    async with (
        asyncio.timeout(DRIVE_TIMEOUT_S),
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        driver = Driver(document, session)
        await asyncio.sleep(SETTLE_S)
        requests = await driver.requests()
        await asyncio.sleep(SETTLE_S)
        idle, event, decision = await driver.event()
        return Spans(requests, idle, event, decision, await driver.threshold())


class Driver:
    """A client of the gateway and of its engines."""

    def __init__(self, document: Json, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._model = document["model"]["served_name"]
        self._gateway = f"http://127.0.0.1:{document['gateway']['port']}"
        self._operators = f"http://127.0.0.1:{document['gateway']['admin']['port']}"
        self._engines = {
            instance["name"]: f"http://127.0.0.1:{instance['http_port']}"
            for cluster in document["clusters"]
            for instance in cluster["instances"]
        }
        self._random = random.Random(0)

    async def requests(self) -> Sequence[Span]:
        # Connections are made, lazy imports are done.
        for _ in range(3):
            await self._offloaded()
        spans = []
        for _ in range(REQUESTS):
            await asyncio.sleep(0.2)
            begun_s = time.monotonic()
            await self._offloaded()
            await asyncio.sleep(RECORD_S)
            spans.append((begun_s, time.monotonic()))
        return spans

    async def event(self) -> tuple[Span, Span, Span]:
        """A time without events, the time of an event, and that of a decision which uses it."""
        begun_s = time.monotonic()
        await asyncio.sleep(1.5)
        quiet_s = time.monotonic()
        shared = self._ids(SHARED_TOKENS)
        await self._complete(self._engines["home-0"], shared)
        await asyncio.sleep(1.0)
        applied_s = time.monotonic()
        route = await self._complete(self._gateway, [*shared, *self._ids(OWN_TOKENS)])
        await asyncio.sleep(RECORD_S)
        uncached = re.search(r"uncached=(\d+)", route)
        if uncached is None or int(uncached[1]) > OWN_TOKENS + BLOCK_TOKENS:
            raise NotSeenError(f"the decision does not know of the event: {route}")
        return (begun_s, quiet_s), (quiet_s, applied_s), (applied_s, time.monotonic())

    async def threshold(self) -> Span:
        """From the loss of the link's bandwidth until the threshold has moved."""
        for _ in range(OBSERVED_REQUESTS):
            await self._complete(self._gateway, self._ids(self._random.choice((500, 2000, 8000, 30_000))))
        before = await self._threshold_tokens()
        for name in ("far-0", "far-1"):
            body = {"link": "far->home", "bits_per_s": SLOW_BITS_PER_S}
            await self._post(f"{self._engines[name]}/synthetic/link", body)
        begun_s = time.monotonic()
        load = [asyncio.create_task(self._load()) for _ in range(4)]
        try:
            while await self._threshold_tokens() == before:
                await asyncio.sleep(0.2)
            return begun_s, time.monotonic()
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)

    async def _load(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await self._complete(self._gateway, self._ids(30_000))

    async def _offloaded(self) -> None:
        ids = self._ids(PROMPT_TOKENS)
        route = await self._complete(self._gateway, ids, stream=True, max_tokens=ANSWER_TOKENS)
        if not route.startswith("offload;"):
            raise NotSeenError(f"the request was not offloaded: {route}")

    async def _complete(self, url: str, ids: Sequence[int], **fields: Any) -> str:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, **fields}
        return await self._post(f"{url}/v1/completions", body)

    async def _post(self, url: str, body: Json) -> str:
        """The route that the gateway tells; "" from engines."""
        async with self._session.post(url, json=body) as response:
            await response.read()
            response.raise_for_status()
            return response.headers.get("x-prfaas-route", "")

    async def _threshold_tokens(self) -> float | None:
        async with self._session.get(f"{self._operators}/prfaas/state") as response:
            state = await response.json()
        tokens: float | None = state["clusters"]["home"]["threshold_tokens"]
        return tokens

    def _ids(self, count: int) -> list[int]:
        return self._random.choices(range(256), k=count)


@contextlib.contextmanager
def gateway(source: Path, document: Json, home: Path, log_path: Path) -> Iterator[None]:
    """The deployment with a recorded gateway, ready; the record is at `log_path` afterwards."""
    path = home / "journeys.yaml"
    path.write_text(json.dumps(document))
    messages = home / "up.log"
    with messages.open("w") as messages_file:
        up = subprocess.Popen(
            [sys.executable, str(RECORDER), str(path), str(log_path)],
            stdout=subprocess.PIPE,
            stderr=messages_file,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source), "PRFAAS_HOME": str(home)},
        )
        try:
            assert up.stdout is not None
            can_read, _, _ = select.select([up.stdout], [], [], READY_TIMEOUT_S)
            if not can_read or not up.stdout.readline().startswith("ready:"):
                raise SystemExit(f"the deployment did not start:\n{messages.read_text()[-3000:]}")
            yield
        finally:
            up.send_signal(signal.SIGTERM)
            try:
                up.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait()
    if not log_path.is_file():
        raise SystemExit(f"nothing was recorded:\n{messages.read_text()[-3000:]}")


def deployment() -> Json:
    """One PrfaaS and one PD cluster of two stand-ins each; no loop of the scheduler acts without an event."""
    ports = free_ports(10)

    def cluster(name: str, kind: str, profile: str, roles: Sequence[str]) -> Json:
        instances = [
            {
                "name": f"{name}-{index}",
                "roles": [role],
                "host": "127.0.0.1",
                "http_port": next(ports),
                "kv_port": next(ports),
            }
            for index, role in enumerate(roles)
        ]
        speed = {"hardware": "synthetic", "profile": profile, "speedup": 20}
        return {"name": name, "kind": kind, **speed, "instances": instances}

    return {
        "name": "journeys",
        "model": {"served_name": "tiny", "tiny": "qwen3-next", "max_model_len": 40_960},
        "clusters": [
            cluster("far", "prfaas", "internal-1t-h200", ["prefill", "prefill"]),
            cluster("home", "pd", "internal-1t-h20", ["prefill", "decode"]),
        ],
        "links": [{"source": "far", "target": "home", "bandwidth": "2 Gbit/s", "connections": 2}],
        "control": {"threshold_period_s": 3600, "allocation": False, "window_s": 150},
        "gateway": {
            "host": "127.0.0.1",
            "port": next(ports),
            "admin": {"port": next(ports)},
            "route_header": "full",
            # What is measured is the way of the KVCache.
            "first_token": "decode",
        },
        "engine": {
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 20,
            "kv_cache_gib": 1,
            "staging": "96 MiB",
            "transfer_block": "256 KiB",
        },
    }


def free_ports(count: int) -> Iterator[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return iter(ports)


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit, for a while."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True, stdout=sys.stderr)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True, stdout=sys.stderr)


def table_of(trees: Mapping[str, Sequence[Journey]]) -> Table:
    table = Table("journey", "figure", *trees, "goal")
    goals = {(journey, figure): goal for journey, figure, goal in GOALS}
    for name, journeys in by_name(trees).items():
        for figure in ("functions", "files", "moves"):
            values = [str(journey.figures[figure]) for journey in journeys]
            goal = goals.get((name, figure))
            table.add_row(name, figure, *values, "" if goal is None else f"≤ {goal}")
    return table


def print_list(label: str, journey: Journey) -> None:
    figures = ", ".join(f"{value} {figure}" for figure, value in journey.figures.items())
    print(f"\n{journey.name} ({label}): {figures}")
    for number, (file, functions) in enumerate(journey.by_file.items(), 1):
        print(f"{number:3}  {file}: {', '.join(functions)}")


def document_of(trees: Mapping[str, Sequence[Journey]]) -> Json:
    now = {journey.name: journey.figures for journey in trees["now"]}
    goals = [
        {
            "name": f"{journey}: {figure}",
            "value": now[journey][figure],
            "unit": figure,
            "goal": goal,
            "met": now[journey][figure] <= goal,
        }
        for journey, figure, goal in GOALS
    ]
    figures = {
        label: {journey.name: journey.figures | {"by_file": journey.by_file} for journey in journeys}
        for label, journeys in trees.items()
    }
    return {"figures": figures, "goals": goals}


def by_name(trees: Mapping[str, Sequence[Journey]]) -> Mapping[str, Sequence[Journey]]:
    return {journeys[0].name: journeys for journeys in zip(*trees.values(), strict=True)}


if __name__ == "__main__":
    main()
