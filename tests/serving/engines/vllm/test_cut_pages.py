"""Wire pages of engines that keep the same KV differently: read from one, written to the other."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.kv.page_layout import PageLayout, wire_forms
from prfaas.core.kv.rank_shares import RankPair, paired_ranks
from prfaas.serving.engines.page_digests import page_sums
from prfaas.serving.engines.vllm.cut_pages import CutDevicePages, CutHostPages, cut_pages
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.layout import Packing, page_layout
from prfaas.serving.engines.vllm.pages import HostPages, PagedSource, WirePages, raw_pages

BACKENDS = [HostPages, DevicePages]
ORDERS = ("HND", "NHD", "CPU")


@dataclass(frozen=True)
class Memory:
    """One layer's KV in an engine, and where keys and values of a token lie: (blocks, tokens, heads, elements)."""

    tensor: torch.Tensor
    seen: tuple[torch.Tensor, ...]
    layout: PageLayout

    @classmethod
    def of(cls, order: str, blocks: int, block_tokens: int, split: int, heads: int, width: int) -> "Memory":
        """`split`: the kernels' blocks in one of the manager's; `width`: elements of a head's keys and values."""
        count, tokens = blocks * split, block_tokens // split
        if order == "NHD":
            tensor = torch.zeros((count, tokens, heads, width), dtype=torch.int16).permute(0, 2, 1, 3)
        else:
            tensor = torch.zeros((count, heads, tokens, width), dtype=torch.int16)
        if order == "CPU":
            size, page, head = width // 2, heads * tokens * width, tokens * width
            keys = tensor.as_strided((count, tokens, heads, size), (page, 1, head, tokens))
            values = tensor.as_strided((count, tokens, heads, size), (page, size, head, 1), tokens * size)
            seen: tuple[torch.Tensor, ...] = (keys, values)
        else:
            seen = (tensor.permute(0, 2, 1, 3),)
        group = KvGroup(0, GroupKind.FULL, block_tokens, 0)
        packing = Packing.CPU_VECTORS if order == "CPU" else Packing.PLAIN
        layout = page_layout(group, tensor, heads, packing, raw_pages(tensor, blocks).shape[1])
        assert layout.parts and layout.page_tokens == tokens
        return cls(tensor, seen, layout)

    def token(self, block: int, row: int) -> torch.Tensor:
        """What is kept of one token of one of the manager's blocks."""
        per_block = self.layout.block_tokens // self.layout.page_tokens
        inside, row = divmod(row, self.layout.page_tokens)
        return torch.cat([part[block * per_block + inside, row].flatten() for part in self.seen])


def worked_on(
    memory: Memory, other: Memory, blocks: int, backend: type[HostPages], *, sends: bool = True
) -> WirePages:
    (form,) = wire_forms([memory.layout], [other.layout], "a", "b", sends=sends)
    pages = backend(raw_pages(memory.tensor, blocks))
    return pages if form is None else cut_pages(pages, memory.layout, form)


