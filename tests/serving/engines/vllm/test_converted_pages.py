"""Engines that keep the same KV in elements of 16 and of 8 bits: those of 8 travel, whichever side has them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.kv.page_layout import PageLayout, UnlikePagesError, WirePage, wire_forms
from prfaas.core.kv.rank_shares import RankPair, paired_ranks
from prfaas.serving.engines.page_digests import byte_sums
from prfaas.serving.engines.vllm.cut_pages import ConvertedPages, cut_pages
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.layout import Packing, page_layout
from prfaas.serving.engines.vllm.pages import HostPages, PagedSource, WirePages, raw_pages

WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NARROW = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
BACKENDS = [HostPages, DevicePages]
BLOCKS, WIDTH, LARGEST = 9, 8, {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


class Engine:
    """One layer's KV, in blocks of some tokens, heads first."""

    def __init__(self, element: str, block_tokens: int, heads: int) -> None:
        self.block_tokens = block_tokens
        dtype = {**WIDE, **NARROW}[element]
        self.kv = torch.zeros((BLOCKS, heads, block_tokens, WIDTH), dtype=dtype)
        group = KvGroup(0, GroupKind.FULL, block_tokens, 0)
        self.raw = raw_pages(self.kv, BLOCKS)
        self.layout = page_layout(group, self.kv, heads, Packing.PLAIN, self.raw.shape[1], element)
        assert self.layout.parts

    def fill(self, random: np.random.Generator) -> None:
        values = torch.from_numpy(random.normal(0, 100, self.kv.shape)).float()
        self.kv.copy_(values.to(self.kv.dtype))

    def of(self, table: list[int], tokens: int) -> torch.Tensor:
        """What is kept of the first tokens: (tokens, heads, width)."""
        rows = [self.kv[table[at // self.block_tokens], :, at % self.block_tokens] for at in range(tokens)]
        return torch.stack([row.float() for row in rows])

    def pages(self, layout: PageLayout, form: WirePage, backend: type[HostPages]) -> WirePages:
        return cut_pages(backend(self.raw), layout, form)


def rounded(values: torch.Tensor, element: str) -> torch.Tensor:
    """To the nearest element, which is not beyond the largest."""
    most = LARGEST[element]
    return values.clamp(-most, most).to(NARROW[element]).float()


def ids_of(table: list[int], block_tokens: int, tokens: int, wire_tokens: int) -> list[int]:
    per_block = block_tokens // wire_tokens
    return [
        table[at // block_tokens] * per_block + at % block_tokens // wire_tokens
        for at in range(0, tokens, wire_tokens)
    ]


@given(data=st.data())
def test_what_arrives_is_what_was_kept_rounded_once(data: st.DataObject) -> None:
    narrow, wide = data.draw(st.sampled_from(sorted(NARROW))), data.draw(st.sampled_from(sorted(WIDE)))
    elements = data.draw(st.permutations([narrow, wide]))
    sizes = [data.draw(st.sampled_from([4, 8, 12])) for _ in elements]
    ranks = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    ours, theirs = (
        Engine(element, size, 4 // count) for element, size, count in zip(elements, sizes, ranks, strict=True)
    )
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    ours.fill(random)
    producer = data.draw(st.integers(0, ranks[0] - 1))
    pair = RankPair(producer, ranks[0], data.draw(st.sampled_from(paired_ranks(producer, *ranks))), ranks[1])
    both = pair.share(ours.layout, theirs.layout, "a", "b")
    assert both is not None
    (form,) = wire_forms(both[:1], both[1:], "a", "b", sends=True)
    assert wire_forms(both[1:], both[:1], "b", "a", sends=False) == (form,)
    assert form is not None and form.element == narrow
    here, there = (data.draw(st.sampled_from(BACKENDS)) for _ in range(2))
    source, target = ours.pages(both[0], form, here), theirs.pages(both[1], form, there)
    assert isinstance(source, ConvertedPages) == (elements[0] == wide)
    assert isinstance(target, ConvertedPages) == (elements[1] == wide)
    tokens = form.tokens * data.draw(st.integers(1, 2 * min(sizes) // form.tokens))
    tables = [random.permutation(np.arange(1, BLOCKS)).tolist() for _ in elements]
    ids = [ids_of(table, size, tokens, form.tokens) for table, size in zip(tables, sizes, strict=True)]
    content = memoryview(bytearray(len(ids[0]) * source.page_bytes))
    assert source.page_bytes == target.page_bytes == form.tokens * 4 // max(ranks) * WIDTH
    sent = PagedSource(source, ids[0], source.copied(ids[0][-1]) if data.draw(st.booleans()) else None)
    cut = data.draw(st.integers(0, len(content)))
    sent.read_into(0, content[:cut])
    sent.read_into(cut, content[cut:])
    target.write_run(ids[1], [content[:cut], content[cut:]])
    target.flush()
    first_sent, first_kept, heads = pair._heads(4 // ranks[0], 4 // ranks[1]) or (0, 0, 4)
    leaves = ours.of(tables[0], tokens)[:, first_sent : first_sent + heads]
    arrived = theirs.of(tables[1], tokens)[:, first_kept : first_kept + heads]
    assert torch.equal(arrived, rounded(leaves, narrow))
    sums = byte_sums(np.frombuffer(content, dtype=np.uint8).reshape(len(ids[0]), -1)).tolist()
    assert source.sums(ids[0]).wait().tolist() == sums
    assert target.sums(ids[1]).wait().tolist() == sums


@pytest.mark.parametrize("narrow", sorted(NARROW))
def test_every_narrow_element_is_the_same_after_it_was_widened(narrow: str) -> None:
    """So digests of both sides agree. Infinities do not return: such a page is computed anew."""
    wide = Engine("bfloat16", 32, 1)
    (form,) = wire_forms([wide.layout], [Engine(narrow, 32, 1).layout], "a", "b", sends=True)
    assert form is not None
    pages = wide.pages(wide.layout, form, HostPages)
    content = torch.arange(256, dtype=torch.uint8)
    finite = content.view(NARROW[narrow]).float().isfinite()
    content[~finite] = 0
    pages.write_run([5], [content.numpy().data])
    back = memoryview(bytearray(256))
    pages.read(np.array([5]), 0, back)
    assert bytes(back) == content.numpy().tobytes()
    assert int(finite.sum()) == {"fp8_e4m3": 254, "fp8_e5m2": 248}[narrow]


def test_what_is_too_large_becomes_the_largest_element() -> None:
    wide = Engine("bfloat16", 4, 1)
    wide.kv[3].fill_(1e30)
    wide.kv[3, 0, 0] = -1e30
    (form,) = wire_forms([wide.layout], [Engine("fp8_e4m3", 4, 1).layout], "a", "b", sends=True)
    assert form is not None
    content = torch.zeros(32, dtype=torch.uint8)
    wide.pages(wide.layout, form, HostPages).read(np.array([3]), 0, content.numpy().data)
    values = content.view(torch.float8_e4m3fn).float()
    assert values.tolist() == [-448.0] * 8 + [448.0] * 24


@pytest.mark.parametrize("other", ["float16", ""])
def test_elements_that_are_not_half_as_long_are_refused_with_both_values(other: str) -> None:
    ours = Engine("bfloat16", 4, 2).layout
    theirs = replace(ours, element=other)
    values = f"a has 'bfloat16', b has '{other or 'elements of another kind'}'"
    with pytest.raises(UnlikePagesError, match=f"'element' of full_attention layers: {values}"):
        wire_forms([ours], [theirs], "a", "b", sends=True)


@pytest.mark.parametrize("element", sorted(NARROW))
def test_vllms_own_cpu_kernel_packs_both_alike(element: str) -> None:
    """What its kernel writes as fp8, widened, is what it writes in 16 bits, where no element must be rounded."""
    ops = pytest.importorskip("vllm._custom_ops")
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has fp8 caches on CPUs with AVX-512 alone")
    heads, elements, size, blocks = 2, 64, 32, 5
    random = torch.Generator().manual_seed(1)
    keys, values = (
        torch.randn((96, heads, elements), generator=random).to(NARROW[element]).bfloat16() for _ in range(2)
    )
    slots = (torch.tensor([3, 1, 4])[:, None] * size + torch.arange(size)).flatten()
    memories, layouts = [], []
    for dtype, name in ((torch.bfloat16, "auto"), (torch.uint8, element)):
        tensor = torch.zeros((blocks, heads, size, 2 * elements), dtype=dtype)
        both = tensor.view(blocks, heads, 2 * size, elements).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *both, slots, "vec", 1.0, 1.0, name)
        memories.append(tensor)
        group = KvGroup(0, GroupKind.FULL, size, 0)
        page_bytes = raw_pages(tensor, blocks).shape[1]
        kept = "bfloat16" if name == "auto" else element
        layouts.append(page_layout(group, tensor, heads, Packing.CPU_VECTORS, page_bytes, kept))
    (form,) = wire_forms(layouts[:1], layouts[1:], "a", "b", sends=True)
    assert form is not None
    source, target = (
        cut_pages(HostPages(raw_pages(tensor, blocks)), layout, form)
        for tensor, layout in zip(memories, layouts, strict=True)
    )
    expected = memories[1].clone()
    memories[1].zero_()
    content = memoryview(bytearray(3 * source.page_bytes))
    source.read(np.array([3, 1, 4]), 0, content)
    target.write_run([3, 1, 4], [content])
    assert torch.equal(memories[1].view(NARROW[element]).float(), expected.view(NARROW[element]).float())
