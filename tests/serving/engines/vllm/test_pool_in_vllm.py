"""The scheduler side of the pool inside vLLM's own scheduler: what it reads of requests and steps means what we think.

A model with full attention and linear states, without its layers: steps end as if they had been computed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving.engines.vllm.pool_world import DictPool

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.serving.engines.tiny.checkpoint import tiny_model
from prfaas.serving.engines.vllm.layout import read_groups
from prfaas.serving.engines.vllm.metadata import TransferMetadata
from prfaas.serving.engines.vllm.pool_scheduler import PoolScheduler
from prfaas.serving.engines.vllm.template import import_model
from prfaas.serving.pool.protocol import PageRef

BLOCK = 128
CHUNK = 1024
FULL, STATE = 0, 1


class Engine:
    """vLLM's scheduler with our connector, whose pool is a dict; a model that answers with token 7."""

    def __init__(
        self, vllm_config: Any, blocks: int, groups: Callable[[], list[Any]], pool: DictPool | None
    ) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager

        vllm_config.cache_config.num_gpu_blocks = blocks
        config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups(),
            prefix_cache_retention_interval=BLOCK,
            hash_block_size=BLOCK,
            cache_hit_alignment_tokens=BLOCK,
        )
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        self.scheduler = Scheduler(
            vllm_config, config, StructuredOutputManager(vllm_config), block_size=BLOCK, hash_block_size=BLOCK
        )
        connector: Any = self.scheduler.connector
        our_groups = read_groups(config)
        kinds = [group.kind for group in our_groups]
        assert kinds == [GroupKind.FULL, GroupKind.STATE]
        sizes = dict.fromkeys((group.index for group in our_groups), 4096)
        self.pool = DictPool(our_groups, BLOCK) if pool is None else pool
        self.side = PoolScheduler(self.pool, our_groups, sizes, 1 << 20)  # type: ignore[arg-type]
        connector._scheduling.pool = self.side
        connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        self.orders: list[TransferMetadata] = []
        self.hits: dict[str, Any] = {}

    def add(self, name: str, tokens: list[int], answer: int = 1, **fields: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        sampling.update_from_generation_config({}, 2)
        request = Request(name, tokens, sampling, None, block_hasher=self.hasher, **fields)
        self.scheduler.add_request(request)
        # vLLM hands it over with the first token.
        self.hits[name] = request.prefill_stats
        return request

    def step(self, loaded: set[str] | None = None, failed: set[str] | None = None) -> TransferMetadata:
        """One step; the loads of `loaded` ended in it, those of `failed` in vain."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        assert isinstance(orders, TransferMetadata)
        self.orders.append(orders)
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[
                    [7] if not self.scheduler.requests[name].is_prefill_chunk else [] for name in names
                ],
                kv_connector_output=KVConnectorOutput(
                    finished_sending=set(orders.held),
                    finished_recving=loaded,
                    failed_recving=failed or set(),
                ),
            ),
        )
        return orders

    def run(self, name: str, tokens: list[int], answer: int = 1, **fields: Any) -> Any:
        """One request from its arrival to its end; loads take a step."""
        request = self.add(name, tokens, answer, **fields)
        for _ in range(answer + 50):
            loading = {load.request_id for load in self.orders[-1].pool_loads} if self.orders else set()
            self.step(loading or None)
            if request.is_finished():
                self.step()
                return request
        raise AssertionError("the request did not end")

    def cached(self, request: Any) -> tuple[int, int]:
        """Tokens of the own hit and of the pool's."""
        stats = self.hits[request.request_id]
        return stats.num_local_cached_tokens, stats.num_external_cached_tokens


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

    directory: Path = tmp_path_factory.mktemp("models")
    key = directory / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    transfer = KVTransferConfig(
        kv_connector="PrfaasConnector",
        kv_connector_module_path="prfaas.serving.engines.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "name": "home",
            "kv_host": "127.0.0.1",
            "kv_port": 1,
            "key_file": str(key),
            "peers": {},
            "producers": [],
            "staging_bytes": 1 << 20,
        },
    )

    def groups() -> list[Any]:
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
        state = MambaSpec(
            block_size=BLOCK,
            shapes=((16, 16),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            page_size_padded=full.page_size_bytes,
        )
        return [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["state"], state)]

    model = tiny_model("qwen3-next", directory)
    # Of a class that is not there vLLM would ask a process that imports all of it.
    import_model(model)

    def engine(blocks: int = 200, pool: DictPool | None = None) -> Engine:
        vllm_config = EngineArgs(
            model=str(model),
            max_model_len=8192,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            block_size=BLOCK,
            enable_prefix_caching=True,
            enforce_eager=True,
            async_scheduling=False,
            mamba_ssm_cache_dtype="float32",
            prefix_cache_retention_interval=BLOCK,
            kv_transfer_config=transfer,
        ).create_engine_config()
        return Engine(vllm_config, blocks, groups, pool)

    yield engine


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + index * 31) % 30000 + 10 for index in range(tokens)]


