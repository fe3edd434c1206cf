"""Stand-in engines of a small deployment in the test's own event loop, and a client that plays the gateway."""

import asyncio
import gc
import json
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.ports import free_ports

from prfaas.core.deployment import GATEWAY, TOOLS, Deployment, load_deployment
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.engines.synthetic.node import SyntheticNode
from prfaas.serving.engines.synthetic.text import Text
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.secret_files import create_key, load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest
from prfaas.serving.transport.protocol.wire import TransferStatus

MODEL = "stand-in"
CLUSTERS = {
    "far": ("prfaas", ("far-0", "far-1")),
    "home": ("pd", ("home-prefill", "home-0", "home-1")),
    "other": ("pd", ("other-prefill", "other-0")),
}


def write_deployment(
    home: Path,
    *,
    model: str = "qwen3-next",
    speedup: float = 50.0,
    far_speedup: float | None = None,
    page_digests: bool = True,
    transfer: dict[str, Any] | None = None,
    **engine: Any,
) -> Deployment:
    """Clusters of `CLUSTERS` with a wide link far->home, and home->far for prefixes.

    Args:
        home: Where its files are to be.
        speedup: Of the stand-ins' profiles.
        far_speedup: Of far's, where only its prefill must take long enough to be met in the middle.
        page_digests: Whether pages are digested.
        transfer: More of the file's `transfer`.
        engine: More of its `engine`.
    """
    directory = home / model
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(model)))
    write_tokenizer(directory, 65536)
    ports = iter(free_ports(17))
    clusters = [
        {
            "name": cluster,
            "kind": kind,
            "hardware": "synthetic",
            "profile": "internal-1t-h200" if kind == "prfaas" else "internal-1t-h20",
            "speedup": far_speedup if far_speedup and cluster == "far" else speedup,
            "instances": [
                {
                    "name": name,
                    "roles": ["prefill" if kind == "prfaas" or "prefill" in name else "decode"],
                    "host": "127.0.0.1",
                    "http_port": next(ports),
                    "kv_port": next(ports),
                }
                for name in names
            ],
        }
        for cluster, (kind, names) in CLUSTERS.items()
    ]
    file = home / "deployment.yaml"
    document = {
        "name": "synthetic-test",
        "model": {"served_name": MODEL, "path": str(directory), "max_model_len": 16384},
        "clusters": clusters,
        "links": [
            {"source": "far", "target": "home", "bandwidth": "4 Gbit/s", "connections": 2},
            {"source": "home", "target": "far", "bandwidth": "4 Gbit/s", "connections": 1},
        ],
        # An engine that starves on a busy machine is slow, not frozen.
        "control": {"silence_s": 30},
        "gateway": {
            "host": "127.0.0.1",
            "port": next(ports),
            "admin": {"port": next(ports)},
            "route_header": "full",
        },
        "transfer": {"page_digests": page_digests, **(transfer or {})},
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 8,
            "kv_cache_gib": 1,
            "staging": "24 MiB",
            "transfer_block": "256 KiB",
            **engine,
        },
    }
    file.write_text(json.dumps(document))
    deployment = load_deployment(file, state_dir=home)
    create_key(deployment.security.key_file)
    CertificateFolder(deployment).make()
    return deployment


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@dataclass
class Answer:
    status: int
    body: Any

    @property
    def ids(self) -> list[int]:
        assert self.status == 200, self.body
        ids: list[int] = self.body["choices"][0]["token_ids"]
        return ids

    @property
    def cached_tokens(self) -> int:
        cached: int = self.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


