from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.engines.page_digests import byte_sums, page_sums
from prfaas.serving.engines.vllm.device_pages import DevicePages, layer_pages
from prfaas.serving.engines.vllm.pages import (
    HostPages,
    LayoutError,
    PagedSource,
    raw_pages,
)

BACKENDS = [HostPages, DevicePages]


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator).to(dtype)


def block_bytes(tensor: torch.Tensor, block: int) -> bytes:
    return tensor[block].contiguous().view(torch.uint8).numpy().tobytes()


def test_pages_share_the_engines_memory() -> None:
    kv = filled((5, 2, 16, 8))
    raw = raw_pages(kv, 5)
    assert raw.shape == (5, 2 * 16 * 8 * 2)
    assert raw[3].numpy().tobytes() == block_bytes(kv, 3)
    raw[3].zero_()
    assert not kv[3].any()


def test_permuted_but_dense_blocks_are_pages_in_memory_order() -> None:
    kv = filled((5, 16, 2, 8)).permute(0, 2, 1, 3)
    raw = raw_pages(kv, 5)
    assert raw[1].numpy().tobytes() == block_bytes(kv.permute(0, 2, 1, 3), 1)


def test_kernel_blocks_are_joined_to_the_managers_block() -> None:
    kv = filled((12, 2, 4, 8))
    raw = raw_pages(kv, 6)
    assert raw.shape == (6, 2 * 2 * 4 * 8 * 2)
    assert raw[2].numpy().tobytes() == block_bytes(kv, 4) + block_bytes(kv, 5)


def test_padding_of_a_state_row_is_not_part_of_the_page() -> None:
    rows = torch.arange(4 * 100, dtype=torch.int16).view(torch.int8).reshape(4, 200)
    assert raw_pages(rows, 4, content_bytes=60).shape == (4, 60)


def test_padded_rows_keep_their_stride() -> None:
    rows = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 64)[:, :48]
    raw = raw_pages(rows, 4)
    assert raw[2].numpy().tobytes() == bytes(range(128, 176))


@pytest.mark.parametrize(
    ("tensor", "blocks"),
    [
        (torch.zeros(5, 8), 4),
        (torch.zeros(5), 5),
        (torch.zeros(4, 8, 8)[:, :, :4], 4),
        (torch.zeros(8, 8)[:, :4], 4),
    ],
)
def test_memory_that_is_no_row_of_pages_is_refused(tensor: torch.Tensor, blocks: int) -> None:
    with pytest.raises(LayoutError):
        raw_pages(tensor, blocks)


def test_the_copies_are_chosen_by_device() -> None:
    assert isinstance(layer_pages(torch.zeros(2, 8, dtype=torch.uint8)), HostPages)


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_a_source_reads_any_range_of_its_run(backend: type[HostPages], data: st.DataObject) -> None:
    page_bytes = data.draw(st.integers(1, 40))
    memory = np.random.default_rng(3).integers(0, 256, (6, page_bytes), dtype=np.uint8)
    pages = backend(torch.from_numpy(memory.copy()))
    blocks = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    whole = b"".join(memory[b].tobytes() for b in blocks)
    source = PagedSource(pages, blocks)
    assert source.nbytes == len(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    if data.draw(st.booleans()):
        source.detach()
    out = bytearray(stop - start)
    source.read_into(start, memoryview(out))
    assert bytes(out) == whole[start:stop]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_detached_source_does_not_see_what_the_engine_writes_later(backend: type[HostPages]) -> None:
    memory = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    source = PagedSource(backend(memory), [2, 1])
    source.detach()
    memory.zero_()
    out = bytearray(16)
    source.read_into(0, memoryview(out))
    assert bytes(out) == bytes(range(16, 24)) + bytes(range(8, 16))


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_a_run_is_written_from_pieces_of_any_size(backend: type[HostPages], data: st.DataObject) -> None:
    page_bytes, padding = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 0, 3]))
    memory = torch.zeros(9, page_bytes + padding, dtype=torch.uint8)
    blocks = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True))
    content = np.random.default_rng(6).integers(1, 256, len(blocks) * page_bytes, dtype=np.uint8).tobytes()
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=5))
    pieces = [memoryview(bytearray(content[a:b])) for a, b in pairwise(sorted({0, len(content), *cuts}))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DevicePages, "WRITE_BYTES", data.draw(st.integers(1, 100)))
        pages = backend(memory[:, :page_bytes])
        pages.write_run(blocks, pieces)
        pages.flush()
    assert b"".join(memory[block, :page_bytes].numpy().tobytes() for block in blocks) == content
    untouched = [block for block in range(9) if block not in blocks]
    assert not memory[untouched].any()
    assert not memory[:, page_bytes:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_fills_a_page_from_pieces(backend: type[HostPages]) -> None:
    memory = torch.zeros(3, 10, dtype=torch.uint8)
    pages = backend(memory)
    data = bytearray(range(1, 11))
    pages.write_run([1], [memoryview(data)[:3], memoryview(data)[3:4], memoryview(data)[4:]])
    pages.flush()
    assert memory[1].tolist() == list(range(1, 11))
    assert not memory[0].any()
    assert not memory[2].any()


@given(data=st.data())
def test_a_run_of_pages_is_filled_however_its_bytes_are_cut(data: st.DataObject) -> None:
    page_bytes = data.draw(st.integers(1, 12))
    blocks = data.draw(st.permutations(range(8)))[: data.draw(st.integers(1, 8))]
    content = np.random.default_rng(1).integers(1, 256, len(blocks) * page_bytes, dtype=np.uint8)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(content) - 1)), max_size=6)) - {len(content)})
    pieces = [memoryview(part) for part in np.split(content, cuts)]
    expected = np.zeros((8, page_bytes), dtype=np.uint8)
    expected[blocks] = content.reshape(-1, page_bytes)
    for backend in BACKENDS:
        memory = torch.zeros(8, page_bytes, dtype=torch.uint8)
        pages = backend(memory)
        pages.write_run(blocks, pieces)
        pages.flush()
        assert np.array_equal(memory.numpy(), expected)


