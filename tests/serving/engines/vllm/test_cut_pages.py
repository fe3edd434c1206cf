"""Wire pages of engines that keep the same KV differently: read from one, written to the other."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.kv.page_layout import PageLayout, wire_forms
from prfaas.serving.engines.page_digests import page_sums
from prfaas.serving.engines.vllm.cut_pages import CutDevicePages, CutHostPages, cut_pages
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.layout import page_layout
from prfaas.serving.engines.vllm.pages import HostPages, PagedSource, WirePages, raw_pages

BACKENDS = [HostPages, DevicePages]
TOGETHER, APART = ("HND", "NHD", "HND in memory", "MLA"), ("HND apart", "NHD apart")


@dataclass(frozen=True)
class Memory:
    """One layer's KV in an engine, seen as (blocks of the kernels, tokens, parts, heads, width)."""

    tensor: torch.Tensor
    seen: torch.Tensor
    layout: PageLayout

    @classmethod
    def of(cls, order: str, blocks: int, block_tokens: int, split: int, heads: int, width: int) -> "Memory":
        """`split`: the kernels' blocks in one of the manager's."""
        count, tokens = blocks * split, block_tokens // split
        if order == "MLA":
            tensor = torch.zeros((count, tokens, width), dtype=torch.int16)
            seen = tensor[:, :, None, None, :]
        elif order == "HND":
            tensor = torch.zeros((count, heads, tokens, width), dtype=torch.int16)
            seen = tensor.permute(0, 2, 1, 3)[:, :, None]
        elif order == "NHD":
            tensor = torch.zeros((count, tokens, heads, width), dtype=torch.int16)
            seen = tensor[:, :, None]
        elif order == "HND in memory":
            tensor = torch.zeros((count, heads, tokens, width), dtype=torch.int16).permute(0, 2, 1, 3)
            seen = tensor[:, :, None]
        elif order == "NHD apart":
            tensor = torch.zeros((count, 2, tokens, heads, width), dtype=torch.int16)
            seen = tensor.permute(0, 2, 1, 3, 4)
        else:
            tensor = torch.zeros((count, 2, heads, tokens, width), dtype=torch.int16)
            seen = tensor.permute(0, 3, 1, 2, 4)
        group = KvGroup(0, GroupKind.FULL, block_tokens, 0)
        page_bytes = raw_pages(tensor, blocks).shape[1]
        layout = page_layout(group, tensor, 1 if order == "MLA" else heads, page_bytes)
        assert layout.parts and layout.page_tokens == tokens
        return cls(tensor, seen, layout)

    def token(self, block: int, row: int) -> torch.Tensor:
        """What is kept of one token of one of the manager's blocks."""
        per_block = self.layout.block_tokens // self.layout.page_tokens
        inside, row = divmod(row, self.layout.page_tokens)
        return self.seen[block * per_block + inside, row]


ORDERS = st.one_of(
    st.tuples(st.sampled_from(TOGETHER[:3]), st.sampled_from(TOGETHER[:3])),
    st.tuples(st.sampled_from(APART), st.sampled_from(APART)),
    st.just(("MLA", "MLA")),
)
SPLITS = st.tuples(st.sampled_from([4, 8, 12, 20]), st.sampled_from([1, 2, 4]))


def worked_on(memory: Memory, other: Memory, blocks: int, backend: type[HostPages]) -> WirePages:
    (form,) = wire_forms([memory.layout], [other.layout], "a", "b")
    pages = backend(raw_pages(memory.tensor, blocks))
    return pages if form is None else cut_pages(pages, memory.layout, form)


@given(data=st.data())
def test_pages_are_as_if_the_other_engine_had_computed_them(data: st.DataObject) -> None:
    orders, sides = data.draw(ORDERS), [data.draw(SPLITS), data.draw(SPLITS)]
    heads, width = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 5, 24]))
    # A page with as many tokens as heads could be either order: such pages are not cut.
    assume(all(size // split not in (1, 2, heads) for size, split in sides))
    tokens, blocks = 120, 40
    ours, theirs = (
        Memory.of(order, blocks, block_tokens, split, heads, width)
        for order, (block_tokens, split) in zip(orders, sides, strict=True)
    )
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    ours.tensor.copy_(torch.from_numpy(random.integers(1, 30000, ours.tensor.shape, dtype=np.int16)))
    here, there = (data.draw(st.sampled_from(BACKENDS)) for _ in range(2))
    source, target = worked_on(ours, theirs, blocks, here), worked_on(theirs, ours, blocks, there)
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
    assert int((theirs.tensor != 0).sum()) == len(moved) * theirs.seen[0, 0].numel()
    words = np.frombuffer(content, dtype=np.uint8).reshape(last - first, -1)
    expected = page_sums(np.pad(words, ((0, 0), (0, -words.shape[1] % 8))).view(np.int64)).tolist()
    assert source.sums(ids[0], loaded=False).wait().tolist() == expected
    assert target.sums(ids[1], loaded=True).wait().tolist() == expected


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
    ("shape", "heads"),
    [
        ((8, 16, 16, 64), 16),  # tokens or heads first?
        ((8, 4, 8, 64), 4),  # neither is the block
        ((8, 16, 64), 2),  # no heads
        ((8, 2, 16, 3, 64), 4),  # other heads
    ],
)
def test_a_shape_that_leaves_a_doubt_is_moved_as_it_is(shape: tuple[int, ...], heads: int) -> None:
    tensor = torch.zeros(shape, dtype=torch.int16)
    group = KvGroup(0, GroupKind.FULL, 16, 0)
    page_bytes = tensor[0].numel() * 2
    assert page_layout(group, tensor, heads, page_bytes) == PageLayout(GroupKind.FULL, 16, 16, page_bytes)


def test_keys_and_values_that_are_as_many_as_heads_are_told_apart() -> None:
    tensor = torch.zeros((8, 2, 16, 2, 64), dtype=torch.int16)
    layout = page_layout(KvGroup(0, GroupKind.FULL, 16, 0), tensor, 2, tensor[0].numel() * 2)
    assert [(part.offset_bytes, part.head_stride_bytes) for part in layout.parts] == [(0, 128), (4096, 128)]