class World:
    """Running engines by name, and what a gateway does with them."""

    def __init__(self, deployment: Deployment, key: bytes, nodes: dict[str, SyntheticNode]) -> None:
        self.deployment = deployment
        self.key = key
        self.nodes = nodes
        self.session = aiohttp.ClientSession()
        self._observers: dict[str, Observer] = {}

    async def post(self, name: str, path: str, body: dict[str, Any]) -> Answer:
        url = self.deployment.instance(name).url + path
        async with self.session.post(url, json={"model": MODEL, **body}) as response:
            raw = await response.read()
            return Answer(response.status, json.loads(raw) if raw else None)

    async def get(self, name: str, path: str) -> str:
        async with self.session.get(self.deployment.instance(name).url + path) as response:
            assert response.status == 200
            return await response.text()

    async def metric(self, name: str, series: str) -> float:
        lines = (await self.get(name, "/metrics")).splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"vllm:{series}{{")]
        return float(value)

    async def complete(
        self,
        name: str,
        ids: Sequence[int],
        *tickets: str,
        cached_elsewhere: int | None = None,
        **fields: Any,
    ) -> Answer:
        params: dict[str, Any] = dict(zip(("prfaas", "prfaas_from"), tickets, strict=False))
        if cached_elsewhere is not None:
            params |= {"do_remote_prefill": True, "remote_prefill_cached_tokens": cached_elsewhere}
        body = {"prompt": list(ids), "max_tokens": 24, "return_token_ids": True, **fields}
        return await self.post(name, "/v1/completions", body | {"kv_transfer_params": params})

    def ticket(
        self,
        producer: str,
        consumer: str,
        ids: Sequence[int],
        *,
        skip_tokens: int = 0,
        salt: str = "",
        adapter: str = "",
    ) -> Ticket:
        return Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer=producer,
            consumer=consumer,
            num_tokens=len(ids),
            skip_tokens=skip_tokens,
            prompt_digest=prompt_digest(ids, salt, adapter),
            expires_at_s=time.time() + 60,
        )

    async def arrival(self, ticket: Ticket) -> TransferStatus:
        return await self._observer(ticket).wait(ticket.transfer_id, 120)

    async def abandon(self, ticket: Ticket) -> None:
        await self._observer(ticket).abandon(ticket.transfer_id, "the client has left")

    def _observer(self, ticket: Ticket) -> Observer:
        instance = self.deployment.instance(ticket.consumer)
        if instance.name not in self._observers:
            peer = f"{instance.name}/0"
            self._observers[instance.name] = Observer(
                GATEWAY, self.key, instance.host, instance.kv_port, peer
            )
        return self._observers[instance.name]

    async def stats(self, name: str) -> dict[str, Any]:
        instance = self.deployment.instance(name)
        observer = Observer(TOOLS, self.key, instance.host, instance.kv_port, f"{name}/0")
        try:
            return await observer.stats()
        finally:
            await observer.close()

    async def move(
        self, ticket: Ticket, ids: Sequence[int], *more: str, **fields: Any
    ) -> tuple[str, TransferStatus]:
        """The prefill hop of `ids` under `ticket`; the sealed ticket and what arrived."""
        sealed = ticket.seal(self.key)
        arrival = asyncio.create_task(self.arrival(ticket))
        answer = await self.complete(ticket.producer, ids, sealed, *more, max_tokens=1, **fields)
        assert answer.status == 200, answer.body
        return sealed, await arrival

    async def settled(self) -> None:
        """Nothing is left in staging, in transfers, in the caches' reservations or in the batch."""
        for _ in range(3000):
            left = [
                (
                    node.engine.endpoints.arena.used_blocks,
                    node.engine.cache.pool.used_ratio,
                    node.engine.clock.batch,
                    node.engine.counts.running + node.engine.counts.waiting,
                    len(node.engine.endpoints._sends),
                )
                for node in self.nodes.values()
                if not node.gone.is_set()
            ]
            if not any(map(any, left)):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"left over: {left}")

    async def close(self) -> None:
        for observer in self._observers.values():
            await observer.close()
        await self.session.close()


@asynccontextmanager
async def running(deployment: Deployment, *names: str) -> AsyncIterator[World]:
    """The engines `names` (default: all), up; afterwards no thread and no task of theirs is left."""
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    key = load_key(deployment.security.key_file)
    text = Text(deployment.model.path)
    chosen = names or tuple(instance.name for instance in deployment.instances)
    nodes = {name: SyntheticNode(deployment, deployment.instance(name), key, text) for name in chosen}
    world = World(deployment, key, nodes)
    try:
        for node in nodes.values():
            node.listen()
        for node in nodes.values():
            await node.serve()
        yield world
    finally:
        await world.close()
        for node in nodes.values():
            await node.close()
        # An engine's staging memory hangs in reference cycles: without this a run of all tests grows by gigabytes.
        nodes.clear()
        gc.collect()
    left = {task for task in asyncio.all_tasks() - tasks if task.get_name().startswith("synthetic")}
    assert not left, left
    ours = {thread for thread in set(threading.enumerate()) - threads if "prfaas" in thread.name}
    assert not ours, ours
