"""CPU time of the gateway per request and per relayed chunk, beside vllm-router, before the same stand-in engines.

    python bench/gateway.py [--json FILE] [--requests N] [--rounds N] [--router PATH] [--against TREE]

Every server runs in a process of its own, whose CPU time is read from /proc; engines and load share another one. All
run at once and are asked in turns, so that what else the machine does is the same for all; the figures are medians of
the rounds. Every request to the gateway is a real one: tokenized, hashed, routed by the live control plane, ticketed,
prefilled at a producer, its bytes moved by the real transport, decoded. vllm-router (in PD mode, where its executable
is found) sends the whole body to both engines and neither tokenizes nor hashes it: with text prompts it does less.
`--against` has the gateway of another checkout beside it, and their ratio round by round.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
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
from prfaas.serving.gateway.prompts.tokenizers import encoder_of
from prfaas.serving.secret_files import create_key

# The stand-in engine is the tests'; the product has none.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.serving.gateway.stand_in import StandInEngine, write_tokenizer

BENCH = Path(__file__).resolve().parent
IDLE_S = 3.0
BLOCKED_GOAL_MS = 5.0
GOALS = {"short": 1.5, "32K": 1.0, "128K": 1.0, "chunk": 1.5}


class Gateway:
    """A gateway in a process of its own, of this tree or of another one."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.port = port
        self.pid = process.pid

    async def standstills(self, while_: Awaitable[object]) -> tuple[float, float]:
        """Seconds of the longest standstill of its event loop meanwhile, and of the longest of its own doing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"watch\n")
        await while_
        self._process.stdin.write(b"tell\n")
        longest_s, own_s = json.loads(await self._process.stdout.readline())
        return longest_s, own_s


@asynccontextmanager
async def gateway(
    tree: Path, home: Path, model_dir: Path, engines: dict[str, StandInEngine]
) -> AsyncIterator[Gateway]:
    ports = json.dumps({name: (engine.http_port, engine.kv_port) for name, engine in engines.items()})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(BENCH / "gateway_process.py"), str(home), str(model_dir), ports),
        env={**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Gateway(process, int(await process.stdout.readline()))
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def running_engines(home: Path, model_dir: Path) -> AsyncIterator[dict[str, StandInEngine]]:
    """Stand-in engines: a remote and a local one that prefill, one that decodes."""
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
    try:
        yield engines
    finally:
        for engine in engines.values():
            await engine.stop()


async def bench(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    model_dir = write_tokenizer(home / "model")
    texts = Texts()
    tokenizer = texts.tokenizer()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    cases = cases_of(tokenizer, texts, options.requests, options.rounds)
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running_engines(home, model_dir))
        ours = await stack.enter_async_context(gateway(BENCH.parent, home, model_dir, engines))
        servers = [Server("gateway", ours.port, ours.pid)]
        if options.against is not None:
            (home / "other").mkdir()
            shutil.copy2(home / "key", home / "other" / "key")
            other = gateway(options.against.resolve(), home / "other", model_dir, engines)
            theirs = await stack.enter_async_context(other)
            servers.append(Server("other tree", theirs.port, theirs.pid))
        urls = [f"http://127.0.0.1:{engines[name].http_port}" for name in ("local", "decode")]
        if options.router is not None:
            router = await stack.enter_async_context(vllm_router(options.router, *urls))
            servers.append(Server("vllm-router", *router))
        servers.append(Server("bare relay", *await stack.enter_async_context(bare_relay(*urls))))
        rows = [await idle(server) for server in servers]
        for case in cases:
            rows += await compare(servers, case, options.rounds, engines)
        rows += await compare_streams(servers, options.rounds)
        # A run of its own, since watching costs CPU time.
        blocking = []
        for case in cases:
            backwards = dataclasses.replace(case, prompts=case.prompts[::-1])
            longest_s, own_s = await ours.standstills(put(servers[0], backwards, 0))
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
        for server in in_turn(servers, turn):
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
    for turn in shown(range(rounds), "streams"):
        for server in in_turn(servers, turn):
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


def in_turn(servers: list[Server], turn: int) -> list[Server]:
    """Another one is the first in each round."""
    first = turn % len(servers)
    return servers[first:] + servers[:first]


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
    ours: list[float] = []
    for row in rows:
        entry = table.setdefault(row["case"], {key: row[key] for key in ("case", "unit", "goal")})
        entry[row["server"]] = row["value"]
        if row["server"] == "gateway":
            entry["route"] = row.get("route", "")
            ours = row.get("rounds", [row["value"]])
        elif row["server"] == "other tree":
            # Round by round, since what else the machine does changes.
            theirs = row.get("rounds", [row["value"]])
            entry["against"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    for entry in table.values():
        if "vllm-router" in entry and entry["goal"] is not None:
            entry["ratio"] = entry["gateway"] / entry["vllm-router"]
    return list(table.values())


def show(results: dict[str, Any]) -> None:
    there = {row["server"] for row in results["rows"]}
    names = [name for name in ("gateway", "other tree", "vllm-router", "bare relay") if name in there]
    table = Table("case", "route", *names, "to other", "to router", "goal")
    for entry in results["compared"]:
        servers = (f"{entry[name]:.3g} {entry['unit']}" if name in entry else "–" for name in names)
        against = f"{entry['against']:.2f}×" if "against" in entry else "–"
        ratio = f"{entry['ratio']:.2f}×" if "ratio" in entry else "–"
        goal = f"{entry['goal']:.1f}×" if entry["goal"] is not None else ""
        table.add_row(entry["case"], entry["route"], *servers, against, ratio, goal)
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
    parser.add_argument("--against", type=Path, metavar="TREE", help="a checkout, for example a git worktree")
    options = parser.parse_args()
    if options.router is None:
        print("vllm-router is not on PATH (pip install vllm-router): no comparison", file=sys.stderr)
    with tempfile.TemporaryDirectory() as home:
        results = uvloop.run(bench(Path(home), options))
    results["compared"] = compared(results["rows"])
    results["load_average"], results["cpus"] = os.getloadavg()[0], os.cpu_count()
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
