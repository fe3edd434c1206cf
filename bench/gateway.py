"""CPU time of the gateway per request and per relayed chunk, beside vllm-router, before the same stand-in engines.

    python bench/gateway.py [--json FILE] [--requests N] [--rounds N] [--router PATH]

Every server runs in a process of its own, whose CPU time is read from /proc; engines and load share another one. All
run at once and are asked in turns, so that what else the machine does is the same for all; the figures are medians of
the rounds. Every request to the gateway is a real one: tokenized, hashed, routed by the live control plane, ticketed,
prefilled at a producer, its bytes moved by the real transport, decoded. vllm-router (in PD mode, where its executable
is found) sends the whole body to both engines and neither tokenizes nor hashes it: with text prompts it does less.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from gateway_load import (
    STREAM_CHUNK_S,
    STREAM_CHUNKS,
    STREAMS,
    Case,
    Server,
    Texts,
    cases_of,
    put,
    put_streams,
)
from gateway_peers import bare_relay, vllm_router
from prfaas.core.deployment import Deployment, Routing
from prfaas.serving.gateway.prompts.tokenizers import encoder_of
from prfaas.serving.live import serve_live
from prfaas.serving.logs import LogSettings, set_up_logging
from prfaas.serving.secret_files import create_key

# The stand-in engine is the tests'; the product has none.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.serving.gateway.stand_in import StandInEngine, write_tokenizer
from tests.serving.gateway.world import deployment_of

THRESHOLD_TOKENS = 1000
IDLE_S = 3.0
WATCH_TICK_S = 0.001
BLOCKED_GOAL_MS = 5.0
GOALS = {"short": 1.5, "32K": 1.0, "128K": 1.0, "chunk": 1.5}


class LoopWatch:
    """The longest time for which an event loop did not turn, from a callback that wants to run every millisecond.

    Of a standstill, no more can be the process's own doing than the CPU time that its threads used meanwhile; the
    rest is the machine's, which let others run.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._on = False
        self._since = (0.0, 0.0)
        self._longest_s = self._longest_own_s = 0.0

    def start(self) -> None:
        self._longest_s = self._longest_own_s = 0.0
        self._on = True
        self._wait()

    def stop(self) -> tuple[float, float]:
        """Seconds of the longest standstill, and of the longest that was the process's own doing."""
        self._on = False
        return self._longest_s, self._longest_own_s

    def _wait(self) -> None:
        # The loop's own clock stands still within one turn.
        self._since = (time.monotonic(), time.process_time())
        self._loop.call_later(WATCH_TICK_S, self._tick)

    def _tick(self) -> None:
        since_s, since_cpu_s = self._since
        late_s = time.monotonic() - since_s - WATCH_TICK_S
        self._longest_s = max(self._longest_s, late_s)
        self._longest_own_s = max(self._longest_own_s, min(late_s, time.process_time() - since_cpu_s))
        if self._on:
            self._wait()


def gateway_process(deployment: Deployment, pipe: Connection) -> None:
    """Serves `deployment`; sends its port, then for True watches the event loop and for False tells what it saw."""

    async def serve() -> None:
        watch = LoopWatch()
        loop = asyncio.get_running_loop()

        def ready(port: int) -> None:
            pipe.send(port)
            threading.Thread(target=listen, daemon=True).start()

        def listen() -> None:
            while True:
                loop.call_soon_threadsafe(watch.start if pipe.recv() else lambda: pipe.send(watch.stop()))

        # As the command line does: with a line of log per request.
        with Path(os.devnull).open("w") as nowhere:
            set_up_logging(LogSettings(), whole_process=True, stream=nowhere)
            gc.collect()
            gc.freeze()
            await serve_live(deployment, ready=ready)

    uvloop.run(serve())


