"""Lossless compression of chunks for slow links: only the plane of the elements' upper bytes is compressed.

The upper byte of a floating-point number holds its sign and all or most of its exponent, which take few values in a
KVCache. The bytes of the mantissa are as good as random. So a chunk is cut into planes, one for each byte of an
element. The last plane goes through zstd, whose Huffman stage comes close to its entropy. Elements have 1, 2 or 4 bytes
(fp8, bf16 or fp16, fp32). The size is estimated from the chunk's bytes, so no layout is needed.

Layout of a compressed payload, little endian: u32 length of the chunk, u32 length of the compressed plane, u8 bytes of
an element, 3 zero bytes; then the compressed plane, the other planes in order, and the rest of a last element.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from prfaas.serving.transport.protocol.wire import MAX_DATA_BYTES, WireError

_PREFIX = struct.Struct("<IIB3x")
PREFIX_BYTES = _PREFIX.size
_ELEMENT_BYTES = (2, 4, 1)
_LEVEL = 1
_SAMPLE_SLICES, _SAMPLE_SLICE_BYTES = 4, 4096
# A chunk that would not get shorter than this is sent as it is.
_WORTH_RATIO = 0.95
# Decompression takes this share of the compressor's CPU time (measured: bench/compression.py).
_DECODE_SHARE = 0.4
# Where compression does not pay, one chunk in this many is a new try: links and data change.
_RETRY_CHUNKS = 64
_SMOOTHING = 0.2

_Bytes = NDArray[np.uint8]


def element_bytes(chunk: memoryview) -> tuple[int, float]:
    """Estimate the size of a chunk's elements from a sample of its bytes.

    Returns:
        The bytes of an element, and the share of the chunk's length that compression leaves then (estimated by the
        entropy of the last plane).
    """
    sample = _sample(np.frombuffer(chunk, dtype=np.uint8))
    ratios = {size: _compressed_share(sample, size) for size in _ELEMENT_BYTES if len(sample) >= size}
    if not ratios:
        return 1, 1.0
    best = min(ratios, key=ratios.__getitem__)
    return best, ratios[best]


def compress(chunk: memoryview, size: int) -> bytearray:
    """The compressed payload of a chunk of elements of `size` bytes; may be longer than the chunk."""
    data = np.frombuffer(chunk, dtype=np.uint8)
    elements, rest = divmod(len(data), size)
    planes = data[: elements * size].reshape(elements, size)
    plane = zstandard.ZstdCompressor(level=_LEVEL).compress(np.ascontiguousarray(planes[:, -1]).data)
    plain_at = PREFIX_BYTES + len(plane)
    compressed = bytearray(plain_at + elements * (size - 1) + rest)
    _PREFIX.pack_into(compressed, 0, len(data), len(plane), size)
    compressed[PREFIX_BYTES:plain_at] = plane
    target = np.frombuffer(compressed, dtype=np.uint8)[plain_at:]
    for number in range(size - 1):
        target[number * elements : (number + 1) * elements] = planes[:, number]
    target[elements * (size - 1) :] = data[elements * size :]
    return compressed


def decompressed_bytes(prefix: bytes | bytearray | memoryview) -> int:
    """The length of the chunk in a compressed payload that begins with `prefix` (12 bytes).

    Raises:
        WireError: it is out of bounds.
    """
    if len(prefix) < PREFIX_BYTES:
        raise WireError(f"a compressed chunk must begin with {PREFIX_BYTES} bytes that describe it")
    nbytes, _, size = _PREFIX.unpack_from(prefix)
    if not 0 < nbytes <= MAX_DATA_BYTES or size not in _ELEMENT_BYTES:
        raise WireError(f"a compressed chunk of {nbytes} bytes in elements of {size} is out of bounds")
    return int(nbytes)


def decompress(compressed: memoryview, pieces: Sequence[memoryview]) -> bool:
    """Decode a payload into `pieces`, which have together as many bytes as the chunk.

    Returns:
        Whether it could be decompressed. If not, the content of `pieces` is undefined.
    """
    nbytes, plane_bytes, size = _PREFIX.unpack_from(compressed)
    elements, rest = divmod(nbytes, size)
    plain_at = PREFIX_BYTES + plane_bytes
    if len(compressed) != plain_at + elements * (size - 1) + rest or sum(map(len, pieces)) != nbytes:
        return False
    try:
        plane = _decompressed(compressed[PREFIX_BYTES:plain_at], elements)
    except zstandard.ZstdError:
        return False
    if len(plane) != elements:
        return False
    source = np.frombuffer(compressed, dtype=np.uint8)[plain_at:]
    alone = len(pieces) == 1
    chunk = np.frombuffer(pieces[0], dtype=np.uint8) if alone else np.empty(nbytes, dtype=np.uint8)
    planes = chunk[: elements * size].reshape(elements, size)
    planes[:, -1] = np.frombuffer(plane, dtype=np.uint8)
    for number in range(size - 1):
        planes[:, number] = source[number * elements : (number + 1) * elements]
    chunk[elements * size :] = source[elements * (size - 1) :]
    if not alone:
        _scatter(chunk, pieces)
    return True


def _decompressed(plane: memoryview, elements: int) -> bytes:
    """Never more than `elements` bytes, whatever the frame claims."""
    if not elements:
        return b""
    size = zstandard.frame_content_size(plane)
    if size != elements:
        raise zstandard.ZstdError("the plane has another length")
    return zstandard.ZstdDecompressor().decompress(plane, max_output_size=elements)


def _scatter(chunk: _Bytes, pieces: Sequence[memoryview]) -> None:
    at = 0
    for piece in pieces:
        piece[:] = chunk[at : at + len(piece)].data
        at += len(piece)


def _sample(data: _Bytes) -> _Bytes:
    """Some slices of the chunk, each at a multiple of the longest element."""
    if len(data) <= _SAMPLE_SLICES * _SAMPLE_SLICE_BYTES:
        return data
    step = len(data) // _SAMPLE_SLICES & ~3
    starts = range(0, step * _SAMPLE_SLICES, step)
    return np.concatenate([data[start : start + _SAMPLE_SLICE_BYTES] for start in starts])


def _compressed_share(sample: _Bytes, size: int) -> float:
    plane = sample[: len(sample) // size * size].reshape(-1, size)[:, -1]
    counts = np.bincount(plane, minlength=256)
    shares = counts[counts > 0] / len(plane)
    entropy_bits = float(-(shares * np.log2(shares)).sum())
    return (entropy_bits / 8 + size - 1) / size


@dataclass(slots=True)
class CompressionCounters:
    """Counters of compression on one connection; all only grow."""

    coded_chunks: int = 0
    raw_bytes: int = 0
    """Of the compressed chunks, before compression."""
    sent_bytes: int = 0
    """Of the compressed chunks, after it."""
    encode_s: float = 0.0
    """CPU time of this side, including chunks that left uncompressed in the end."""


class ChunkCompressor:
    """Compresses the chunks of one connection where the link time saved exceeds the CPU time of both sides.

    A chunk of n bytes that is compressed to c bytes saves 8 (n − c) / r seconds of the link, with r the rate at which
    this connection may or can send. c / n and the seconds per byte are moving averages of this connection's own
    measurements. Not thread-safe: one writer uses it.
    """

    def __init__(self, cpu_s: Callable[[], float]) -> None:
        """`cpu_s`: CPU time of the calling thread so far."""
        self._cpu_s = cpu_s
        self.counters = CompressionCounters()
        self._encode_s_per_byte = 0.0
        self._share_left = 0.0
        self._skipped = 0

    def compressed(self, chunk: memoryview, bits_per_s: float | None) -> bytearray | None:
        """The compressed payload of a chunk; None: send it uncompressed.

        Args:
            chunk: its bytes.
            bits_per_s: the rate of this connection; None: no link limits it.
        """
        if bits_per_s is None or not self._pays(bits_per_s):
            return None
        began_s = self._cpu_s()
        size, share = element_bytes(chunk)
        compressed = compress(chunk, size) if share <= _WORTH_RATIO else None
        if compressed is not None and len(compressed) > _WORTH_RATIO * len(chunk):
            compressed = None
        self._learn(len(chunk), compressed, self._cpu_s() - began_s)
        return compressed

    def _pays(self, bits_per_s: float) -> bool:
        """True if compression is worth a try: always at first, and for one chunk in `_RETRY_CHUNKS`."""
        saved_s_per_byte = 8 * (1 - self._share_left) / bits_per_s
        spent_s_per_byte = self._encode_s_per_byte * (1 + _DECODE_SHARE)
        if saved_s_per_byte > spent_s_per_byte or self._skipped >= _RETRY_CHUNKS:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def _learn(self, nbytes: int, compressed: bytearray | None, encode_s: float) -> None:
        counters, first = self.counters, self._encode_s_per_byte == 0.0
        share = 1.0 if compressed is None else len(compressed) / nbytes
        weight = 1.0 if first else _SMOOTHING
        self._share_left += weight * (share - self._share_left)
        self._encode_s_per_byte += weight * (encode_s / nbytes - self._encode_s_per_byte)
        counters.encode_s += encode_s
        if compressed is not None:
            counters.coded_chunks += 1
            counters.raw_bytes += nbytes
            counters.sent_bytes += len(compressed)
