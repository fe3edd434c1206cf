"""The prefix-cache pool on real vLLM: what one engine computed, another one loads, and nothing goes wrong with it."""

import concurrent.futures
import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.ports import free_ports, neighbours

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.running import RunningPools
from prfaas.tools.demo.compare import Equality, compare

from .shimmed import with_shims
from .stack import (
    ENGINE_ENV,
    LOGITS,
    LOGITS_PROCESSOR,
    MODEL,
    PATIENCE_S,
    TEMPLATES,
    DemoAnswer,
    call,
    completion_body,
    metric_of,
    prompt,
    wait_ports_free,
    wait_until,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, started anew to find what the pool kept"),
    pytest.mark.timeout(1800),
]

POOL = "home-pool"
LENGTHS = (1000, 3000, 6000)


def write_pooled(
    directory: Path,
    model: str,
    *,
    extra_args: Sequence[str] = (),
    tensor_parallel: int = 1,
    max_model_len: int = 16384,
) -> Path:
    """Two engines of one machine, which share a pool."""
    ports = free_ports(4)
    instances = [
        {
            "name": name,
            "roles": ["prefill", "decode"],
            "host": "127.0.0.1",
            "http_port": ports[index],
            # The second rank listens at the next port.
            "kv_port": neighbours(2),
            "tensor_parallel": tensor_parallel,
        }
        for index, name in enumerate(("one", "two"))
    ]
    if tensor_parallel > 1:
        del instances[1]
    deployment = {
        "name": directory.name,
        "model": {"served_name": MODEL, "tiny": model, "max_model_len": max_model_len},
        "clusters": [
            {
                "name": "home",
                "kind": "pd",
                "hardware": "cpu",
                "instances": instances,
                "pool": {"memory": "256 MiB", "ssd": "256 MiB", "kv_port": ports[-1]},
            }
        ],
        "pool": {"checkpoint_tokens": 4096},
        "gateway": {"port": ports[-2]},
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "kv_cache_gib": 0.25,
            "staging": "64 MiB",
            "extra_args": [
                *("--logits-processors", LOGITS_PROCESSOR),
                *("--logprobs-mode", "raw_logits"),
                *extra_args,
            ],
        },
    }
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(deployment))  # JSON is YAML
    return path


class Pooled:
    """A pool and engines in front of it, without a gateway."""

    def __init__(self, path: Path, env: Mapping[str, str]) -> None:
        self.deployment: Deployment = load_deployment(path)
        self.pools = RunningPools(self.deployment)
        self.engines = RunningEngines(self.deployment, extra_env={**ENGINE_ENV, **env}, templates=TEMPLATES)

    def start(self, *names: str) -> None:
        for name in names:
            wait_ports_free(self.deployment.instance(name))
        self.engines.restart(names)
        self.engines.wait_ready()

    def ask(self, engine: str, ids: Sequence[int], max_tokens: int = 24, **fields: Any) -> DemoAnswer:
        answer = call(self.url(engine), completion_body(ids, max_tokens, **LOGITS, **fields))
        assert answer.status == 200, answer.body
        return answer

    def url(self, engine: str, path: str = "/v1/completions") -> str:
        return self.deployment.instance(engine).url + path

    def metric(self, engine: str, name: str) -> float:
        return metric_of(self.url(engine, "/metrics"), name)

    def pages(self) -> int:
        return sum(self.stats()["memory_pages"].values())

    def stats(self) -> dict[str, Any]:
        node = self.deployment.pool_named(POOL)
        client = PoolClient(self.deployment.pool_socket(node), "tool", None)
        try:
            assert client.connect()
            stats = client.stats()
            assert stats is not None
            return stats
        finally:
            client.close()

    def wait_stored(self, pages: int = 1) -> None:
        """The pool holds so many pages, and nobody writes."""

        def at_rest() -> bool:
            return self.pages() >= pages and self.stats()["writing_pages"] == 0

        wait_until(at_rest, PATIENCE_S, "what was computed is in the pool")

    def wait_unpinned(self) -> None:
        wait_until(lambda: self.stats()["pinned_pages"] == 0, PATIENCE_S, "no page is pinned")