@asynccontextmanager
async def gateway(deployment: Deployment) -> AsyncIterator[tuple[int, int, Connection]]:
    """(port, pid, the pipe to it) of a gateway in a process of its own."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=gateway_process, args=(deployment, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield await asyncio.to_thread(ours.recv), process.pid, ours
    finally:
        process.terminate()
        process.join()


@asynccontextmanager
async def engines_of(
    home: Path, model_dir: Path
) -> AsyncIterator[tuple[Deployment, dict[str, StandInEngine]]]:
    """A deployment of stand-in engines, and the engines: a remote and a local one that prefill, one that decodes."""
    key = create_key(home / "key")
    producers = ("remote", "local")
    engines = {
        name: StandInEngine(
            name,
            model_dir,
            key,
            producers=producers if name == "decode" else (),
            staging_bytes=64 << 20,
            chunk_s=STREAM_CHUNK_S,
        )
        for name in (*producers, "decode")
    }
    for engine in engines.values():
        await engine.start()
    for name in producers:
        engines[name].connect([engines["decode"]])
    deployment = deployment_of(home, engines, model_dir)
    model = dataclasses.replace(deployment.model, max_model_len=1 << 20)
    engine_config = dataclasses.replace(deployment.engine, staging_bytes=64 << 20)
    routing = Routing("static_threshold", THRESHOLD_TOKENS)
    try:
        yield (
            dataclasses.replace(deployment, model=model, engine=engine_config, routing=routing),
            engines,
        )
    finally:
        for engine in engines.values():
            await engine.stop()


async def bench(home: Path, requests: int, rounds: int, router: str | None) -> dict[str, Any]:
    model_dir = write_tokenizer(home / "model")
    texts = Texts()
    tokenizer = texts.tokenizer()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    cases = cases_of(tokenizer, texts, requests, rounds)
    async with AsyncExitStack() as stack:
        deployment, engines = await stack.enter_async_context(engines_of(home, model_dir))
        port, pid, pipe = await stack.enter_async_context(gateway(deployment))
        urls = [f"http://127.0.0.1:{engines[name].http_port}" for name in ("local", "decode")]
        servers = [Server("gateway", port, pid)]
        if router is not None:
            servers.append(
                Server("vllm-router", *await stack.enter_async_context(vllm_router(router, *urls)))
            )
        servers.append(Server("bare relay", *await stack.enter_async_context(bare_relay(*urls))))
        rows = [await idle(server) for server in servers]
        for case in cases:
            rows += await compare(servers, case, rounds, engines)
        rows += await compare_streams(servers, rounds)
        # A run of its own, since watching costs CPU time.
        blocking = []
        for case in cases:
            pipe.send(True)
            await put(servers[0], dataclasses.replace(case, prompts=case.prompts[::-1]), 0)
            pipe.send(False)
            longest_s, own_s = await asyncio.to_thread(pipe.recv)
            blocking.append({"case": case.name, "longest_ms": longest_s * 1e3, "own_ms": own_s * 1e3})
    return {"rows": rows, "blocking": blocking, "tokenizing": tokenizing(tokenizer, model_dir, cases)}


async def idle(server: Server) -> dict[str, Any]:
    """What a server uses when nobody asks it anything."""
    await asyncio.sleep(1.0)
    before_s = server.cpu_s()
    await asyncio.sleep(IDLE_S)
    value = (server.cpu_s() - before_s) / IDLE_S * 1e3
    return {"server": server.name, "case": "idle, per second", "unit": "ms", "goal": None, "value": value}


async def compare(
    servers: list[Server], case: Case, rounds: int, engines: dict[str, StandInEngine]
) -> list[dict[str, Any]]:
    """One row per server."""
    taken: dict[str, list[tuple[float, float, str]]] = {server.name: [] for server in servers}
    for server in servers:
        await put(server, case, None)
    for turn in shown(range(rounds), case.name):
        for server in servers:
            taken[server.name].append(await put(server, case, turn))
            for engine in engines.values():
                engine.seen.clear()
    return [
        {
            "server": name,
            "case": case.name,
            "unit": "ms",
            "goal": GOALS[case.goal],
            "value": statistics.median(cpu_ms for cpu_ms, _, _ in of_rounds),
            "rounds": [cpu_ms for cpu_ms, _, _ in of_rounds],
            "wall_ms": statistics.median(wall_ms for _, wall_ms, _ in of_rounds),
            "route": "+".join(sorted({route for _, _, route in of_rounds})),
        }
        for name, of_rounds in taken.items()
    ]


async def compare_streams(servers: list[Server], rounds: int) -> list[dict[str, Any]]:
    """One row per server: microseconds of CPU time per relayed chunk."""
    taken: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in shown(range(rounds), "streams"):
        for server in servers:
            base_s = await put_streams(server, 1)
            used_s = await put_streams(server, 1 + STREAM_CHUNKS) - base_s
            taken[server.name].append(used_s / (STREAMS * STREAM_CHUNKS) * 1e6)
    return [
        {
            "server": name,
            "case": "relayed chunk",
            "unit": "µs",
            "goal": GOALS["chunk"],
            "value": statistics.median(values),
            "rounds": values,
        }
        for name, values in taken.items()
    ]


def tokenizing(tokenizer: Tokenizer, model_dir: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """CPU of tokenizing alone, by `tokenizers` and by what the gateway uses, once it has seen some text."""
    encoder = encoder_of(model_dir / "tokenizer.json")
    rows = []
    for case in cases:
        if case.name.endswith("-token text"):
            *before, text = case.prompts
            for earlier in before:
                encoder.encode(earlier, add_special_tokens=True)
            begin_s = time.process_time()
            tokens = len(tokenizer.encode_batch_fast([text])[0].ids)
            middle_s = time.process_time()
            encoder.encode(text, add_special_tokens=True)
            row = {"case": case.name, "tokens": tokens, "encoder": type(encoder).__name__}
            rows.append(
                row
                | {
                    "tokenizers_ms": (middle_s - begin_s) * 1e3,
                    "encoder_ms": (time.process_time() - middle_s) * 1e3,
                }
            )
    return rows


def shown(steps: range, what: str) -> Any:
    return track(steps, what, console=Console(stderr=True), transient=True)


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per case: what every server used, and the gateway's share of vllm-router's beside the goal."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = table.setdefault(row["case"], {key: row[key] for key in ("case", "unit", "goal")})
        entry[row["server"]] = row["value"]
        if row["server"] == "gateway":
            entry["route"] = row.get("route", "")
    for entry in table.values():
        if "vllm-router" in entry and entry["goal"] is not None:
            entry["ratio"] = entry["gateway"] / entry["vllm-router"]
    return list(table.values())


def show(results: dict[str, Any]) -> None:
    table = Table("case", "route", "gateway", "vllm-router", "bare relay", "ratio", "goal")
    for entry in results["compared"]:
        servers = (
            f"{entry[name]:.3g} {entry['unit']}" if name in entry else "–"
            for name in ("gateway", "vllm-router", "bare relay")
        )
        ratio = f"{entry['ratio']:.2f}×" if "ratio" in entry else "–"
        goal = f"{entry['goal']:.1f}×" if entry["goal"] is not None else ""
        table.add_row(entry["case"], entry["route"], *servers, ratio, goal)
    Console().print(table)
    for row in results["tokenizing"]:
        print(
            f"{row['case']}: {row['tokens']} tokens take tokenizers {row['tokenizers_ms']:.1f} ms,"
            f" {row['encoder']} {row['encoder_ms']:.1f} ms"
        )
    for row in results["blocking"]:
        print(
            f"{row['case']}: the event loop stood still for {row['own_ms']:.1f} ms at most by its own doing (goal"
            f" {BLOCKED_GOAL_MS:g}), {row['longest_ms']:.1f} ms with what else the machine did"
        )
    print(f"load average {results['load_average']:.1f} on {results['cpus']} CPUs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--requests", type=int, default=200, help="short requests per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--router", default=shutil.which("vllm-router"), help="vllm-router's executable (default: from PATH)"
    )
    options = parser.parse_args()
    if options.router is None:
        print("vllm-router is not on PATH (pip install vllm-router): no comparison", file=sys.stderr)
    with tempfile.TemporaryDirectory() as home:
        results = uvloop.run(bench(Path(home), options.requests, options.rounds, options.router))
    results["compared"] = compared(results["rows"])
    results["load_average"], results["cpus"] = os.getloadavg()[0], os.cpu_count()
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
