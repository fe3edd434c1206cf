"""A simulated machine's pool: what is held, what is loaded from where, and that it keeps its size."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.model import KvModel
from prfaas.core.kv.published import published_model
from prfaas.core.pool.eviction import EVICTION_POLICIES
from prfaas.core.prefix.index import PoolHit, PrefixHit
from prfaas.lab.simulator.machine_pool import LoadedBytes, MachinePool, PoolOptions

BLOCK = 512
HYBRID = published_model("internal-1t").kv_model
DENSE = published_model("qwen3-235b").kv_model
BLOCK_BYTES = HYBRID.token_bytes * BLOCK
STATE_BYTES = HYBRID.fixed_bytes
PLENTY = 1 << 50


def made(memory_bytes: int = PLENTY, model: KvModel = HYBRID, **options: object) -> MachinePool:
    return MachinePool(PoolOptions(memory_bytes, **options), model, BLOCK)  # type: ignore[arg-type]


def in_memory(usable: int, attention: int) -> PoolHit:
    """So many blocks, all of them in memory."""
    hit = PrefixHit(usable * BLOCK, attention * BLOCK)
    return PoolHit(hit, hit)


def test_a_prompt_is_held_up_to_its_last_whole_block() -> None:
    pool = made()
    pool.store(range(10), 10 * BLOCK - 1, 0)

    assert pool.hit(range(10), 10 * BLOCK) == in_memory(9, 9)
    assert pool.hit(range(9), 9 * BLOCK - 1) == in_memory(0, 8)
    assert pool.hit([100], BLOCK) is None


def test_a_dense_model_goes_on_behind_any_block() -> None:
    pool = made(model=DENSE)
    pool.store(range(10), 10 * BLOCK, 0)

    assert pool.hit([*range(4), 100], 5 * BLOCK) == in_memory(4, 4)


def test_the_third_of_siblings_goes_on_where_the_second_parted() -> None:
    pool = made(checkpoint_tokens=0)
    for number in range(3):
        blocks = [*range(6), 100 + number, 200 + number]
        found = pool.hit(blocks, 8 * BLOCK)
        usable = 0 if found is None else found.every_tier.reusable_tokens
        assert usable == (6 * BLOCK if number == 2 else 0)
        pool.store(blocks, 8 * BLOCK, usable)


def test_without_junctions_it_does_not() -> None:
    pool = made(checkpoint_tokens=0, junctions=False)
    for number in range(2):
        pool.store([*range(6), 100 + number], 7 * BLOCK, 0)

    assert pool.hit([*range(6), 300], 7 * BLOCK) == in_memory(0, 6)


def test_states_are_kept_every_so_many_tokens_of_what_was_computed() -> None:
    pool = made(checkpoint_tokens=4 * BLOCK)
    pool.store(range(10), 10 * BLOCK, 5 * BLOCK)

    assert pool.hit([*range(9), 100], 10 * BLOCK) == in_memory(8, 9)
    # That at 4 blocks lies before what was computed.
    assert pool.hit([*range(7), 100], 8 * BLOCK) == in_memory(0, 7)


def test_kv_that_was_received_has_a_state_at_its_end_alone() -> None:
    pool = made(checkpoint_tokens=4 * BLOCK)
    pool.store(range(10), 10 * BLOCK, 0, is_received=True)

    assert pool.hit(range(10), 10 * BLOCK) == in_memory(10, 10)
    assert pool.hit([*range(9), 100], 10 * BLOCK) == in_memory(0, 9)


def test_the_least_recent_prompt_goes_and_its_head_last() -> None:
    pool = made(8 * BLOCK_BYTES + 2 * STATE_BYTES, checkpoint_tokens=0)
    pool.store([0, 1, 2, 3], 4 * BLOCK, 0)
    pool.store([10, 11, 12, 13], 4 * BLOCK, 0)
    pool.store([20], BLOCK, 0)

    # For a block and a state the oldest state went and, from the tail on, blocks.
    left = pool.hit([0, 1, 2, 3], 4 * BLOCK)
    assert left is not None
    assert left.every_tier.reusable_tokens == 0
    assert left.every_tier.attention_tokens == 3 * BLOCK
    assert pool.hit([10, 11, 12, 13], 4 * BLOCK) == in_memory(4, 4)


def test_what_left_memory_is_loaded_from_ssd_and_is_then_in_memory() -> None:
    pool = made(4 * BLOCK_BYTES + STATE_BYTES, ssd_bytes=PLENTY, checkpoint_tokens=0)
    pool.store([0, 1, 2, 3], 4 * BLOCK, 0)
    pool.store([10, 11, 12], 3 * BLOCK, 0)

    hit = pool.hit([0, 1, 2, 3], 4 * BLOCK)
    assert hit == PoolHit(PrefixHit(4 * BLOCK, 4 * BLOCK), PrefixHit(0, BLOCK))
    loaded = pool.load([0, 1, 2, 3], 0, 4 * BLOCK)
    assert loaded == LoadedBytes(BLOCK_BYTES, 3 * BLOCK_BYTES + STATE_BYTES, BLOCK, 3 * BLOCK)
    assert pool.hit([0, 1, 2, 3], 4 * BLOCK) == in_memory(4, 4)
    pool.check()


def test_what_comes_from_ssd_pushes_nothing_of_its_own_prefix_out() -> None:
    pool = made(5 * DENSE.token_bytes * BLOCK, DENSE, ssd_bytes=PLENTY)
    pool.store([0, 1, 2, 3], 4 * BLOCK, 0)
    pool.store([10, 11, 12, 13], 4 * BLOCK, 0)
    assert pool.hit([0, 1, 2, 3], 4 * BLOCK) == PoolHit(
        PrefixHit(4 * BLOCK, 4 * BLOCK), PrefixHit(BLOCK, BLOCK)
    )
    pool.store([0, 1, 2, 3, 4, 5, 6], 7 * BLOCK, 4 * BLOCK)
    pool.load([0, 1, 2, 3, 4, 5, 6], 0, 7 * BLOCK)

    hit = pool.hit([0, 1, 2, 3, 4, 5, 6], 7 * BLOCK)
    # Blocks 4 to 6 stay; there is room for one of those on SSD.
    assert hit is not None and hit.in_memory.attention_tokens == 2 * BLOCK


def test_a_load_leaves_out_what_the_engine_has() -> None:
    pool = made()
    pool.store(range(8), 8 * BLOCK, 0)

    assert pool.load(range(8), 6 * BLOCK, 8 * BLOCK) == LoadedBytes(
        2 * BLOCK_BYTES + STATE_BYTES, 0, 2 * BLOCK, 0
    )


def test_a_prompt_larger_than_the_pool_keeps_its_beginning() -> None:
    pool = made(3 * BLOCK_BYTES, model=HYBRID, checkpoint_tokens=0)
    pool.store(range(8), 8 * BLOCK, 0)

    assert pool.hit(range(8), 8 * BLOCK) == in_memory(0, 3)
    pool.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("model", [HYBRID, DENSE])
@given(seed=st.integers(0, 10_000), memory=st.integers(0, 40), ssd=st.sampled_from([0, 60]))
def test_it_keeps_its_size_and_loads_what_it_said(
    eviction: str, model: KvModel, seed: int, memory: int, ssd: int
) -> None:
    rng = random.Random(seed)
    block_bytes, state_bytes = model.token_bytes * BLOCK, model.fixed_bytes
    pool = made(
        memory * block_bytes,
        model,
        ssd_bytes=ssd * block_bytes,
        checkpoint_tokens=rng.choice([0, 3 * BLOCK]),
        eviction=eviction,
    )
    for _ in range(30):
        # A tree of prompts: each goes along one of few branches for a while.
        branch, depth = rng.randrange(4), rng.randrange(1, 12)
        blocks = [place if place < 3 else 100 * (branch + 1) + place for place in range(depth)]
        hit = pool.hit(blocks, depth * BLOCK - 1)
        usable = 0
        if hit is not None:
            every, fast = hit
            usable = every.reusable_tokens
            assert fast.reusable_tokens <= usable <= every.attention_tokens < depth * BLOCK
            assert fast.reusable_tokens <= fast.attention_tokens <= every.attention_tokens
        if usable:
            own = rng.randrange(usable // BLOCK) * BLOCK
            loaded = pool.load(blocks, own, usable)
            assert loaded.memory_tokens + loaded.ssd_tokens == usable - own
            expected = (usable - own) // BLOCK * block_bytes + state_bytes
            assert loaded.memory_bytes + loaded.ssd_bytes == expected
            assert ssd or not loaded.ssd_bytes
            assert min(loaded.memory_bytes, loaded.ssd_bytes) >= 0
        pool.store(blocks, depth * BLOCK, usable, is_received=rng.random() < 0.2)
        pool.check()
    assert pool.memory_bytes <= memory * block_bytes
    assert pool.ssd_bytes <= ssd * block_bytes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory_bytes": -1}, "0 bytes or more"),
        ({"memory_bytes": 1, "checkpoint_tokens": -1}, "every 0 tokens or more, not every -1"),
        ({"memory_bytes": 1, "instances_per_machine": 0}, "1 instance or more, not 0"),
        ({"memory_bytes": 1, "ssd_bits_per_s": 0.0}, "more than 0 bit/s"),
    ],
)
def test_what_cant_be_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PoolOptions(**options)  # type: ignore[arg-type]