@pytest.mark.slow("a property over many pairs of layouts")
@given(data=st.data())
def test_pages_are_as_if_the_other_engine_had_computed_them(data: st.DataObject) -> None:
    orders: tuple[str, ...] = ("CPU", "CPU")
    if data.draw(st.booleans()):
        # The CPU backend's, in blocks of multiples of 32 tokens.
        sides = [data.draw(st.sampled_from([(32, 1), (64, 1), (64, 2), (96, 1), (96, 3)])) for _ in range(2)]
    else:
        orders = tuple(data.draw(st.sampled_from(["HND", "NHD"])) for _ in range(2))
        sides = [
            data.draw(st.tuples(st.sampled_from([4, 8, 12, 20]), st.sampled_from([1, 2, 4])))
            for _ in range(2)
        ]
    heads, width = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([2, 10, 24]))
    tokens = 192 if orders[0] == "CPU" else 120
    blocks = 40
    ours, theirs = (
        Memory.of(order, blocks, block_tokens, split, heads, width)
        for order, (block_tokens, split) in zip(orders, sides, strict=True)
    )
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    ours.tensor.copy_(torch.from_numpy(random.integers(1, 30000, ours.tensor.shape, dtype=np.int16)))
    here, there = (data.draw(st.sampled_from(BACKENDS)) for _ in range(2))
    source, target = (
        worked_on(ours, theirs, blocks, here),
        worked_on(theirs, ours, blocks, there, sends=False),
    )
    assert source.page_bytes == target.page_bytes
    # A request's block tables at both sides, and the wire pages of its tokens.
    tables = [random.permutation(np.arange(1, blocks))[: tokens // size] for size, _ in sides]
    per_page = source.page_bytes * ours.layout.block_tokens // ours.layout.page_bytes
    first = data.draw(st.integers(0, tokens // per_page - 1))
    last = data.draw(st.integers(first + 1, tokens // per_page))
    ids = [
        [
            int(table[at * per_page // size]) * (size // per_page) + at % (size // per_page)
            for at in range(first, last)
        ]
        for table, (size, _) in zip(tables, sides, strict=True)
    ]
    content = memoryview(bytearray((last - first) * source.page_bytes))
    sent = PagedSource(source, ids[0], source.copied(ids[0][-1]) if data.draw(st.booleans()) else None)
    cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=4))})
    pieces = [content[a:b] for a, b in pairwise(cuts)]
    for start, piece in zip(cuts[:-1], pieces, strict=True):
        sent.read_into(start, piece)
    target.write_run(ids[1], pieces)
    target.flush()
    moved = range(first * per_page, last * per_page)
    for token in range(tokens):
        (mine, row), (other, place) = (divmod(token, size) for size, _ in sides)
        arrived = theirs.token(int(tables[1][other]), place)
        if token in moved:
            assert torch.equal(arrived, ours.token(int(tables[0][mine]), row))
        else:
            assert not arrived.any()
    # Nothing but these tokens was written.
    assert int((theirs.tensor != 0).sum()) == len(moved) * theirs.token(0, 0).numel()
    words = np.frombuffer(content, dtype=np.uint8).reshape(last - first, -1)
    expected = page_sums(np.pad(words, ((0, 0), (0, -words.shape[1] % 8))).view(np.int64)).tolist()
    assert source.sums(ids[0]).wait().tolist() == expected
    assert target.sums(ids[1]).wait().tolist() == expected


@given(data=st.data())
def test_of_unlike_ranks_the_heads_that_both_have_arrive(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([(1, 2), (2, 1), (1, 4), (4, 1), (2, 4)]))
    all_heads, blocks = data.draw(st.sampled_from([4, 8])), 10
    is_cpu = data.draw(st.booleans())
    orders = ["CPU", "CPU"] if is_cpu else [data.draw(st.sampled_from(["HND", "NHD"])) for _ in ranks]
    sizes = [data.draw(st.sampled_from([32, 64, 96] if is_cpu else [4, 8, 12])) for _ in ranks]
    width = data.draw(st.sampled_from([2, 8, 24]))
    ours, theirs = (
        Memory.of(order, blocks, size, 1, all_heads // count, width)
        for order, size, count in zip(orders, sizes, ranks, strict=True)
    )
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    ours.tensor.copy_(torch.from_numpy(random.integers(1, 30000, ours.tensor.shape, dtype=np.int16)))
    producer = data.draw(st.integers(0, ranks[0] - 1))
    pair = RankPair(producer, ranks[0], data.draw(st.sampled_from(paired_ranks(producer, *ranks))), ranks[1])
    both = pair.share(ours.layout, theirs.layout, "a", "b")
    assert both is not None
    forms = [wire_forms(both[:1], both[1:], "a", "b", sends=True)]
    forms.append(wire_forms(both[1:], both[:1], "b", "a", sends=False))
    assert forms[0] == forms[1]
    ((form,), _) = forms
    assert form is not None
    backends = [data.draw(st.sampled_from(BACKENDS)) for _ in ranks]
    source, target = (
        cut_pages(backend(raw_pages(memory.tensor, blocks)), layout, form)
        for backend, memory, layout in zip(backends, (ours, theirs), both, strict=True)
    )
    tokens = form.tokens * data.draw(st.integers(1, 2 * min(sizes) // form.tokens))
    tables = [random.permutation(np.arange(1, blocks)) for _ in ranks]
    ids = [
        [
            int(table[first // size]) * (size // form.tokens) + first % size // form.tokens
            for first in range(0, tokens, form.tokens)
        ]
        for table, size in zip(tables, sizes, strict=True)
    ]
    content = memoryview(bytearray(len(ids[0]) * source.page_bytes))
    PagedSource(source, ids[0]).read_into(0, content)
    target.write_run(ids[1], [content])
    first_sent, first_kept, heads = pair._heads(all_heads // ranks[0], all_heads // ranks[1]) or (0, 0, 0)
    for token in range(tokens):
        (mine, row), (other, place) = (divmod(token, size) for size in sizes)
        for sent, kept in zip(ours.seen, theirs.seen, strict=True):
            leaves = sent[int(tables[0][mine]), row, first_sent : first_sent + heads]
            assert torch.equal(kept[int(tables[1][other]), place, first_kept : first_kept + heads], leaves)
    assert int((theirs.tensor != 0).sum()) == tokens * heads * width
    words = np.frombuffer(content, dtype=np.uint8).reshape(len(ids[0]), -1)
    expected = page_sums(np.pad(words, ((0, 0), (0, -words.shape[1] % 8))).view(np.int64)).tolist()
    assert source.sums(ids[0]).wait().tolist() == expected
    assert target.sums(ids[1]).wait().tolist() == expected


def test_keys_and_values_of_a_head_lie_together_on_the_wire_too() -> None:
    """So a side whose pages are as small has them as they travel, whichever of its heads it shares."""
    wide, narrow = (Memory.of("CPU", 8, size, 1, heads, 24) for size, heads in ((64, 2), (32, 4)))
    (form,) = wire_forms([wide.layout], [narrow_heads(narrow)], "a", "b", sends=True)
    assert form is not None
    keys, values = form.parts
    assert keys.head_stride_bytes == values.head_stride_bytes == 32 * 24 * 2
    assert (keys.offset_bytes, values.offset_bytes) == (0, 32 * 12 * 2)
    pages = HostPages(raw_pages(narrow.tensor, 8))
    assert isinstance(cut_pages(pages, narrow_heads(narrow), form), HostPages)
    assert isinstance(cut_pages(HostPages(raw_pages(wide.tensor, 8)), wide.layout, form), CutHostPages)


def narrow_heads(memory: Memory) -> PageLayout:
    """The last two of a layout's four heads."""
    parts = (
        replace(part, heads=2, offset_bytes=part.offset_bytes + 2 * part.head_stride_bytes)
        for part in memory.layout.parts
    )
    return replace(memory.layout, parts=tuple(parts))


@pytest.mark.parametrize(("backend", "cut"), [(HostPages, CutHostPages), (DevicePages, CutDevicePages)])
def test_nothing_is_gathered_where_wire_pages_are_rows_of_memory(
    backend: type[HostPages], cut: type[WirePages]
) -> None:
    wide, narrow = (Memory.of("HND", 8, size, 1, 2, 24) for size in (16, 4))
    assert isinstance(worked_on(wide, narrow, 8, backend), cut)
    assert isinstance(worked_on(narrow, wide, 8, backend), backend)
    assert not isinstance(worked_on(narrow, wide, 8, backend), cut)
    wide, narrow = (Memory.of("NHD", 8, size, 1, 2, 24) for size in (16, 4))
    assert not isinstance(worked_on(wide, narrow, 8, backend), cut)
    # One copy of the sum's page is what a page has.
    assert worked_on(wide, narrow, 8, backend).page_bytes == 4 * 2 * 24 * 2


@pytest.mark.parametrize(
    ("shape", "packing"),
    [
        ((8, 4, 16, 64), Packing.UNKNOWN),
        ((8, 16, 64), Packing.PLAIN),
        ((8, 16, 4, 64), Packing.PLAIN),  # tokens first
        ((8, 4, 12, 64), Packing.PLAIN),  # no such blocks make one of 16
        ((8, 4, 16, 64), Packing.CPU_VECTORS),  # too small for the packing that is known
    ],
)
def test_a_page_that_is_not_known_is_moved_as_it_is(shape: tuple[int, ...], packing: Packing) -> None:
    tensor = torch.zeros(shape, dtype=torch.int16)
    page_bytes = tensor[0].numel() * 2
    layout = page_layout(KvGroup(0, GroupKind.FULL, 16, 0), tensor, 4, packing, page_bytes)
    assert layout == PageLayout(GroupKind.FULL, 16, 16, page_bytes)


@pytest.mark.parametrize("sizes", [(32, 128), (128, 32), (64, 96)])
def test_vllms_own_cpu_kernel_finds_each_token_in_the_other_blocks(sizes: tuple[int, int]) -> None:
    """What the kernel writes in blocks of one size, mapped to another, is what it would have written there."""
    ops = pytest.importorskip("vllm._custom_ops")
    heads, elements, tokens, blocks = 2, 64, 384, 14
    random = torch.Generator().manual_seed(1)
    keys, values = (torch.randn((tokens, heads, elements), generator=random).bfloat16() for _ in range(2))
    memories, layouts, tables = [], [], []
    for size in sizes:
        tensor = torch.zeros((blocks, heads, size, 2 * elements), dtype=torch.bfloat16)
        table = torch.randperm(blocks - 1, generator=random)[: tokens // size] + 1
        slots = (table[:, None] * size + torch.arange(size)).flatten()
        both = tensor.view(blocks, heads, 2 * size, elements).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *both, slots, "vec")
        group = KvGroup(0, GroupKind.FULL, size, 0)
        page_bytes = raw_pages(tensor, blocks).shape[1]
        memories.append(tensor)
        layouts.append(page_layout(group, tensor, heads, Packing.CPU_VECTORS, page_bytes))
        tables.append(table.tolist())
    (form,) = wire_forms(layouts[:1], layouts[1:], "a", "b", sends=True)
    assert form is not None
    expected = memories[1].clone()
    memories[1].zero_()
    ends = [
        cut_pages(HostPages(raw_pages(tensor, blocks)), layout, form)
        for tensor, layout in zip(memories, layouts, strict=True)
    ]
    ids = [
        [block * (size // form.tokens) + cut for block in table for cut in range(size // form.tokens)]
        for table, size in zip(tables, sizes, strict=True)
    ]
    content = memoryview(bytearray(tokens // form.tokens * ends[0].page_bytes))
    PagedSource(ends[0], ids[0]).read_into(0, content)
    ends[1].write_run(ids[1], [content])
    assert torch.equal(memories[1], expected)


@pytest.mark.parametrize(
    ("orders", "sizes", "heads"), [(("HND", "HND"), (512, 128), 2), (("HND", "HND"), (768, 512), 3)]
)
def test_long_runs_are_sent_from_where_they_lie(
    orders: tuple[str, str], sizes: tuple[int, int], heads: int
) -> None:
    """Of 16 KiB and more: 128 tokens of 128 bytes."""
    blocks = 5
    ours, theirs = (
        Memory.of(order, blocks, size, 1, heads, 64) for order, size in zip(orders, sizes, strict=True)
    )
    random = np.random.default_rng(3)
    ours.tensor.copy_(torch.from_numpy(random.integers(1, 30000, ours.tensor.shape, dtype=np.int16)))
    source = worked_on(ours, theirs, blocks, HostPages)
    assert isinstance(source, CutHostPages)
    per_page = ours.layout.page_bytes // source.page_bytes
    ids = np.array([page * per_page + cut for page in (3, 1, 4) for cut in range(per_page)])
    whole = memoryview(bytearray(len(ids) * source.page_bytes))
    source.read(ids, 0, whole)
    assert bytes(whole) != bytes(len(whole))
    for start, end in [(0, len(whole)), (5, 6), (100, 40000), (16383, 16385), (40000, len(whole) - 7)]:
        pieces = source.views(ids, start, end - start)
        assert pieces is not None
        assert b"".join(pieces) == bytes(whole[start:end])
        # No copies: what is written later is seen.
        ours.tensor.bitwise_not_()
        assert b"".join(pieces) != bytes(whole[start:end])
        ours.tensor.bitwise_not_()


def test_short_runs_are_copied_before_they_are_sent() -> None:
    ours, theirs = (Memory.of("HND", 5, size, 1, 2, 64) for size in (512, 64))
    source = worked_on(ours, theirs, 5, HostPages)
    assert isinstance(source, CutHostPages)
    assert source.views(np.array([1, 2]), 0, 2 * source.page_bytes) is None
