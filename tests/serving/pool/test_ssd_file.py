"""Slots of the file of pages: no two pages overlap, room moves between groups."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.pool.ssd_file import BLOCK_BYTES, FileSlots, stored_bytes


@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=4),
    st.integers(0, 2_000_000),
    st.integers(0, 2**32),
)
def test_pages_never_overlap_and_room_is_found_again(sizes: list[int], file_bytes: int, seed: int) -> None:
    page_bytes = dict(enumerate(sizes))
    slots = FileSlots(file_bytes, page_bytes)
    assert slots.file_bytes <= file_bytes
    taken: dict[int, int] = {}
    chosen = random.Random(seed)
    for _ in range(200):
        group = chosen.randrange(len(sizes))
        if taken and chosen.random() < 0.4:
            offset = chosen.choice(list(taken))
            del taken[offset]
            slots.give_back(offset)
        elif (offset := slots.take(group)) is not None:
            assert offset % BLOCK_BYTES == 0
            assert 0 <= offset <= slots.file_bytes - stored_bytes(page_bytes[group])
            taken[offset] = group
        ends = sorted((offset, offset + stored_bytes(page_bytes[group])) for offset, group in taken.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))

    again = FileSlots(file_bytes, page_bytes)
    assert all(again.claim(group, offset) for offset, group in taken.items())
    assert not any(again.claim(group, offset) for offset, group in taken.items())
    for offset in taken:
        again.give_back(offset)
    for group, size in page_bytes.items():
        count = 0
        while (offset := again.take(group)) is not None:
            count += 1
            taken[offset] = group
        assert count == again.segments * (again.segment_bytes // stored_bytes(size))
        for offset in range(0, again.file_bytes, again.segment_bytes):
            for number in range(again.segment_bytes // stored_bytes(size)):
                again.give_back(offset + number * stored_bytes(size))


def test_a_page_has_no_place_where_another_group_is() -> None:
    slots = FileSlots(64 * 8192, {0: 8192, 1: 4096})
    assert slots.take(1) == 0
    assert not slots.claim(0, 0)
    assert not slots.claim(1, 100)
    assert not slots.claim(1, -4096)
    assert not slots.claim(1, 64 * 8192)
    assert not slots.claim(7, 4096)
    assert slots.claim(1, 4096)
    assert slots.take(0) == 8192
