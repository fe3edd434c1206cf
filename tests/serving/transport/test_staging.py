"""Blocks are conserved, leases never share a byte, views are the bytes asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.staging import StagingLease

BLOCK = 4096


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12 * BLOCK)), max_size=40), st.randoms())
def test_blocks_are_conserved_and_never_shared(steps: list[tuple[bool, int]], rng: object) -> None:
    arena = StagingArena(10 * BLOCK, BLOCK)
    held: list[tuple[StagingLease, int]] = []
    for mark, (free, nbytes) in enumerate(steps):
        if free and held:
            lease, expected = held.pop(nbytes % len(held))
            for piece in lease.views(0, lease.nbytes):
                assert bytes(piece) == bytes([expected]) * piece.nbytes
            lease.free()
            with pytest.raises(RuntimeError):
                lease.free()
            with pytest.raises(RuntimeError):
                lease.views(0, 0)
        elif nbytes > 10 * BLOCK:
            with pytest.raises(ValueError, match="can never fit"):
                arena.allocate(nbytes)
        else:
            lease_or_none = arena.allocate(nbytes)
            assert (lease_or_none is None) == (-(-nbytes // BLOCK) > 10 - _blocks(held))
            if lease_or_none is not None:
                for piece in lease_or_none.views(0, nbytes):
                    piece[:] = bytes([mark % 251]) * piece.nbytes
                held.append((lease_or_none, mark % 251))
        assert arena.used_blocks == _blocks(held)
        assert arena.used_blocks + len(arena._free) == arena.total_blocks == 10
        assert arena.peak_used_blocks >= arena.used_blocks


def _blocks(held: list[tuple[StagingLease, int]]) -> int:
    return sum(-(-lease.nbytes // BLOCK) for lease, _ in held)


@given(st.integers(0, 6 * BLOCK), st.integers(0, 6 * BLOCK))
def test_views_over_scattered_blocks(start: int, end: int) -> None:
    start, end = min(start, end), max(start, end)
    arena = StagingArena(12 * BLOCK, BLOCK)
    singles = [arena.allocate(BLOCK) for _ in range(12)]
    for index in (1, 3, 4, 5, 8, 11):
        lease = singles[index]
        assert lease is not None
        lease.free()
    lease = arena.allocate(6 * BLOCK)
    assert lease is not None
    content = bytes(index * 7 % 256 for index in range(6 * BLOCK))
    at = 0
    for piece in lease.views(0, 6 * BLOCK):
        piece[:] = content[at : at + piece.nbytes]
        at += piece.nbytes
    assert b"".join(lease.views(start, end - start)) == content[start:end]
    assert len(lease.views(0, 6 * BLOCK)) == 4  # neighbours are one piece


def test_bounds() -> None:
    arena = StagingArena(4 * BLOCK + 100, BLOCK)
    assert (arena.total_blocks, arena.total_bytes) == (4, 4 * BLOCK)
    lease = arena.allocate(BLOCK + 1)
    assert lease is not None and arena.used_blocks == 2
    for offset, nbytes in ((-1, 1), (0, BLOCK + 2), (BLOCK + 2, 0), (0, -1)):
        with pytest.raises(ValueError, match="lies outside"):
            lease.views(offset, nbytes)
    with pytest.raises(ValueError, match="makes no sense"):
        arena.allocate(-1)
    with pytest.raises(ValueError, match="no room for one block"):
        StagingArena(BLOCK - 1, BLOCK)


def test_own_buffer() -> None:
    buffer = bytearray(3 * BLOCK)
    arena = StagingArena(2 * BLOCK, BLOCK, memoryview(buffer))
    lease = arena.allocate(10)
    assert lease is not None
    lease.views(0, 4)[0][:] = b"here"
    assert bytes(buffer[:4]) == b"here"
    with pytest.raises(ValueError, match="must be writable"):
        StagingArena(2 * BLOCK, BLOCK, memoryview(bytes(2 * BLOCK)))
    with pytest.raises(ValueError, match="must be writable"):
        StagingArena(4 * BLOCK, BLOCK, memoryview(buffer))
