"""What storing costs a real engine, and how soon a prompt that the pool has begins to be answered (for `pool.py`)."""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from pool_world import await_true, pooled_deployment, running_pool
from prfaas.core.deployment import Deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.pool.client import PoolClient

Row = tuple[str, float, str] | tuple[str, float, str, float | None, bool]
READY_S = 400.0
REQUEST_S = 300.0
STEP_PROMPT_TOKENS, STEP_ANSWER_TOKENS = 2000, 32
# Paired times of single requests vary by more than what is to be seen.
STEP_ROUNDS = 6
SETTLED_S = 0.5
# Hits at 6,000 tokens: dense models load six times the bytes, and their goal is not to be slower.
HYBRID_GOAL, LEAST_GOAL, GOAL_TOKENS = 0.25, 1.05, 6000
HYBRIDS = ("qwen3-next", "gpt-oss", "mimo-v2-flash")


class Engine:
    """One running engine."""

    def __init__(self, deployment: Deployment) -> None:
        self._url = deployment.instances[0].url
        self._session = requests.Session()
        # Environments with a proxy for the outside would send it what is for this machine.
        self._session.trust_env = False

    def answer(self, ids: Sequence[int], max_tokens: int = 1, **fields: Any) -> tuple[float, dict[str, Any]]:
        """Seconds of the whole answer, and its body; `fields` go into the request."""
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        began_s = time.perf_counter()
        response = self._session.post(f"{self._url}/v1/completions", json=body, timeout=REQUEST_S)
        took_s = time.perf_counter() - began_s
        response.raise_for_status()
        return took_s, response.json()

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""

        def is_empty() -> bool:
            # Blocks of a finished request are held while they are stored.
            return self._session.post(f"{self._url}/reset_prefix_cache", timeout=REQUEST_S).status_code == 200

        await_true(is_empty)


@contextmanager
def running_engine(deployment: Deployment) -> Iterator[Engine]:
    """Its only engine, ready and warm."""
    with RunningEngines(deployment, extra_env={"VLLM_SERVER_DEV_MODE": "1"}) as engines:
        engines.wait_ready(READY_S)
        engine = Engine(deployment)
        for length in (300, 3000):
            engine.answer(random_ids(random.Random(length), length), 4)
        yield engine


def random_ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(256), k=count)


def step_cost(folder: Path, rounds: int) -> list[Row]:
    """Medians of the paired ratios of a prefill's time and of a decode step's, storing and without a pool."""
    rng = random.Random(1)
    pooled = pooled_deployment(folder, "pooled", memory="512 MiB")
    plain = pooled_deployment(folder, "plain", memory="512 MiB", with_pool=False)
    took: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode step": []}
    with running_pool(pooled), running_engine(pooled) as storing, running_engine(plain) as other:
        for number in range(rounds * STEP_ROUNDS + 2):
            ids = random_ids(rng, STEP_PROMPT_TOKENS)
            pair = {}
            for engine in (storing, other) if number % 2 else (other, storing):
                prefill_s, _ = engine.answer(ids)
                # The prompt is cached now, so that this is decoding.
                whole_s, _ = engine.answer(ids, STEP_ANSWER_TOKENS)
                pair[engine] = (prefill_s, whole_s / STEP_ANSWER_TOKENS)
            if number > 1:
                for index, name in enumerate(took):
                    took[name].append((pair[storing][index], pair[other][index]))
        stored = _stored_pages(pooled)
    if not stored:
        raise RuntimeError("the engine has stored nothing")
    rows: list[Row] = [("pages stored meanwhile", float(stored), "")]
    for name, pairs in took.items():
        ratios = [with_pool / without for with_pool, without in pairs]
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append((f"{name} without a pool", statistics.median(b for _, b in pairs) * 1e3, "ms"))
        rows.append((f"{name}, storing / without", statistics.median(ratios), "ratio", 1.02, False))
        rows.append((f"{name}, quartile 1", quartiles[0], "ratio"))
        rows.append((f"{name}, quartile 3", quartiles[2], "ratio"))
        fastest = min(a for a, _ in pairs) / min(b for _, b in pairs)
        rows.append((f"{name}, the fastest of each", fastest, "ratio"))
    return rows


def ttft(folder: Path, models: Sequence[str], lengths: Sequence[int], rounds: int) -> list[Row]:
    """TTFT of a pool hit and of computing, by model and length; wrong answers end the bench."""
    rows: list[Row] = []
    for model in models:
        deployment = pooled_deployment(folder, model.replace("-", ""), memory="1 GiB", model=model)
        with running_pool(deployment), running_engine(deployment) as engine:
            rng = random.Random(2)
            for length in lengths:
                found = [_hit(deployment, engine, random_ids(rng, length)) for _ in range(rounds)]
                computed_s, hit_s, cached, equal = zip(*found, strict=True)
                ratio = statistics.median(hit / cold for cold, hit in zip(computed_s, hit_s, strict=True))
                name = f"{model}, {length:,} tokens"
                goal = HYBRID_GOAL if length >= GOAL_TOKENS and model in HYBRIDS else LEAST_GOAL
                rows.append((f"{name}: computed", statistics.median(computed_s) * 1e3, "ms"))
                rows.append((f"{name}: pool hit", statistics.median(hit_s) * 1e3, "ms"))
                rows.append((f"{name}: cached tokens", statistics.median(cached), ""))
                rows.append((f"{name}: hit / computed", ratio, "ratio", goal, False))
                rows.append((f"{name}: same first token", sum(equal), f"of {rounds}"))
    return rows


def _hit(deployment: Deployment, engine: Engine, ids: list[int]) -> tuple[float, float, int, bool]:
    computed_s, first = engine.answer(ids)
    settle(deployment)
    engine.forget()
    hit_s, again = engine.answer(ids)
    details = again["usage"].get("prompt_tokens_details") or {}
    same = first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    return computed_s, hit_s, details.get("cached_tokens") or 0, same


def settle(deployment: Deployment) -> None:
    """Wait until no page has been stored for a while."""
    before, since = -1, time.monotonic()
    until_s = since + READY_S
    while time.monotonic() - since < SETTLED_S:
        now = _stored_pages(deployment)
        if now != before:
            before, since = now, time.monotonic()
        if time.monotonic() > until_s:
            raise RuntimeError("the pool is stored into without end")
        time.sleep(0.05)


def _stored_pages(deployment: Deployment) -> int:
    client = PoolClient(deployment.pool_socket(deployment.pools[0]), "tool", None)
    try:
        client.connect()
        return int((client.stats() or {}).get("stored_pages", 0))
    finally:
        client.close()