def held(pool: DictPool, tokens: list[int]) -> dict[int, list[int]]:
    """Ends of the pages of a prompt that the pool has, by group."""
    chain = KeyChain(BLOCK)
    chain.extend(tokens)
    ends = range(BLOCK, chain.num_tokens + 1, BLOCK)
    return {
        group: [end for end in ends if page_id(chain.key_at(end), group) in pool.pages]
        for group in (FULL, STATE)
    }


def test_what_a_prompt_leaves_behind_is_loaded_by_a_new_engine(engines: Callable[..., Engine]) -> None:
    first = engines()
    tokens = prompt(3000)
    request = first.run("a", tokens, answer=300)
    everything = [*request.all_token_ids]
    assert held(first.pool, everything)[FULL] == list(range(BLOCK, 3299, BLOCK))
    # The prompt's end, and of the answer's ends the newest one.
    assert held(first.pool, everything)[STATE] == [2944, 3200]
    second = engines(pool=first.pool)
    same = second.run("b", tokens)
    assert second.cached(same) == (0, 2944)
    turn = second.run("c", [*everything, *prompt(200, 9)])
    assert sum(second.cached(turn)) == 3200
    assert not first.pool.pins


def test_a_state_is_stored_from_the_block_that_vllm_offers(engines: Callable[..., Engine]) -> None:
    engine = engines()
    engine.run("a", prompt(1000))
    stores = [store for orders in engine.orders for store in orders.pool_stores if store.urgent]
    assert [(part.group, part.first_block) for store in stores for part in store.parts] == [(STATE, 6)]
    ids = {block for store in stores for part in store.parts for block in part.block_ids}
    assert len(ids) == 1
    assert 0 not in ids


def test_siblings_find_a_state_where_their_prompts_part(engines: Callable[..., Engine]) -> None:
    shared = prompt(2000)
    pool, found = None, []
    for number in range(3):
        # A new engine each time: nothing but the pool knows of the others.
        engine = engines(pool=pool)
        pool = engine.pool
        found.append(engine.cached(engine.run("s", shared + prompt(600, 11 + number))))
    assert found == [(0, 0), (0, 0), (0, 1920)]


def test_an_own_hit_without_its_state_is_given_up_for_a_later_one(engines: Callable[..., Engine]) -> None:
    engine = engines()
    tokens = prompt(3000)
    engine.run("a", tokens)
    # The engine has attention up to 2944 and a state there, which this prompt leaves at 2000: none before.
    other = tokens[:2000] + prompt(500, 5)
    manager = engine.scheduler.kv_cache_manager
    lose_states(manager)
    chain = KeyChain(BLOCK)
    chain.extend(other)
    engine.pool.pages[page_id(chain.key_at(1280), STATE)] = PageRef(1, 64)
    request = engine.run("b", other)
    assert engine.cached(request) == (0, 1280)
    assert not request.skip_reading_prefix_cache
    assert not engine.pool.pins


def lose_states(manager: Any) -> None:
    """As under memory pressure: the cache forgets its states, not its attention blocks."""
    pool = manager.block_pool
    for block in pool.blocks:
        if block.block_hash is not None and block.block_hash[-4:] == STATE.to_bytes(4, "big"):
            pool._maybe_evict_cached_block(block)


def test_an_own_hit_stays_where_the_pool_has_nothing_later(engines: Callable[..., Engine]) -> None:
    engine = engines()
    tokens = prompt(3000)
    engine.run("a", tokens)
    request = engine.run("b", tokens[:2000] + prompt(500, 5))
    _, external = engine.cached(request)
    assert external == 0
    again = engine.run("c", tokens)
    assert engine.cached(again) == (2944, 0)


def test_a_failed_load_is_computed_and_not_tried_again(engines: Callable[..., Engine]) -> None:
    first = engines()
    tokens = prompt(3000)
    first.run("a", tokens)
    engine = engines(pool=first.pool)
    request = engine.add("b", tokens)
    assert [load.request_id for load in engine.step().pool_loads] == ["b"]
    engine.step(loaded={"b"}, failed={"b"})
    for _ in range(8):
        assert engine.step().pool_loads == []
    assert request.is_finished()
    assert not first.pool.pins


def test_an_abort_in_mid_load_keeps_the_pin_until_the_load_has_ended(engines: Callable[..., Engine]) -> None:
    from vllm.v1.request import RequestStatus

    first = engines()
    tokens = prompt(3000)
    first.run("a", tokens)
    engine = engines(pool=first.pool)
    engine.add("b", tokens)
    engine.step()
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert len(first.pool.pins) == 1
    engine.step(loaded={"b"})
    assert not first.pool.pins
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_preempted_requests_store_and_load_again(engines: Callable[..., Engine]) -> None:
    engine = engines(blocks=40)
    requests = [engine.add(f"r{number}", prompt(1500, number + 1), answer=400) for number in range(4)]
    for _ in range(4000):
        loading = {load.request_id for load in engine.orders[-1].pool_loads} if engine.orders else set()
        engine.step(loading or None)
        if all(request.is_finished() for request in requests):
            break
    assert all(request.is_finished() for request in requests)
    assert sum(request.num_preemptions for request in requests) > 0
    engine.step()
    assert not engine.pool.pins
    for request in requests:
        assert held(engine.pool, [*request.all_token_ids])[FULL] == list(range(BLOCK, 1899, BLOCK))
