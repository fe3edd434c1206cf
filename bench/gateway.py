"""CPU time of the gateway per request and per relayed chunk, before stand-in engines in another process.

    python bench/gateway.py [--json FILE] [--requests N]

The gateway runs in a process of its own, whose CPU time is read from /proc; engines and load share another one. Every
request is a real one: tokenized, ticketed, prefilled at a producer, its bytes moved by the real transport, decoded.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing as mp
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from prfaas.deployment import Deployment, Routing
from prfaas.gateway import serve_gateway
from prfaas.transport.keyfile import create_key

# The stand-in engine is the tests'; the product has none.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from gateway.stand_in import StandInEngine, write_tokenizer
from gateway.world import deployment_of

THRESHOLD_TOKENS = 1000
STREAM_CHUNKS = 4000


def words(count: int, seed: int) -> str:
    """English-like text: about one token a word for the tokenizer trained on it, 4.6 bytes a token."""
    lexicon_rng = random.Random(0)
    lexicon = [
        "".join(lexicon_rng.choices("etaoinshrdlu", k=lexicon_rng.choice((2, 3, 3, 4, 5))))
        for _ in range(3000)
    ]
    return " ".join(random.Random(seed).choices(lexicon, k=count))


def train_tokenizer(directory: Path) -> None:
    write_tokenizer(directory)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words(40_000, seed=1)], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def gateway_process(deployment: Deployment, pipe: Connection) -> None:
    uvloop.run(serve_gateway(deployment, ready=pipe.send))


@dataclasses.dataclass
class Case:
    name: str
    prompts: list[Any]
    path: str = "/v1/completions"


def baseline_process(prefill_url: str, decode_url: str, pipe: Connection) -> None:
    """The least that two hops cost with this HTTP library on this machine: no tokenizing, no JSON, no transfer."""

    async def serve() -> None:
        session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

        async def relay(request: web.Request) -> web.Response:
            body = await request.read()
            for url in (prefill_url, decode_url):
                async with session.post(
                    url, data=body, headers={"Content-Type": "application/json"}
                ) as answer:
                    whole = await answer.read()
            return web.Response(
                body=whole, headers={"x-prfaas-route": "none", "Content-Type": "application/json"}
            )

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(serve())


async def measure_baseline(engines: dict[str, StandInEngine], cases: list[Case]) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    urls = [f"http://127.0.0.1:{engines[name].http_port}/v1/completions" for name in ("local", "decode")]
    process = context.Process(target=baseline_process, args=(*urls, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    port = await asyncio.to_thread(ours.recv)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            return [await measure(client, process.pid, case) for case in cases]
    finally:
        process.terminate()
        process.join()


def cpu_s(pid: int) -> float:
    """Seconds on a CPU of all live threads of `pid` (Linux keeps them in nanoseconds)."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


async def measure(client: aiohttp.ClientSession, pid: int, case: Case) -> dict[str, Any]:
    async def one(prompt: Any) -> str:
        body = {"messages": prompt} if case.path.endswith("chat/completions") else {"prompt": prompt}
        async with client.post(case.path, json=body) as response:
            await response.read()
            response.raise_for_status()
            return response.headers["x-prfaas-route"]

    first = await one(case.prompts[0])
    before_s, start_s = cpu_s(pid), time.perf_counter()
    for prompt in track(case.prompts[1:], case.name, console=Console(stderr=True), transient=True):
        await one(prompt)
    wall_s = time.perf_counter() - start_s
    count = len(case.prompts) - 1
    return {
        "case": case.name,
        "requests": count,
        "route": first.split(";")[0],
        "cpu_ms_per_request": (cpu_s(pid) - before_s) / count * 1e3,
        "wall_ms_per_request": wall_s / count * 1e3,
    }


async def measure_stream(client: aiohttp.ClientSession, pid: int, decode: StandInEngine) -> float:
    """CPU microseconds per relayed chunk."""

    async def stream(chunks: int) -> float:
        decode.chunks = chunks
        before_s = cpu_s(pid)
        async with client.post("/v1/completions", json={"prompt": [5] * 10, "stream": True}) as response:
            async for _ in response.content.iter_any():
                pass
        return cpu_s(pid) - before_s

    await stream(100)
    base_s = await stream(0)
    # One chunk per turn of the engine's loop, as tokens come from a GPU.
    return (await stream(STREAM_CHUNKS) - base_s) / STREAM_CHUNKS * 1e6


async def bench(home: Path, requests: int) -> dict[str, Any]:
    model_dir = home / "model"
    train_tokenizer(model_dir)
    key = create_key(home / "key")
    producers = ("remote", "local")
    engines = {
        name: StandInEngine(
            name, model_dir, key, producers=producers if name == "decode" else (), staging_bytes=64 << 20
        )
        for name in (*producers, "decode")
    }
    for engine in engines.values():
        await engine.start()
    for name in producers:
        engines[name].connect([engines["decode"]])
    deployment = dataclasses.replace(
        deployment_of(home, engines, model_dir), routing=Routing("threshold", THRESHOLD_TOKENS)
    )
    deployment = dataclasses.replace(
        deployment, model=dataclasses.replace(deployment.model, max_model_len=1 << 20)
    )

    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=gateway_process, args=(deployment, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    port = await asyncio.to_thread(ours.recv)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            few = max(requests // 20, 4)
            text_32k = [words(32_000, seed) for seed in range(few)]
            text_128k = [words(128_000, seed) for seed in range(few)]
            cases = [
                Case("short text", [f"{i} {words(30, i)}" for i in range(requests)]),
                Case(
                    "short chat",
                    [[{"role": "user", "content": f"{i} {words(30, i)}"}] for i in range(requests)],
                    "/v1/chat/completions",
                ),
                Case("32K-token text", text_32k),
                Case("128K-token text", text_128k),
                Case("32K token ids", [tokenizer.encode(text).ids for text in text_32k]),
                Case("128K token ids", [tokenizer.encode(text).ids for text in text_128k]),
            ]
            rows = [await measure(client, process.pid, case) for case in cases]
            bare = [
                Case(f"bare two-hop relay, {c.name}", c.prompts) for c in cases if c.name.endswith("text")
            ]
            rows += await measure_baseline(engines, bare)
            for name, text in (("32K", text_32k[0]), ("128K", text_128k[0])):
                start_s = time.process_time()
                tokens = len(tokenizer.encode_batch_fast([text])[0].ids)
                cost_ms = (time.process_time() - start_s) * 1e3
                rows.append(
                    {"case": f"(of it tokenizing {name}: {tokens} tokens)", "cpu_ms_per_request": cost_ms}
                )
            chunk_us = await measure_stream(client, process.pid, engines["decode"])
    finally:
        process.terminate()
        process.join()
        for engine in engines.values():
            await engine.stop()
    return {"rows": rows, "cpu_us_per_relayed_chunk": chunk_us}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--requests", type=int, default=400, help="short requests; long ones are a twentieth")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        results = uvloop.run(bench(Path(home), options.requests))
    table = Table("case", "route", "requests", "CPU ms/request", "wall ms/request")
    for row in results["rows"]:
        table.add_row(
            row["case"],
            row.get("route", ""),
            str(row.get("requests", "")),
            f"{row['cpu_ms_per_request']:.2f}",
            f"{row['wall_ms_per_request']:.2f}" if "wall_ms_per_request" in row else "",
        )
    Console().print(table)
    print(f"relaying: {results['cpu_us_per_relayed_chunk']:.1f} µs of CPU per chunk")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
