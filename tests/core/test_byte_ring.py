"""The ring: bounded whatever comes, numbers without gaps, the newest is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.byte_ring import ByteRing


@given(
    sizes=st.lists(st.integers(0, 40), max_size=60),
    most_entries=st.integers(1, 12),
    most_bytes=st.integers(1, 100),
    after=st.integers(0, 70),
)
def test_the_newest_are_kept_and_no_bound_is_passed(
    sizes: list[int], most_entries: int, most_bytes: int, after: int
) -> None:
    ring = ByteRing(most_entries=most_entries, most_bytes=most_bytes)
    came = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    for number, data in enumerate(came, 1):
        assert ring.append(data) == number
        kept = list(ring.after(0))
        assert len(kept) == len(ring) <= most_entries
        assert sum(len(entry.data) for entry in kept) == ring.used_bytes <= most_bytes
        assert [entry.number for entry in kept] == list(range(number - len(kept) + 1, number + 1))
        assert all(entry.data == came[entry.number - 1] for entry in kept)
        # One more would not have fitted.
        if len(kept) < min(number, most_entries):
            assert ring.used_bytes + len(came[number - len(kept) - 1]) > most_bytes
    assert [e.number for e in ring.after(after)] == [e.number for e in ring.after(0) if e.number > after]
    assert ring.newest == len(came)


@pytest.mark.parametrize(("entries", "nbytes"), [(0, 10), (10, 0)])
def test_a_ring_without_room_is_refused(entries: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="needs room"):
        ByteRing(most_entries=entries, most_bytes=nbytes)
