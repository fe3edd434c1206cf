"""The events on the wire: what vLLM sends, what a later vLLM may send, what nobody should."""

from typing import Any

import msgspec
import pytest
from tests.core.prefix.digested import HearingIndex

from prfaas.core.prefix.events import Cleared, MalformedEventsError, RemovedBlocks, StoredBlocks, decode_batch
from prfaas.core.prefix.index import PrefixHit

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "group_idx": 3,
    "kv_cache_spec_kind": "full_attention",
    "medium": "GPU",
}


def encode(*events: object) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 1])


def index_of(*events: dict[str, Any]) -> HearingIndex:
    index = HearingIndex()
    index.apply("a", decode_batch(encode(*events)).events)
    return index


def held(index: HearingIndex, token_ids: list[int], salt: str = "", adapter: str = "") -> PrefixHit:
    return index.match(index.chains(token_ids, salt, adapter)).get("a", PrefixHit(0, 0))


def test_a_batch_as_vllm_sends_it() -> None:
    window = STORED | {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    batch = decode_batch(
        encode(
            STORED | {"parent_block_hash": 10, "extra_keys": [["salt"], None]},
            window,
            {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 3},
            {"type": "AllBlocksCleared"},
        )
    )
    assert (batch.at_s, batch.dp_rank) == (12.5, 1)
    stored, window_event, removed, cleared = batch.events
    assert isinstance(stored, StoredBlocks)
    assert (stored.hashes, stored.parent, stored.token_ids) == ([11, 12], 10, [1, 2, 3, 4])
    assert (stored.block_tokens, stored.group, stored.kind) == (2, 3, "full_attention")
    assert stored.extra_keys == [["salt"], None]
    assert isinstance(window_event, StoredBlocks)
    assert window_event.window_tokens == 64
    assert isinstance(removed, RemovedBlocks)
    assert (removed.hashes, removed.group) == ([11], 3)
    assert isinstance(cleared, Cleared)


def test_what_a_later_engine_adds_is_passed_over() -> None:
    batch = decode_batch(
        encode(STORED | {"colour": "red"}, {"type": "BlockMoved", "to": [1]}, {"type": "AllBlocksCleared"})
    )
    assert [type(event) for event in batch.events] == [StoredBlocks, Cleared]
    longer = msgspec.msgpack.encode([1.0, [], 0, "more"])
    assert decode_batch(longer).events == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "no"}], 0]),
        msgspec.msgpack.encode([1.0, [STORED | {"block_hashes": [-1]}], 0]),
        msgspec.msgpack.encode([1.0, [5], 0]),
    ],
)
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedEventsError):
        decode_batch(payload)


def test_hashes_may_be_bytes() -> None:
    first, second = b"x" * 24 + b"abcdefgh", b"y" * 24 + b"ijklmnop"
    index = index_of(
        STORED | {"block_hashes": [first, second]},
        STORED | {"block_hashes": [b"z" * 32], "parent_block_hash": second, "token_ids": [5, 6]},
    )
    assert held(index, [1, 2, 3, 4, 5, 6, 7]) == PrefixHit(6, 6)
    index.apply("a", [RemovedBlocks(hashes=[second], group=3)])
    assert held(index, [1, 2, 3, 4, 5, 6, 7]) == PrefixHit(2, 2)


def test_the_last_token_of_a_prompt_is_never_reused() -> None:
    index = index_of(STORED)
    assert held(index, [1, 2, 3, 4]) == PrefixHit(2, 2)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(4, 4)
    assert held(index, [1, 2]) == held(index, [1]) == held(index, []) == PrefixHit(0, 0)


def test_salt_and_adapter_are_part_of_the_prefix() -> None:
    ids = [1, 2, 3, 4, 5]
    salted = index_of(STORED | {"extra_keys": [["salt"], None]})
    assert held(salted, ids, "salt") == PrefixHit(4, 4)
    assert held(salted, ids) == held(salted, ids, "", "salt") == PrefixHit(0, 0)
    adapted = index_of(STORED | {"lora_name": "lora", "extra_keys": [["lora"], ["lora"]]})
    assert held(adapted, ids, "", "lora") == PrefixHit(4, 4)
    assert held(adapted, ids) == held(adapted, ids, "lora") == PrefixHit(0, 0)
    both = index_of(STORED | {"lora_name": "lora", "extra_keys": [["lora", "salt"], ["lora"]]})
    assert held(both, ids, "salt", "lora") == PrefixHit(4, 4)
    assert held(both, ids, "salt") == held(both, ids, "", "lora") == PrefixHit(0, 0)


@pytest.mark.parametrize(
    "extra_keys",
    [
        [None, [["image", 0], "digest"]],
        [None, ["an embedding's digest"]],
        [None, ["salt where none belongs"]],
    ],
)
def test_blocks_that_tokens_do_not_identify_are_not_indexed_nor_what_follows(extra_keys: list[Any]) -> None:
    index = index_of(
        STORED | {"extra_keys": extra_keys},
        STORED | {"block_hashes": [13], "token_ids": [5, 6], "parent_block_hash": 12},
    )
    assert held(index, [1, 2, 3, 4, 5, 6, 7]) == PrefixHit(2, 2)
    assert index.blocks("a") == 1
    assert index.stats().unlinked == 2


def test_a_copy_in_another_tier_outlives_the_first() -> None:
    elsewhere = {"block_hashes": [11], "token_ids": [], "block_size": 0, "group_idx": 3, "medium": "CPU"}
    index = index_of(STORED, {"type": "BlockStored", **elsewhere})
    gone = RemovedBlocks(hashes=[11], group=3)
    index.apply("a", [gone])
    assert held(index, [1, 2, 3]) == PrefixHit(2, 2)
    index.apply("a", [gone])
    assert held(index, [1, 2, 3]) == PrefixHit(0, 0)


