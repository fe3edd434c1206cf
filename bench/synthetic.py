"""What stand-in engines cost: requests per second of one process, CPU per request and per MB of KVCache.

    python bench/synthetic.py [--json FILE] [--engines N] [--seconds S]

One process runs N stand-ins (half prefill, half decode) at 10,000 times the speed of their profile, so that what is
measured is the stand-in itself and never the time that it pretends. The load comes from this process, as token ids.
Both share the machine's cores: requests per second are a lower bound, CPU per request is the steady figure.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from prfaas.core.deployment import TOOLS, Deployment, Instance, load_deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest

MODEL = "qwen3-next"
CONCURRENT = 16
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """`mb`: KVCache moved per request, in 10^6 bytes."""

    case: str
    requests: int
    per_s: float
    cpu_ms: float
    load_cpu_ms: float
    mb: float


def write_deployment(home: Path, engines: int) -> Deployment:
    """One PrfaaS and one PD cluster; links too wide to matter."""
    directory = home / MODEL
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_config(MODEL)))
    write_tokenizer(directory, 1 << 20)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * engines + 1)]
    ports = iter([each.getsockname()[1] for each in sockets])
    for each in sockets:
        each.close()
    clusters = [
        {
            "name": name,
            "kind": kind,
            "hardware": "synthetic",
            "profile": profile,
            "speedup": 10_000,
            "instances": [
                {
                    "name": f"{name}-{index}",
                    "roles": [role],
                    "host": "127.0.0.1",
                    "http_port": next(ports),
                    "kv_port": next(ports),
                }
                for index in range(engines // 2)
            ],
        }
        for name, kind, role, profile in (
            ("far", "prfaas", "prefill", "internal-1t-h200"),
            ("home", "pd", "decode", "internal-1t-h20"),
        )
    ]
    document = {
        "name": "bench",
        "model": {"served_name": MODEL, "path": str(directory), "max_model_len": 140_000},
        "clusters": clusters,
        "links": [{"source": "far", "target": "home", "bandwidth": "400 Gbit/s", "connections": 2}],
        "gateway": {
            "host": "127.0.0.1",
            "port": next(ports),
            "route_header": "full",
            "first_token": "decode",
        },
        "engine": {"max_num_seqs": 256, "staging": "160 MiB", "kv_cache_gib": 1},
    }
    path = home / "bench.yaml"
    path.write_text(json.dumps(document))
    return load_deployment(path, state_dir=home)


def cpu_s(pid: int) -> float:
    """Seconds on a CPU of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A client of the engines that plays the gateway."""

    def __init__(
        self, deployment: Deployment, pid: int, seconds: float, session: aiohttp.ClientSession
    ) -> None:
        self._deployment = deployment
        self._pid = pid
        self._seconds = seconds
        self._session = session
        self._key = load_key(deployment.security.key_file)
        self._random = random.Random(0)
        self._observers: dict[str, Observer] = {}
        self._prefills = deployment.with_role("prefill")
        self._decodes = deployment.with_role("decode")

    async def measure(self, case: str, request: Callable[[int], Awaitable[int]]) -> Row:
        """Run `request` (its number → bytes moved) from several clients at once for a while."""
        done, moved = 0, 0
        await request(0)
        until_s = time.perf_counter() + self._seconds

        async def client(number: int) -> None:
            nonlocal done, moved
            while time.perf_counter() < until_s:
                moved_bytes = await request(number)
                moved += moved_bytes
                number += CONCURRENT
                done += 1

        start_s, theirs_s, ours_s = time.perf_counter(), cpu_s(self._pid), time.process_time()
        await asyncio.gather(*map(client, range(1, CONCURRENT + 1)))
        wall_s = time.perf_counter() - start_s
        return Row(
            case,
            done,
            done / wall_s,
            (cpu_s(self._pid) - theirs_s) / done * 1e3,
            (time.process_time() - ours_s) / done * 1e3,
            moved / done / 1e6,
        )

    async def close(self) -> None:
        for observer in self._observers.values():
            await observer.close()

    def local(self, num_tokens: int, **fields: Any) -> Callable[[int], Awaitable[int]]:
        """Requests that an engine prefills and decodes by itself."""

        async def request(number: int) -> int:
            ids = self._prompt(num_tokens, number)
            await self._post(self._decodes[number % len(self._decodes)], ids, ANSWER_TOKENS, **fields)
            return 0

        return request

    def offloaded(self, num_tokens: int) -> Callable[[int], Awaitable[int]]:
        """Requests that are prefilled elsewhere: ticket, prefill, transfer, decode."""

        async def request(number: int) -> int:
            ids = self._prompt(num_tokens, number)
            source = self._prefills[number % len(self._prefills)]
            target = self._decodes[number % len(self._decodes)]
            ticket = Ticket(
                transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
                producer=source.name,
                consumer=target.name,
                num_tokens=len(ids) - 1,
                skip_tokens=0,
                prompt_digest=prompt_digest(ids[:-1]),
                expires_at_s=time.time() + 60,
            )
            params = {"kv_transfer_params": {"prfaas": ticket.seal(self._key)}}
            arrival = asyncio.create_task(self._observer(target).wait(ticket.transfer_id, 60))
            await self._post(source, ids[:-1], 1, **params)
            status = await arrival
            if status.phase != "complete":
                raise RuntimeError(f"a transfer failed: {status.reason}")
            await self._post(target, ids, ANSWER_TOKENS, **params)
            return status.total_bytes

        return request

    def _prompt(self, num_tokens: int, number: int) -> list[int]:
        # All different from the first token on: no prefix is shared.
        return [number % 256, number // 256 % 256, *self._random.choices(range(256), k=num_tokens - 2)]

    def _observer(self, instance: Instance) -> Observer:
        if instance.name not in self._observers:
            peer = f"{instance.name}/0"
            self._observers[instance.name] = Observer(TOOLS, self._key, instance.host, instance.kv_port, peer)
        return self._observers[instance.name]

    async def _post(self, instance: Instance, ids: list[int], tokens: int, **fields: Any) -> None:
        body = orjson.dumps({"model": MODEL, "prompt": ids, "max_tokens": tokens, **fields})
        async with self._session.post(f"{instance.url}/v1/completions", data=body) as response:
            await response.read()
            response.raise_for_status()


async def run(deployment: Deployment, pid: int, seconds: float) -> list[Row]:
    rows = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        bench = Bench(deployment, pid, seconds, session)
        cases = [
            ("30 tokens", bench.local(30)),
            ("30 tokens, streamed", bench.local(30, stream=True)),
            ("8K tokens", bench.local(8192)),
            ("128K tokens", bench.local(131_072)),
            ("8K tokens, offloaded", bench.offloaded(8192)),
            ("128K tokens, offloaded", bench.offloaded(131_072)),
        ]
        for case, request in track(cases, console=Console(stderr=True), transient=True):
            rows.append(await bench.measure(case, request))
        await bench.close()
    return rows


def memory_mb(pid: int) -> float:
    """Resident memory of a process, in 10^6 bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--engines", type=int, default=8, help="stand-ins in the process")
    parser.add_argument("--seconds", type=float, default=5.0, help="load per case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        deployment = write_deployment(Path(home), options.engines)
        with RunningEngines(deployment, stand_ins_per_process=options.engines) as engines:
            engines.wait_ready(60)
            pid = engines.pid(engines.names[0])
            before_s = cpu_s(pid)
            time.sleep(3.0)
            idle_share, start_mb = (cpu_s(pid) - before_s) / 3.0, memory_mb(pid)
            rows = uvloop.run(run(deployment, pid, options.seconds))
            end_mb = memory_mb(pid)
    table = Table(
        "case", "requests", "requests/s", "CPU ms/request", "MB of KV", "CPU ms/MB", "client's CPU ms"
    )
    for row in rows:
        per_mb = f"{row.cpu_ms / row.mb:.2f}" if row.mb else ""
        mb = f"{row.mb:.1f}" if row.mb else ""
        table.add_row(
            row.case,
            str(row.requests),
            f"{row.per_s:.0f}",
            f"{row.cpu_ms:.2f}",
            mb,
            per_mb,
            f"{row.load_cpu_ms:.2f}",
        )
    Console(width=110).print(table)
    staging_mb = deployment.engine.staging_bytes / 1e6
    print(
        f"{options.engines} engines: {start_mb / options.engines:.0f} MB each at the start, "
        f"{end_mb / options.engines:.0f} MB after the load, {staging_mb:.0f} MB of it staging; "
        f"{idle_share * 100:.1f} % of a core when idle"
    )
    if options.json is not None:
        facts = {"engines": options.engines, "start_mb": start_mb, "end_mb": end_mb, "idle_share": idle_share}
        rows_json = [{field: getattr(row, field) for field in row.__slots__} for row in rows]
        options.json.write_text(json.dumps({"rows": rows_json, **facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
