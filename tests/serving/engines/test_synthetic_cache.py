"""What a stand-in holds and what it says of it: a faithful reader of the events knows exactly what is held."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind
from prfaas.core.prefix.events import Event
from prfaas.serving.engines.synthetic.cache import Context, Lease, PagePool, PrefixCache, RoomError
from prfaas.serving.engines.synthetic.content import TokenChain
from prfaas.serving.engines.synthetic.layout import SyntheticGroup, SyntheticLayout

BLOCK = 4
HYBRID = SyntheticLayout(
    (
        SyntheticGroup(0, GroupKind.STATE, BLOCK, 0, 0, (8, 8)),
        SyntheticGroup(1, GroupKind.WINDOW, BLOCK, 6, 2, (8, 8)),
        SyntheticGroup(2, GroupKind.FULL, BLOCK, 0, 4, (8, 8)),
    )
)


class Reader:
    """Applies events by their hashes only, under vLLM's names."""

    def __init__(self) -> None:
        self.copies: dict[int, dict[int, int]] = {0: {}, 1: {}, 2: {}}
        self.events: list[dict[str, Any]] = []

    def apply(self, events: Sequence[Event]) -> None:
        for event in msgspec.to_builtins(events):
            self.events.append(event)
            match event["type"]:
                case "BlockStored":
                    held = self.copies[event["group_idx"]]
                    for each in event["block_hashes"]:
                        held[each] = held.get(each, 0) + 1
                case "BlockRemoved":
                    held = self.copies[event["group_idx"]]
                    (gone,) = event["block_hashes"]
                    held[gone] -= 1
                    if not held[gone]:
                        del held[gone]
                case "AllBlocksCleared":
                    self.copies = {0: {}, 1: {}, 2: {}}


def cache_of(capacity: int) -> tuple[PrefixCache, Reader]:
    reader = Reader()
    return PrefixCache(HYBRID, capacity, 7, reader.apply), reader


def context_of(ids: Sequence[int], salt: str = "") -> Context:
    return Context(TokenChain(ids, BLOCK), salt)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=32)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), PROMPTS, st.sampled_from(["", "a"]), st.integers(1, 4)),
        st.tuples(st.just("hold"), PROMPTS, st.just(""), st.integers(1, 4)),
        st.tuples(st.just("load"), PROMPTS, st.just(""), st.integers(1, 4)),
        st.tuples(st.just("end"), st.just([]), st.just(""), st.just(0)),
        st.tuples(st.just("clear"), st.just([]), st.just(""), st.just(0)),
    ),
    max_size=25,
)


@given(STEPS, st.integers(16, 40))
@settings(max_examples=200)
def test_events_tell_what_is_held(steps: list[tuple[str, list[int], str, int]], capacity: int) -> None:
    async def check() -> None:
        cache, reader = cache_of(capacity)
        open_leases: list[Lease] = []
        for what, ids, salt, chunk_blocks in steps:
            if what == "end" and open_leases:
                open_leases.pop(0).close()
            elif what == "clear":
                cache.clear()
            elif ids:
                while cache.pool._reserved + cache.pool._pinned + HYBRID.pages_for(len(ids)) > capacity:
                    open_leases.pop(0).close()
                lease = await cache.pool.lease(HYBRID.pages_for(len(ids)))
                context = context_of(ids, salt)
                if what == "load":
                    hit = cache.hit(context, len(ids) - 1).attention_tokens
                    cache.reuse(context, lease, hit, attention_only=True)
                    cache.store(context, lease, hit, len(ids), states=False)
                else:
                    done = cache.hit(context, len(ids) - 1).usable_tokens
                    cache.reuse(context, lease, done, attention_only=False)
                    for end in [*range(done, len(ids), chunk_blocks * BLOCK)[1:], len(ids)]:
                        cache.store(context, lease, done, end, states=True)
                        done = end
                    # Nothing was evicted meanwhile that the request itself needs.
                    assert cache.hit(context, len(ids)).attention_tokens == len(ids) // BLOCK * BLOCK
                if what == "hold":
                    open_leases.append(lease)
                else:
                    lease.close()
            assert reader.copies == cache.held()
            pool = cache.pool
            assert pool._reserved >= 0 and pool._reserved + pool._pinned <= capacity
            assert pool._pinned + len(pool._idle) <= capacity
        for lease in open_leases:
            lease.close()
        assert cache.pool.used_ratio == 0

    asyncio.run(check())