def test_blocks_at_other_machines_do_not_count() -> None:
    index = index_of(STORED | {"locality": "REMOTE"})
    assert index.blocks("a") == 0
    index = index_of(
        STORED, {"type": "BlockRemoved", "block_hashes": [11], "group_idx": 3, "locality": "REMOTE"}
    )
    assert index.blocks("a") == 2


def test_a_part_of_a_block_teaches_no_block_size_for_good() -> None:
    part = STORED | {"block_hashes": [9], "token_ids": [1], "block_size": 1}
    index = index_of(part, STORED, part | {"block_hashes": [8], "token_ids": [5], "parent_block_hash": 12})
    assert index.stats().block_sizes == (2,)
    assert held(index, [1, 2, 3, 4, 5, 6]) == PrefixHit(4, 4)
    assert index.blocks("a") == 2


def test_an_engine_that_hashes_anew_without_telling_is_believed_from_then_on() -> None:
    index = index_of(STORED)
    index.apply("a", decode_batch(encode(STORED | {"block_hashes": [21, 22]})).events)
    index.apply("a", [RemovedBlocks(hashes=[21, 22], group=3)])
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(0, 0)


def test_ids_that_are_no_ids_are_passed_over() -> None:
    index = index_of(STORED | {"token_ids": [1, 2, -1, 4]}, STORED | {"token_ids": [1 << 40, 2, 3, 4]})
    assert index.blocks("a") == 0


def test_a_second_full_attention_group_has_to_hold_everything_too() -> None:
    other = STORED | {"group_idx": 4}
    index = index_of(STORED, other)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(4, 4)
    index.apply("a", [RemovedBlocks(hashes=[11], group=4)])
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(0, 4)


def test_before_the_first_state_nothing_is_reusable_where_the_model_needs_states() -> None:
    events = decode_batch(encode(STORED)).events
    for needs in (
        {"needs_states": True},
        {"needs_windows": True},
        {"needs_states": True, "needs_windows": True},
    ):
        index = HearingIndex(**needs)
        index.apply("a", events)
        assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(0, 4)


STATE: dict[str, Any] = STORED | {"block_hashes": [12], "group_idx": 0, "kv_cache_spec_kind": "mamba"}


def test_states_come_before_the_blocks_that_say_what_they_are() -> None:
    index = index_of(STATE, STORED)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(4, 4)
    index = index_of(STATE, STATE, {"type": "BlockRemoved", "block_hashes": [12], "group_idx": 0}, STORED)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(4, 4)
    index = index_of(STATE, {"type": "BlockRemoved", "block_hashes": [12], "group_idx": 0}, STORED)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(0, 4)


def test_another_linear_group_has_to_have_the_state_too() -> None:
    index = index_of(STORED, STATE)
    index.apply("a", decode_batch(encode(STATE | {"group_idx": 1, "block_hashes": []})).events)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(0, 4)
    index.apply("a", decode_batch(encode(STATE | {"group_idx": 1})).events)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(4, 4)


def test_a_state_outlives_its_blocks_and_is_of_use_when_they_come_back() -> None:
    index = index_of(STORED, STATE)
    index.apply("a", [RemovedBlocks(hashes=[12, 11], group=3)])
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(0, 0)
    index.apply("a", decode_batch(encode(STORED)).events)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(4, 4)


def test_a_state_counts_for_its_own_instance_only() -> None:
    index = index_of(STORED, STATE)
    index.apply("b", decode_batch(encode(STORED, STATE | {"block_hashes": []})).events)
    index.apply("a", [RemovedBlocks(hashes=[12], group=3)])
    chains = index.chains([1, 2, 3, 4, 5])
    assert index.match(chains) == {"a": PrefixHit(0, 2), "b": PrefixHit(0, 4)}


def test_a_full_index_refuses_what_is_new_and_takes_it_when_there_is_room() -> None:
    index = HearingIndex(capacity_blocks=1)
    index.apply("a", decode_batch(encode(STORED)).events)
    assert held(index, [1, 2, 3, 4, 5]) == PrefixHit(2, 2)
    assert index.stats().refused == 1
    index.drop("a")
    index.apply("b", decode_batch(encode(STORED)).events)
    assert index.blocks("b") == 1
    with pytest.raises(ValueError, match="capacity_blocks"):
        HearingIndex(capacity_blocks=0)


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode([float("nan"), [], None]),
        msgspec.msgpack.encode([float("inf"), [], None]),
        b"\x93\xcb" + bytes(8) + b"\x91" * 100_000,
        msgspec.msgpack.encode([1.0, [{"type": ["BlockStored"], "block_hashes": 7}, {"type": {}}], "x"]),
        encode(STORED | {"block_hashes": [b"x" * 65]}),
        encode(STORED | {"block_hashes": [-1]}),
        encode(STORED | {"medium": "DISK"}).replace(b"DISK", b"\xff\xff\xff\xff"),
        encode(STORED | {"block_size": -1}),
        encode(STORED | {"block_size": 1 << 30}),
        encode(STORED | {"group_idx": -1}),
        encode(STORED | {"medium": "x" * 2000}),
    ],
)
def test_absurd_batches_are_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedEventsError):
        decode_batch(payload)


def test_events_of_no_known_type_are_passed_over_whatever_their_type_is() -> None:
    assert decode_batch(
        encode({"type": ["x"]}, {"type": None}, {"type": "BlockRemoved", "block_hashes": []})
    ).events == [RemovedBlocks([])]
