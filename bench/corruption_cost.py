"""What page digests cost (for `corruption.py`): the digest itself, the connector, and the time to first token."""

import asyncio
import json
import random
import secrets
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from corruption_world import Prompt, Rank
from prfaas.core.deployment import TOOLS, Deployment, load_deployment
from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.vllm.device_pages import layer_pages
from prfaas.serving.engines.vllm.layout import EngineGroup
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest

PAGE_BYTES = (4096, 32_768, 131_072, 1_048_576)
DIGESTED_BYTES = 64 << 20
LAYERS, BLOCKS, BLOCK_TOKENS, LAYER_PAGE_BYTES = 8, 64, 16, 65_536
PROMPT_TOKENS = (2_000, 8_000)
READY_S = 400.0


def digest_speed() -> dict[str, dict[int, float]]:
    """GB/s by device, then by page size; the fastest of five."""
    speeds: dict[str, dict[int, float]] = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for page_bytes in PAGE_BYTES:
            raw = torch.randint(0, 256, (DIGESTED_BYTES // page_bytes, page_bytes), dtype=torch.uint8)
            pages, blocks = layer_pages(raw.to(device)), list(range(len(raw)))
            took_s = []
            for _ in range(5):
                began_s = time.perf_counter()
                pages.sums(blocks).wait()
                took_s.append(time.perf_counter() - began_s)
            speeds.setdefault(device, {})[page_bytes] = round(DIGESTED_BYTES / min(took_s) / 1e9, 2)
    return speeds


def connector_ratios(rounds: int) -> dict[str, float]:
    """Medians of the paired ratios with/without: the prefill engine's steps, the load, and all of the way."""
    names = tuple(f"layer.{number}" for number in range(LAYERS))
    group = EngineGroup(0, GroupKind.FULL, BLOCK_TOKENS, 0, names)
    sizes = dict.fromkeys(names, LAYER_PAGE_BYTES)
    ranks = {
        digests: Rank(
            0,
            (group,),
            sizes,
            digests=digests,
            staging_bytes=64 << 20,
            transfer_block_bytes=1 << 20,
            num_blocks=BLOCKS + 1,
        )
        for digests in (True, False)
    }
    random_bytes = np.random.default_rng(1)
    took: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    try:
        for number in range(rounds + 1):
            for digests in (True, False) if number % 2 else (False, True):
                took[digests].append(_move(ranks[digests], random_bytes))
    finally:
        for rank in ranks.values():
            rank.close()
    parts = zip(*took[True][1:], strict=True), zip(*took[False][1:], strict=True)
    result = {}
    for name, on, off in zip(("prefill steps", "load", "all of the way"), *parts, strict=True):
        result[f"{name}, ms without"] = round(statistics.median(off) * 1e3, 2)
        result[name] = round(statistics.median(a / b for a, b in zip(on, off, strict=True)), 3)
    return result


def _move(rank: Rank, random_bytes: np.random.Generator) -> tuple[float, float, float]:
    """Seconds of the engine's hooks, of the load, and from the first hook to the end of the load."""
    num_tokens = BLOCKS * BLOCK_TOKENS
    table = {0: random.sample(range(1, BLOCKS + 1), BLOCKS)}
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=num_tokens,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=time.time() + 600,
    )
    prompt = Prompt(ticket, 0, tuple(range(256, num_tokens + 1, 256)), table, table)
    rank.compute(prompt, random_bytes)
    began_s = time.perf_counter()
    rank.queue(prompt)
    queued_s = time.perf_counter()
    rank.await_arrival(prompt)
    arrived_s = time.perf_counter()
    if not rank.load(prompt):
        raise RuntimeError("a transfer was not loaded")
    ended_s = time.perf_counter()
    return queued_s - began_s, ended_s - arrived_s, ended_s - began_s


def ttft_ratios(rounds: int) -> dict[str, dict[str, float]]:
    """Median of the paired ratios of TTFT with/without digests, by prompt length, on two pairs of real engines."""
    with tempfile.TemporaryDirectory() as home:
        deployments = {on: _deployment(Path(home), page_digests=on) for on in (True, False)}
        with RunningEngines(deployments[True]) as with_digests:
            with_digests.wait_ready(READY_S)
            with RunningEngines(deployments[False]) as without:
                without.wait_ready(READY_S)
                return asyncio.run(_ttft(deployments, rounds))


async def _ttft(deployments: dict[bool, Deployment], rounds: int) -> dict[str, dict[str, float]]:
    rng = random.Random(1)
    result = {}
    # The engines close connections that were idle for seconds, as one pair's are while the other's turn is.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = {on: _Hops(deployment, session) for on, deployment in deployments.items()}
        for num_tokens in PROMPT_TOKENS:
            took_s: dict[bool, list[float]] = {True: [], False: []}
            for number in range(rounds + 2):
                ids = rng.choices(range(256), k=num_tokens)
                for on in (True, False) if number % 2 else (False, True):
                    took_s[on].append(await clients[on].first_token_s(ids))
            ratios = [a / b for a, b in zip(took_s[True][2:], took_s[False][2:], strict=True)]
            quartiles = statistics.quantiles(ratios, n=4)
            fastest_s = {on: min(each[2:]) for on, each in took_s.items()}
            result[f"{num_tokens} tokens"] = {
                "ratio": round(statistics.median(ratios), 4),
                "quartile 1": round(quartiles[0], 4),
                "quartile 3": round(quartiles[2], 4),
                # Of all that can be said on a machine with other work, this depends on it least.
                "ratio of the fastest": round(fastest_s[True] / fastest_s[False], 4),
                "fastest without, s": round(fastest_s[False], 4),
            }
        for client in clients.values():
            await client.check()
            await client.close()
    return result


class _Hops:
    """Prefill on one engine, decode on the other, as the gateway does it."""

    def __init__(self, deployment: Deployment, session: aiohttp.ClientSession) -> None:
        self._deployment = deployment
        self._session = session
        self._key = load_key(deployment.security.key_file)
        home = deployment.instance("home")
        self._observer = Observer(TOOLS, self._key, home.host, home.kv_port, "home/0")

    async def close(self) -> None:
        await self._observer.close()

    async def check(self) -> None:
        """A request whose transfer was not loaded measures something else."""
        async with self._session.get(f"{self._deployment.instance('home').url}/metrics") as response:
            lines = (await response.text()).splitlines()
        for name in ("loads_failed", "digest_mismatches"):
            found = sum(
                float(line.split()[-1]) for line in lines if line.startswith(f"vllm:prfaas_{name}_total{{")
            )
            if found:
                raise RuntimeError(f"{name} is {found:g} at the decode engine")

    async def first_token_s(self, ids: list[int]) -> float:
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="east",
            consumer="home",
            num_tokens=len(ids) - 1,
            skip_tokens=0,
            prompt_digest=prompt_digest(ids[:-1]),
            expires_at_s=time.time() + 300,
        )
        params = {"kv_transfer_params": {"prfaas": ticket.seal(self._key)}}
        began_s = time.perf_counter()
        arrival = asyncio.create_task(self._observer.wait(ticket.transfer_id, 300))
        await self._post("east", ids[:-1], params)
        status = await arrival
        if status.phase != "complete":
            raise RuntimeError(f"a transfer failed: {status.reason}")
        await self._post("home", ids, params)
        return time.perf_counter() - began_s

    async def _post(self, name: str, ids: list[int], fields: dict[str, Any]) -> None:
        url = f"{self._deployment.instance(name).url}/v1/completions"
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0, **fields}
        async with self._session.post(url, json=body) as response:
            await response.read()
            response.raise_for_status()


def _deployment(home: Path, *, page_digests: bool) -> Deployment:
    directory = home / ("on" if page_digests else "off")
    directory.mkdir()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    ports = iter([each.getsockname()[1] for each in sockets])
    for each in sockets:
        each.close()

    def cluster(name: str, kind: str, roles: list[str]) -> dict[str, object]:
        places = {"http_port": next(ports), "kv_port": next(ports)}
        instance = {"name": name, "roles": roles, "host": "127.0.0.1", **places}
        return {"name": f"{name}-cluster", "kind": kind, "hardware": "cpu", "instances": [instance]}

    document = {
        "name": f"digests-{directory.name}",
        "model": {"served_name": "tiny", "tiny": "qwen3-next", "max_model_len": 16384},
        "clusters": [cluster("east", "prfaas", ["prefill"]), cluster("home", "pd", ["prefill", "decode"])],
        "links": [{"source": "east-cluster", "target": "home-cluster", "bandwidth": "10 Gbit/s"}],
        "gateway": {"host": "127.0.0.1", "port": next(ports)},
        "engine": {"max_num_batched_tokens": 2048, "kv_cache_gib": 1, "staging": "64 MiB"},
        "transfer": {"page_digests": page_digests},
    }
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_deployment(path, state_dir=home)
