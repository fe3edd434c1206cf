"""Slots of different sizes in one memory never overlap, and no size keeps memory that it does not use."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.pool.geometry import slot_sizes
from prfaas.core.pool.slabs import SlabAllocator, slab_size

sizes = st.sets(st.integers(1, 40).map(lambda each: 64 * each), min_size=1, max_size=4)


@given(sizes, st.integers(1, 200))
def test_a_slab_has_room_for_a_slot_of_each_size_and_each_size_for_a_slab(
    slots: set[int], times: int
) -> None:
    memory_bytes = times * max(slots) * len(slots)
    slab_bytes = slab_size(slots, memory_bytes)
    assert max(slots) <= slab_bytes <= memory_bytes // len(slots)
    assert any(slab_bytes % each == 0 for each in slots)
    assert slab_bytes * 4096 * 2 > memory_bytes or slab_bytes == max(slots)


def test_a_slab_wastes_little_where_the_memory_allows_it() -> None:
    slots = {64 * 137, 64 * 1024, 64 * 100}
    slab_bytes = slab_size(slots, 1 << 30)
    assert max(slab_bytes % each for each in slots) <= slab_bytes / 16


def test_too_little_memory_is_said() -> None:
    with pytest.raises(ValueError, match="need at least 2048"):
        slab_size({1024, 64}, 2047)


def test_pages_that_are_nearly_alike_share_slots() -> None:
    assert slot_sizes([8192, 7800, 4096, 7400]) == {8192: 8192, 7800: 8192, 7400: 7680, 4096: 4096}


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=5))
def test_slots_are_whole_sectors_so_that_the_last_one_is_the_pages_alone(page_bytes: list[int]) -> None:
    for size, slot in slot_sizes(page_bytes).items():
        assert slot >= size
        assert slot % 512 == 0


@settings(max_examples=200)
@given(
    sizes,
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 30)), max_size=200),
)
def test_slots_never_overlap_and_all_memory_is_given(
    slots: set[int], slabs: int, steps: list[tuple[bool, int]]
) -> None:
    ordered = sorted(slots)
    slab_bytes = slab_size(slots, 4 * max(slots) * len(slots))
    allocator = SlabAllocator(slab_bytes, slots)
    for slab in range(slabs):
        allocator.add(slab)
    taken: dict[int, tuple[int, int]] = {}
    for takes, choice in steps:
        if takes or not taken:
            size = ordered[choice % len(ordered)]
            slot = allocator.take(size)
            if slot is None:
                used = {begin // slab_bytes for begin, _ in taken.values()}
                full = [
                    slab
                    for slab in used
                    if sum(
                        1
                        for begin, end in taken.values()
                        if begin // slab_bytes == slab and end - begin == size
                    )
                    < slab_bytes // size
                    and any(
                        begin // slab_bytes == slab and end - begin == size for begin, end in taken.values()
                    )
                ]
                assert len(used) == slabs
                assert full == []
                continue
            begin = allocator.offset(slot)
            assert allocator.size_of(slot) == size
            assert slot not in taken
            taken[slot] = (begin, begin + size)
        else:
            slot = sorted(taken)[choice % len(taken)]
            neighbours = {
                each
                for each, (begin, _) in taken.items()
                if begin // slab_bytes == taken[slot][0] // slab_bytes
            }
            assert set(allocator.neighbours(slot)) == neighbours
            allocator.give_back(slot)
            del taken[slot]
        spans = sorted(taken.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin // slab_bytes == (end - 1) // slab_bytes < slabs for begin, end in spans)
        assert allocator.taken_bytes() == sum(end - begin for begin, end in spans)


@given(sizes, st.lists(st.integers(0, 1 << 30), min_size=1, max_size=60))
def test_claimed_slots_are_those_of_before(slots: set[int], choices: list[int]) -> None:
    """After a restart every slot that was taken is claimed, in any order, and nothing else is taken."""
    ordered = sorted(slots)
    slab_bytes = slab_size(slots, 4 * max(slots) * len(slots))
    before = SlabAllocator(slab_bytes, slots)
    after = SlabAllocator(slab_bytes, slots)
    for slab in range(4):
        before.add(slab)
        after.add(slab)
    taken = {}
    for choice in choices:
        size = ordered[choice % len(ordered)]
        slot = before.take(size)
        if slot is not None:
            taken[slot] = size
    for slot, size in sorted(taken.items(), reverse=True):
        assert after.claim(slot, size)
        assert not after.claim(slot, size)
    for slot, size in taken.items():
        assert (after.offset(slot), after.size_of(slot)) == (before.offset(slot), size)
    assert after.taken_bytes() == before.taken_bytes()
    for size in ordered:
        slot = after.take(size)
        assert slot not in taken