@contextlib.contextmanager
def pooled(path: Path, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[Pooled]:
    """`env`: over that of engines."""
    here = Pooled(path, env)
    try:
        with here.pools:
            here.pools.wait_ready()
            yield here
    finally:
        here.engines.stop()


def cached_tokens(answer: DemoAnswer) -> int:
    details = answer.body["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def assert_same(ours: DemoAnswer, theirs: DemoAnswer) -> None:
    """Equal tokens, or a first difference within bf16 rounding: batches differ where requests run side by side."""
    comparison = compare(ours.token_ids, theirs.token_ids, theirs.top_logits)
    assert comparison.equality is not Equality.NO, comparison


OTHER_KINDS = pytest.mark.extended(
    "states and windows are in `make test`: these are more windows, or neither"
)


OF_GPUS = pytest.mark.extended("vLLM's other model runner, which it takes on GPUs, calls the same hooks")


INTERPRETED = pytest.mark.shows(interpreted=True, what="model runner of GPUs")


@pytest.mark.shows(model="{model}", pool=True)
@pytest.mark.parametrize(
    ("model", "shims"),
    [
        ("qwen3-next", ()),
        ("gpt-oss", ()),
        pytest.param("mimo-v2-flash", (), marks=OTHER_KINDS),
        pytest.param("qwen3", (), marks=OTHER_KINDS),
        pytest.param("qwen3-next", ("with_triton",), marks=(OF_GPUS, INTERPRETED)),
    ],
)
def test_a_new_engine_answers_from_the_pool_as_from_its_own_blocks(
    model: str, shims: tuple[str, ...], tmp_path: Path
) -> None:
    prompts = [prompt(9000 + seed, tokens) for seed, tokens in enumerate(LENGTHS)]
    with pooled(write_pooled(tmp_path, model), with_shims(*shims)) as here:
        here.start("one")
        for ids in prompts:
            here.ask("one", ids)
        # The second time an engine notices how far its attention goes, and keeps a state there.
        own = [[here.ask("one", ids) for ids in prompts] for _ in range(2)][-1]
        here.wait_stored()
        here.engines.kill("one")
        # Both engines are new, and the daemon too: what it had in memory is still there.
        here.pools.kill(POOL)
        here.pools.restart([POOL])
        here.pools.wait_ready()
        here.start("one", "two")
        with concurrent.futures.ThreadPoolExecutor(2) as both:
            from_pool = list(both.map(lambda name: [here.ask(name, ids) for ids in prompts], ("one", "two")))
        for answers in from_pool:
            for ids, answer, before in zip(prompts, answers, own, strict=True):
                # What a short prefix saves may be less than its load costs here.
                expected = (0, cached_tokens(before)) if len(ids) <= 1000 else (cached_tokens(before),)
                assert cached_tokens(answer) in expected
                if cached_tokens(answer) == cached_tokens(before):
                    assert_same(answer, before)
        assert cached_tokens(own[-1]) > 5000
        # The next turn of a chat begins with the answer of the last one.
        turn = prompts[1] + from_pool[0][1].token_ids + prompt(9100, 300)
        here.wait_unpinned()
        assert cached_tokens(here.ask("two", turn)) >= cached_tokens(own[1])


@pytest.mark.shows(model="qwen3", drafts="draft model at both ends", pool=True)
@OTHER_KINDS
def test_an_engine_that_drafts_finds_its_drafters_blocks_too(tmp_path: Path) -> None:
    """The model drafts what it would say itself, so nearly all is taken where the drafter knows the prompt."""
    path = write_pooled(tmp_path, "qwen3")
    document = json.loads(path.read_text())
    drafts = {"method": "draft_model", "num_speculative_tokens": 3}
    drafts["model"] = str(load_deployment(path).model.folder)
    # vLLM takes no processors of logits with drafts.
    document["engine"]["extra_args"] = [
        *("--logprobs-mode", "raw_logits"),
        *("--speculative-config", json.dumps(drafts)),
    ]
    path.write_text(json.dumps(document))
    prompts = [prompt(9300 + seed, tokens) for seed, tokens in enumerate(LENGTHS)]
    with pooled(path) as here:
        here.start("one")
        own = [[here.ask("one", ids) for ids in prompts] for _ in range(2)][-1]
        here.wait_stored()
        here.start("two")
        found = [here.ask("two", ids) for ids in prompts]
        for answer, before in list(zip(found, own, strict=True))[1:]:
            assert cached_tokens(answer) == cached_tokens(before) > 2500
            assert_same(answer, before)
        names = (f"vllm:spec_decode_num_{what}_tokens_total" for what in ("accepted", "draft"))
        accepted, drafted = (here.metric("two", name) for name in names)
        assert accepted >= 0.75 * drafted, (accepted, drafted)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooled]:
    """Both engines, for tests whose prompts nobody else has."""
    with pooled(write_pooled(tmp_path_factory.mktemp("pair"), "qwen3-next")) as here:
        here.start("one", "two")
        yield here


def test_siblings_find_the_state_where_their_prompts_part(pair: Pooled) -> None:
    """Three prompts share 4,000 tokens: each comes to an engine that knows none of them, so nothing but the pool knows
    where they part."""
    shared = prompt(9200, 4000)
    found = []
    for number, engine in enumerate(("one", "two", "one")):
        if number == 2:
            pair.engines.kill("one")
            pair.start("one")
        before = pair.pages()
        found.append(cached_tokens(pair.ask(engine, shared + prompt(9201 + number, 700))))
        pair.wait_stored(before + 1)
    assert found[0] == 0
    assert found[2] == 4000 // 256 * 256


def test_tenants_hit_nothing_of_each_other(pair: Pooled) -> None:
    ids, before = prompt(9300, 3000), pair.pages()
    pair.ask("one", ids, cache_salt="a")
    pair.wait_stored(before + 1)
    assert cached_tokens(pair.ask("two", ids, cache_salt="b")) == 0
    assert cached_tokens(pair.ask("two", ids)) == 0
    assert cached_tokens(pair.ask("two", ids, cache_salt="a")) == 2048


def test_preemptions_aborts_and_a_dead_daemon_cost_no_answer(tmp_path: Path) -> None:
    path = write_pooled(
        tmp_path, "qwen3-next", extra_args=["--num-gpu-blocks-override", "64"], max_model_len=8192
    )
    prompts = [prompt(9400 + seed, 2300) for seed in range(8)]
    with pooled(path) as here, concurrent.futures.ThreadPoolExecutor(8) as clients:
        here.start("one")
        for _ in range(2):
            answers = list(clients.map(lambda ids: here.ask("one", ids, 120), prompts))
            assert all(len(answer.token_ids) == 120 for answer in answers)
        assert here.metric("one", "vllm:num_preemptions_total") > 0
        # Clients leave while their prefix is being loaded.
        for ids in prompts * 3:
            leave_early(here, ids)
        for ids in prompts[:2]:
            assert len(here.ask("one", ids).token_ids) == 24
        here.wait_unpinned()
        # Without its daemon a pool is empty, and it is found again.
        here.pools.kill(POOL)
        for ids in prompts[:2]:
            assert len(here.ask("one", ids).token_ids) == 24
        here.pools.restart([POOL])
        here.pools.wait_ready()
        assert here.pages() > 0
        wait_until(
            lambda: here.stats()["engine_sessions"] >= 2, PATIENCE_S, "the engine has found the new daemon"
        )
        fresh = prompt(9500, 3000)
        here.ask("one", fresh)
        here.wait_stored()
        assert here.engines.is_running("one")


def leave_early(here: Pooled, ids: Sequence[int]) -> None:
    instance = here.deployment.instance("one")
    connection = http.client.HTTPConnection(instance.host, instance.http_port, timeout=60)
    body = json.dumps(completion_body(ids, 200, stream=True))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    time.sleep(0.05)
    connection.close()


@pytest.mark.shows(model="qwen3-next", prefill="TP 2", decode="TP 2", pool=True)
@pytest.mark.extended("pages of several ranks are in `make test` without engines")
def test_two_tensor_parallel_ranks_share_pages(tmp_path: Path) -> None:
    ids = prompt(9600, 3000)
    with pooled(write_pooled(tmp_path, "qwen3-next", tensor_parallel=2)) as here:
        here.start("one")
        own = [here.ask("one", ids) for _ in range(3)][-1]
        here.wait_stored()
        here.engines.kill("one")
        here.start("one")
        again = here.ask("one", ids)
        assert cached_tokens(again) == cached_tokens(own) > 2000
        assert_same(again, own)
