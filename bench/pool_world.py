"""Pools that run for benches: a deployment with a pool, its daemon in a process of its own, and pages of a model."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ports import free_ports
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout
from prfaas.serving.engines.vllm.pages import HostPages
from prfaas.serving.engines.vllm.rank_pages import pool_geometry
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.protocol import SessionKind
from prfaas.serving.pool.running import RunningPools

MIB = 1 << 20
TENANT = bytes(8)
WAIT_S = 120.0
BLOCK_TOKENS = 16


def pooled_deployment(
    folder: Path,
    name: str,
    *,
    memory: str,
    ssd: str | int = 0,
    model: str = "qwen3-next",
    with_pool: bool = True,
) -> Deployment:
    """One engine that prefills and decodes, and its pool."""
    ports = free_ports(4)
    instance = {
        "name": f"{name}-0",
        "roles": ["prefill", "decode"],
        "host": "127.0.0.1",
        "http_port": ports[0],
        "kv_port": ports[1],
    }
    cluster: dict[str, object] = {"name": name, "kind": "pd", "hardware": "cpu", "instances": [instance]}
    if with_pool:
        cluster["pool"] = {"memory": memory, "ssd": ssd, "kv_port": ports[2]}
    document = {
        "name": name,
        "model": {"served_name": "tiny", "tiny": model, "max_model_len": 16384},
        "clusters": [cluster],
        "gateway": {"host": "127.0.0.1", "port": ports[3]},
        "engine": {"max_num_batched_tokens": 2048, "kv_cache_gib": 1, "staging": "16 MiB"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_deployment(path, state_dir=folder / "state")


class Blocks:
    """The KVCache of a dense model in this process, and its pages in a pool."""

    def __init__(self, page_bytes: int, count: int, layers: int = 4) -> None:
        self.page_bytes, self.count = page_bytes, count
        names = tuple(f"layer.{number}" for number in range(layers))
        group = EngineGroup(0, GroupKind.FULL, BLOCK_TOKENS, 0, names)
        rng = np.random.default_rng(1)
        # vLLM's block 0 is never copied.
        self.ids = tuple(range(1, count + 1))
        shape = (count + 1, page_bytes // layers)
        self.memory = {name: rng.integers(0, 256, shape, dtype=np.uint8) for name in names}
        self.layout = KvLayout(
            (group,), {name: [HostPages(torch.from_numpy(each))] for name, each in self.memory.items()}
        )
        self.geometry: PoolGeometry = pool_geometry(self.layout, f"bench {page_bytes}", 1)
        self.nbytes = page_bytes * count

    def chain(self, prompt: int) -> KeyChain:
        """The keys of a prompt of as many blocks; each prompt has its own."""
        chain = KeyChain(self.geometry.step_tokens, "", "")
        chain.extend(self.token_ids(prompt))
        return chain

    def token_ids(self, prompt: int) -> list[int]:
        return [prompt, *range(self.count * BLOCK_TOKENS - 1)]

    def pages(self, prompt: int) -> list[tuple[bytes, PageIdentity | None]]:
        """What is reserved for it."""
        chain, ids = self.chain(prompt), np.array(self.token_ids(prompt), "<u4")
        return [
            (
                page_id(key, 0),
                PageIdentity(
                    chain.keys[block - 1] if block else b"",
                    ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes(),
                    "",
                    "",
                ),
            )
            for block, key in enumerate(chain.keys)
        ]


@contextmanager
def running_pool(deployment: Deployment) -> Iterator[RunningPools]:
    """Its daemon, ready."""
    with RunningPools(deployment) as pools:
        pools.wait_ready()
        yield pools


@contextmanager
def session(deployment: Deployment, kind: SessionKind, geometry: PoolGeometry | None) -> Iterator[PoolClient]:
    """A client of the only pool, whose memory has been touched."""
    (node,) = deployment.pools
    client = PoolClient(deployment.pool_socket(node), kind, geometry, engine_id="bench")
    try:
        if not client.connect():
            raise RuntimeError(f"the pool refuses this bench; see {deployment.logs_dir}")
        await_true(lambda: _is_provided(client))
        yield client
    finally:
        client.close()


def _is_provided(client: PoolClient) -> bool:
    figures = client.stats()
    return figures is not None and (
        "memory_bytes" not in figures or figures["provided_bytes"] == figures["memory_bytes"]
    )


def await_true(what: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for it; RuntimeError if it does not come."""
    until_s = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until_s:
            raise RuntimeError("what was waited for did not happen")
        time.sleep(0.0002)
