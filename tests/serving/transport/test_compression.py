"""Lossless compression of chunks: byte-exact for anything, shorter for floating-point numbers, refused when damaged."""

import struct
import time
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.transport.protocol.compression import (
    PREFIX_BYTES,
    ChunkCompressor,
    compress,
    decompress,
    decompressed_bytes,
    element_bytes,
)
from prfaas.serving.transport.protocol.wire import MAX_DATA_BYTES, WireError


def floats(kind: str, count: int = 1 << 16, seed: int = 7) -> memoryview:
    """Normal numbers as the bytes of bf16, fp32 or fp8 (e4m3, by the upper byte of a half)."""
    numbers = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    if kind == "fp32":
        return memoryview(numbers).cast("B")
    if kind == "bf16":
        return memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16)).cast("B")
    return memoryview((numbers.astype(np.float16).view(np.uint16) >> 7).astype(np.uint8)).cast("B")


def decompressed(compressed: bytes | bytearray, cuts: list[int]) -> bytes | None:
    """The chunk of a payload, decompressed into pieces that end at `cuts`."""
    nbytes = decompressed_bytes(compressed[:PREFIX_BYTES])
    memory = memoryview(bytearray(nbytes))
    edges = sorted({0, nbytes, *(cut % (nbytes + 1) for cut in cuts)})
    pieces = [memory[start:end] for start, end in pairwise(edges)]
    return bytes(memory) if decompress(memoryview(compressed), pieces) else None


@given(
    st.binary(min_size=1, max_size=3000),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 3000), max_size=4),
)
def test_any_bytes_come_back(chunk: bytes, size: int, cuts: list[int]) -> None:
    assert decompressed(compress(memoryview(chunk), size), cuts) == chunk


@pytest.mark.parametrize(("kind", "size", "most"), [("bf16", 2, 0.72), ("fp32", 4, 0.87), ("fp8", 1, 0.90)])
def test_floating_point_numbers_get_shorter(kind: str, size: int, most: float) -> None:
    chunk = floats(kind)
    found, share = element_bytes(chunk)
    compressed = compress(chunk, found)
    assert found == size
    assert len(compressed) < most * len(chunk)
    assert len(compressed) / len(chunk) == pytest.approx(share, abs=0.03)
    assert decompressed(compressed, [1000]) == bytes(chunk)


def test_random_bytes_leave_as_they_are() -> None:
    coder = ChunkCompressor(time.thread_time)
    assert coder.compressed(memoryview(np.random.default_rng(3).bytes(1 << 20)), 1e6) is None
    assert coder.counters.coded_chunks == 0


def test_a_slow_link_is_worth_it_and_a_fast_one_is_not() -> None:
    chunk = floats("bf16", 1 << 19)
    slow, fast, unlimited = (
        ChunkCompressor(time.thread_time),
        ChunkCompressor(time.thread_time),
        ChunkCompressor(time.thread_time),
    )
    assert all(slow.compressed(chunk, 1e6) is not None for _ in range(5))
    assert slow.counters.sent_bytes < 0.72 * slow.counters.raw_bytes
    tries = sum(fast.compressed(chunk, 1e15) is not None for _ in range(200))
    assert 1 <= tries <= 1 + 200 // 64 + 1  # the first, and one in 64 to see whether that has changed
    assert unlimited.compressed(chunk, None) is None


def test_what_does_not_get_shorter_is_tried_rarely() -> None:
    noise = memoryview(np.random.default_rng(5).bytes(1 << 16))
    coder = ChunkCompressor(time.thread_time)
    for _ in range(640):
        assert coder.compressed(noise, 1e6) is None
    before_s = coder.counters.encode_s
    assert coder.compressed(noise, 1e6) is None
    assert coder.counters.encode_s == before_s


@given(st.binary(max_size=200))
def test_hostile_payloads_are_refused(payload: bytes) -> None:
    try:
        nbytes = decompressed_bytes(payload[:PREFIX_BYTES])
    except WireError:
        return
    assert nbytes <= MAX_DATA_BYTES
    decompress(memoryview(payload), [memoryview(bytearray(nbytes))])


@given(st.integers(0, 400), st.integers(0, 7))
def test_damaged_payloads_never_write_more_than_the_chunk(at: int, bit: int) -> None:
    compressed = compress(floats("bf16", 300), 2)
    compressed[at % len(compressed)] ^= 1 << bit
    memory = bytearray(800)
    target = memoryview(memory)[100:700]
    decompress(memoryview(compressed), [target[:77], target[77:]])
    assert memory[:100] == bytes(100)
    assert memory[700:] == bytes(100)


def test_a_plane_that_claims_more_than_it_may_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    payload = struct.pack("<IIB3x", 1000, len(bomb), 2) + bomb + bytes(500)
    assert not decompress(memoryview(payload), [memoryview(bytearray(1000))])
    with pytest.raises(WireError, match="out of bounds"):
        decompressed_bytes(struct.pack("<IIB3x", MAX_DATA_BYTES + 1, 10, 2))
    with pytest.raises(WireError, match="elements of 3"):
        decompressed_bytes(struct.pack("<IIB3x", 100, 10, 3))
    with pytest.raises(WireError, match="12 bytes"):
        decompressed_bytes(b"short")