async def _prefilled(cache: PrefixCache, ids: Sequence[int], ends: Sequence[int], salt: str = "") -> None:
    context, done = context_of(ids, salt), 0
    lease = await cache.pool.lease(HYBRID.pages_for(len(ids)))
    for end in ends:
        cache.store(context, lease, done, end, states=True)
        done = end
    lease.close()


def test_state_is_found_at_chunk_ends_only_and_attention_everywhere() -> None:
    async def check() -> None:
        cache, _ = cache_of(100)
        ids = list(range(22))
        await _prefilled(cache, ids, [8, 16, 20, 22])
        found = {
            tokens: (hit.attention_tokens // BLOCK, hit.usable_tokens // BLOCK)
            for tokens in (4, 8, 12, 15, 16, 19, 20, 22)
            for hit in [cache.hit(context_of(ids), tokens)]
        }
        assert found == {
            4: (1, 0),
            8: (2, 2),
            12: (3, 2),
            15: (3, 2),
            16: (4, 4),
            19: (4, 4),
            20: (5, 5),
            22: (5, 5),
        }
        assert cache.hit(context_of([*ids[:9], 99, *ids[10:]]), 22).usable_tokens == 2 * BLOCK
        assert cache.hit(context_of(ids, "tenant"), 22).attention_tokens == 0

    asyncio.run(check())


def test_events_are_vllms() -> None:
    """The shapes measured on vLLM 0.32 (one chunk of five blocks): other groups first, hash of the end only."""

    async def check() -> None:
        cache, reader = cache_of(100)
        ids = list(range(20))
        await _prefilled(cache, ids, [20], salt="secret")
        state, window, full = reader.events
        assert state == {
            "type": "BlockStored",
            "block_hashes": [full["block_hashes"][-1]],
            "parent_block_hash": None,
            "token_ids": ids,
            "block_size": BLOCK,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None],
            "group_idx": 0,
            "kv_cache_spec_kind": "mamba",
            "kv_cache_spec_sliding_window": None,
            "locality": None,
            "lookahead_token_ids": None,
        }
        assert window["block_hashes"] == full["block_hashes"][-2:]
        assert window["kv_cache_spec_sliding_window"] == 6
        assert full["token_ids"] == ids
        assert len(full["block_hashes"]) == 5
        assert full["extra_keys"] == [["secret"], None, None, None, None]
        reader.events.clear()
        longer = [*ids, *range(8)]
        context = context_of(longer, "secret")
        lease = await cache.pool.lease(HYBRID.pages_for(28))
        cache.reuse(context, lease, 20, attention_only=False)
        cache.store(context, lease, 20, 28, states=True)
        assert {event["parent_block_hash"] for event in reader.events} == {full["block_hashes"][-1]}
        assert all(event["token_ids"] == longer[20:28] for event in reader.events)
        lease.close()
        cache.clear()
        assert reader.events[-1] == {"type": "AllBlocksCleared"}

    asyncio.run(check())


def test_a_prompt_whose_states_are_gone_is_stored_twice() -> None:
    async def check() -> None:
        cache, reader = cache_of(100)
        lease = await cache.pool.lease(20)
        ids = list(range(17))
        cache.store(context_of(ids), lease, 0, 17, states=False)
        await _prefilled(cache, ids, [17])
        assert set(reader.copies[2].values()) == {2}
        lease.close()

    asyncio.run(check())


def test_two_engines_have_other_hashes() -> None:
    one, other = (PrefixCache(HYBRID, 10, seed, lambda events: None) for seed in (1, 2))
    assert one.engine_hash(5) != other.engine_hash(5)


def test_a_lease_waits_for_room_in_turn_and_never_for_the_impossible() -> None:
    async def check() -> None:
        pool = PagePool(10)
        first = await pool.lease(8)
        order: list[str] = []

        async def ask(name: str, pages: int) -> None:
            lease = await pool.lease(pages)
            order.append(name)
            lease.close()

        asks = [asyncio.create_task(ask("large", 9)), asyncio.create_task(ask("small", 1))]
        await asyncio.sleep(0)
        gone = asyncio.create_task(ask("gone", 1))
        await asyncio.sleep(0)
        gone.cancel()
        assert order == []
        first.close()
        await asyncio.gather(*asks)
        assert order == ["large", "small"]
        assert pool.used_ratio == 0
        with pytest.raises(RoomError, match="the whole cache has 10"):
            await pool.lease(11)

    asyncio.run(check())
