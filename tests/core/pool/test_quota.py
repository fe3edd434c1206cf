"""Shares of tenants: who loses a page when a pool is full."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.pool.eviction import LruEviction
from prfaas.core.pool.quota import TenantEviction

CAPACITY = 1000


class Memory:
    """Room for 1000 bytes that makes room by the rule."""

    def __init__(self, share: float) -> None:
        self.eviction = TenantEviction(CAPACITY, LruEviction, share)
        self.pages: dict[bytes, tuple[bytes, int]] = {}
        self.pinned: set[bytes] = set()

    def used(self, tenant: bytes) -> int:
        return sum(size for owner, size in self.pages.values() if owner == tenant)

    def victim(self, tenant: bytes, size: int) -> bytes | None:
        return self.eviction.victim(tenant, size, lambda page: page not in self.pinned)

    def is_full(self, size: int) -> bool:
        return sum(each for _, each in self.pages.values()) + size > CAPACITY

    def remove(self, page: bytes) -> tuple[bytes, int]:
        self.eviction.removed(page)
        return self.pages.pop(page)

    def add(self, page: bytes, tenant: bytes, size: int) -> None:
        self.eviction.added(page, size, 0, None, tenant)
        self.pages[page] = (tenant, size)

    def lost_by_adding(self, page: bytes, tenant: bytes, size: int) -> list[tuple[bytes, int]] | None:
        """Whose pages went, with their sizes; None: there is no room, and the page was not added."""
        lost = []
        while self.is_full(size):
            victim = self.victim(tenant, size)
            if victim is None:
                return None
            lost.append(self.remove(victim))
        self.add(page, tenant, size)
        return lost


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def test_a_tenant_alone_fills_everything() -> None:
    memory = Memory(share=0.3)
    for page in names("a", 10):
        assert memory.lost_by_adding(page, b"A", 100) == []

    assert memory.used(b"A") == CAPACITY
    assert memory.lost_by_adding(b"more", b"A", 100) == [(b"A", 100)]
    assert b"a0" not in memory.pages


def test_a_tenant_above_its_share_loses_its_own_pages_though_others_are_older() -> None:
    memory = Memory(share=0.5)
    for page in names("old", 4):
        memory.lost_by_adding(page, b"B", 100)
    for page in names("a", 30):
        memory.lost_by_adding(page, b"A", 100)

    assert (memory.used(b"A"), memory.used(b"B")) == (600, 400)


def test_a_new_tenant_gets_its_share_from_who_has_more() -> None:
    memory = Memory(share=0.5)
    for page in names("b", 3):
        memory.lost_by_adding(page, b"B", 100)
    for page in names("a", 7):
        memory.lost_by_adding(page, b"A", 100)
    for page in names("c", 2):
        assert memory.lost_by_adding(page, b"C", 100) == [(b"A", 100)]

    assert memory.used(b"B") == 300


def test_a_tenant_within_its_share_takes_the_oldest_page_if_nobody_has_too_much() -> None:
    memory = Memory(share=0.5)
    for page in [*names("stale", 5), *names("b", 5)]:
        memory.lost_by_adding(page, page[:1], 100)

    assert memory.lost_by_adding(b"new", b"C", 100) == [(b"s", 100)]


def test_who_has_all_pages_pinned_takes_nothing_from_those_within_their_share() -> None:
    memory = Memory(share=0.5)
    for page in [*names("a", 5), *names("b", 5)]:
        memory.lost_by_adding(page, page[:1], 100)
    memory.pinned.update(names("a", 5))

    assert memory.lost_by_adding(b"more", b"a", 100) is None
    assert memory.used(b"b") == 500


def test_a_share_of_all_leaves_everything_to_the_policy() -> None:
    memory = Memory(share=1.0)
    for page in [*names("b", 5), *names("a", 5)]:
        memory.lost_by_adding(page, page[:1], 100)
    memory.eviction.touched(b"b0")

    assert memory.lost_by_adding(b"more", b"a", 100) == [(b"b", 100)]
    assert b"b0" in memory.pages


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        TenantEviction(CAPACITY, LruEviction, share)


TENANTS = (b"A", b"B", b"C", b"D")
SIZES = (40, 100, 170)


@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.25, 0.34, 0.5, 0.9]))
def test_nobody_is_pushed_below_its_share_by_who_is_above(seed: int, share: float) -> None:
    # Lists of hypothesis are mostly too short to fill the memory.
    chosen = random.Random(seed)
    memory = Memory(share)
    share_bytes = share * CAPACITY
    for number in range(150):
        page = chosen.choice(list(memory.pages)) if memory.pages else b""
        tenant, size = chosen.choices(TENANTS, weights=(8, 4, 2, 1))[0], chosen.choice(SIZES)
        match chosen.choice(["add", "add", "add", "add", "touch", "pin", "unpin", "unpin"]):
            case "touch":
                memory.eviction.touched(page)
            case "pin":
                memory.pinned.add(page)
            case "unpin":
                memory.pinned.discard(page)
            case _:
                while memory.is_full(size):
                    used = {each: memory.used(each) for each in TENANTS}
                    is_above = used[tenant] + size > share_bytes
                    victim = memory.victim(tenant, size)
                    if victim is None:
                        assert is_above or memory.pinned >= memory.pages.keys()
                        break
                    assert victim not in memory.pinned
                    owner, lost = memory.remove(victim)
                    spared = owner != tenant and used[owner] - lost < share_bytes
                    spare = max(used[each] for each in TENANTS if each != tenant) - share_bytes
                    assert not (spared and is_above)
                    assert not (spared and spare >= max(SIZES) and not memory.pinned)
                else:
                    memory.add(b"%d" % number, tenant, size)
        assert memory.eviction.used_bytes == sum(each for _, each in memory.pages.values()) <= CAPACITY
        assert all(memory.eviction.tenant_bytes(each) == memory.used(each) for each in TENANTS)
