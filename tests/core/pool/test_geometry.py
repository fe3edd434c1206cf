"""Sizes of pages, and what a page of the lead group says of itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageGroup, PageIdentity, PoolGeometry, PoolGeometryError

FULL = PageGroup(2, GroupKind.FULL, 48, 0, 1024)
STATE = PageGroup(0, GroupKind.STATE, 32, 0, 4096)
WINDOW = PageGroup(1, GroupKind.WINDOW, 16, 100, 512)
GEOMETRY = PoolGeometry("model", 2, (STATE, WINDOW, FULL, PageGroup(3, GroupKind.FULL, 16, 0, 64)))


def test_the_first_full_attention_group_leads() -> None:
    assert GEOMETRY.lead == FULL
    assert GEOMETRY.step_tokens == 16


def test_the_ranks_parts_lie_one_after_the_other_and_the_identity_behind_them() -> None:
    assert GEOMETRY.page_bytes(0) == 8192
    assert GEOMETRY.page_bytes(2) == 2048 + 4 * 48 + 768
    assert (GEOMETRY.rank_offset(2, 0), GEOMETRY.rank_offset(2, 1), GEOMETRY.identity_offset(2)) == (
        0,
        1024,
        2048,
    )


def test_equal_geometries_have_one_digest() -> None:
    again = PoolGeometry.decode(GEOMETRY.encode())
    assert again == GEOMETRY
    assert again.digest() == GEOMETRY.digest()
    others = [
        PoolGeometry("other", 2, GEOMETRY.groups),
        PoolGeometry("model", 1, GEOMETRY.groups),
        PoolGeometry("model", 2, GEOMETRY.groups[:3]),
    ]
    assert len({each.digest() for each in [GEOMETRY, *others]}) == 4


@pytest.mark.parametrize(
    ("ranks", "groups", "problem"),
    [
        (1, (STATE,), "without full attention"),
        (0, (FULL,), "at least one rank"),
        (1, (FULL, FULL), "different numbers"),
        (1, (PageGroup(300, GroupKind.FULL, 16, 0, 64),), "from 0 to 255"),
        (1, (PageGroup(0, GroupKind.FULL, 16, 0, 63),), "multiple of 64"),
        (1, (PageGroup(0, GroupKind.FULL, 0, 0, 64),), "blocks of 0 tokens"),
    ],
)
def test_what_can_have_no_pool_says_so(ranks: int, groups: tuple[PageGroup, ...], problem: str) -> None:
    with pytest.raises(PoolGeometryError, match=problem):
        PoolGeometry("model", ranks, groups)


@given(st.sampled_from([b"", bytes(16)]), st.text(max_size=400), st.text(max_size=400), st.integers(0, 2000))
def test_an_identity_is_read_as_it_was_written_and_fits_if_it_says_so(
    parent: bytes, salt: str, adapter: str, room_bytes: int
) -> None:
    identity = PageIdentity(parent, bytes(range(192)), salt, adapter)
    encoded = identity.encode()
    assert PageIdentity.decode(encoded + b"\xff" * 100) == identity
    assert identity.fits(room_bytes) == (len(encoded) <= room_bytes)


def test_a_damaged_identity_is_noticed() -> None:
    for trailer in (b"\xff\xff\xff\xff", b"\x04\x00\x00\x00abcd", b"", bytes(100)):
        with pytest.raises(ValueError):
            PageIdentity.decode(trailer)