@given(data=st.data())
def test_sums_are_the_same_wherever_pages_lie(data: st.DataObject) -> None:
    """One page after the other in host memory, or gathered on a device; scattered, doubled, of any size."""
    page_bytes = data.draw(st.integers(1, 40))
    blocks = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12))
    memory = np.random.default_rng(4).integers(0, 256, (12, page_bytes), dtype=np.uint8)
    raw = torch.from_numpy(memory)
    filled_up = np.pad(memory, ((0, 0), (0, -page_bytes % 8))).view(np.int64)
    expected = page_sums(filled_up[blocks]).tolist()
    with pytest.MonkeyPatch.context() as patch:
        most = data.draw(st.integers(1, 100))
        patch.setattr(DevicePages, "SUM_BYTES", most)
        for backend in BACKENDS:
            assert backend(raw).sums(blocks).wait().tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_what_is_written_is_summed_up(backend: type[HostPages], data: st.DataObject) -> None:
    """Pages on lines of the cache or not, in pieces that end anywhere or with a line, or inside a page."""
    grain = data.draw(st.sampled_from([64, 64, 8, 1]))
    page_bytes = grain * data.draw(st.integers(1, 5000 // grain))
    padding, begin = (grain * data.draw(st.integers(0, 2)) for _ in range(2))
    memory = torch.zeros(begin + 9 * (page_bytes + padding) + 64, dtype=torch.uint8)
    # Lines begin where the memory's addresses are multiples of theirs.
    begin += -memory.data_ptr() % 64
    rows = memory.as_strided((9, page_bytes), (page_bytes + padding, 1), begin)
    blocks = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True))
    content = np.random.default_rng(7).integers(1, 256, len(blocks) * page_bytes, dtype=np.uint8)
    cuts = {grain * each for each in data.draw(st.sets(st.integers(1, len(content) // grain), max_size=4))}
    pieces = [memoryview(part) for part in np.split(content, sorted(cuts - {len(content)}))]
    pages = backend(rows)
    sums = pages.write_summed(blocks, pieces).wait()
    pages.flush()
    expected = torch.zeros_like(memory)
    expected.as_strided(rows.shape, rows.stride(), begin)[blocks] = torch.from_numpy(content).view(
        -1, page_bytes
    )
    assert torch.equal(memory, expected)
    assert sums.tolist() == byte_sums(content.reshape(-1, page_bytes)).tolist()


def test_sums_are_of_the_page_without_its_padding() -> None:
    rows = torch.arange(4 * 200, dtype=torch.int16).view(torch.uint8).reshape(4, 400)[:, :104]
    for backend in BACKENDS:
        pages = backend(raw_pages(rows, 4, content_bytes=96))
        expected = page_sums(rows[:, :96].contiguous().view(torch.int64).numpy()).tolist()
        assert pages.sums([0, 1, 2, 3]).wait().tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copied_last_page_is_read_in_place_of_the_block(backend: type[HostPages]) -> None:
    memory = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    pages = backend(memory)
    source = PagedSource(pages, [2, 1], pages.copied(1))
    memory[1] = 0
    out = bytearray(13)
    source.read_into(3, memoryview(out))
    assert bytes(out) == bytes(range(19, 24)) + bytes(range(8, 16))


@given(data=st.data())
def test_views_and_copies_are_the_same_bytes_of_the_pages(data: st.DataObject) -> None:
    page_bytes, padding = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 0, 3]))
    memory = np.random.default_rng(5).integers(0, 256, (9, page_bytes + padding), dtype=np.uint8)
    pages = data.draw(st.sampled_from(BACKENDS))(torch.from_numpy(memory)[:, :page_bytes])
    blocks = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=12))
    last_page = pages.copied(blocks[-1]) if data.draw(st.booleans()) else None
    whole = b"".join(memory[b, :page_bytes].tobytes() for b in blocks)
    source = PagedSource(pages, blocks, last_page)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPages, "MIN_PIECE_BYTES", 0)
        pieces = source.views(start, stop - start)
    assert pieces is not None
    assert b"".join(pieces) == whole[start:stop]
    out = bytearray(stop - start)
    source.read_into(start, memoryview(out))
    assert bytes(out) == whole[start:stop]


def test_neighbours_are_one_view_of_the_engines_own_memory() -> None:
    memory = torch.zeros(8, 16384, dtype=torch.uint8)
    source = PagedSource(HostPages(memory), [2, 3, 4, 7, 6])
    views = source.views(100, 5 * 16384 - 100)
    assert views is not None
    assert [view.nbytes for view in views] == [3 * 16384 - 100, 16384, 16384]
    memory[3] = 9
    assert views[0][16384 - 100 : 2 * 16384 - 100] == bytes([9]) * 16384


def test_many_small_pieces_are_copied() -> None:
    pages = HostPages(torch.zeros(8, 12000, dtype=torch.uint8))
    assert PagedSource(pages, [1, 3, 5]).views(0, 3 * 12000) is None
    assert PagedSource(pages, [1, 2, 5]).views(0, 3 * 12000) is not None


def test_a_detached_source_shows_its_own_memory() -> None:
    memory = torch.full((4, 4096), 5, dtype=torch.uint8)
    source = PagedSource(HostPages(memory), [2, 1])
    source.detach()
    memory.zero_()
    (view,) = source.views(4000, 200) or []
    assert view == bytes([5]) * 200
