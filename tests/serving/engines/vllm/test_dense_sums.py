"""Sums of wire pages in an engine's own pages: those of the wire pages themselves, without gathering each."""

import numpy as np
import pytest
import torch

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout, PagePart, WirePage, wire_forms
from prfaas.serving.engines.page_digests import page_sums
from prfaas.serving.engines.vllm import cut_pages as cut_pages_module
from prfaas.serving.engines.vllm.cut_pages import CutHostPages, cut_pages
from prfaas.serving.engines.vllm.pages import HostPages
from prfaas.serving.engines.vllm.part_runs import PartRuns

BLOCKS, HEADS, WIDTH = 6, 4, 256
"""Of keys and values of one token in a head: 256 bytes."""


def layout(order: str, tokens: int) -> PageLayout:
    """Of pages of 1 KiB a token."""
    head_bytes = tokens * WIDTH
    if order == "NHD":
        parts = [PagePart(HEADS, 1, WIDTH, 0, HEADS * WIDTH, WIDTH, 0)]
    elif order == "HND":
        parts = [PagePart(HEADS, 1, WIDTH, 0, WIDTH, head_bytes, 0)]
    else:
        # As vLLM's CPU backend has it: of each head keys by elements, then values by tokens.
        keys = PagePart(HEADS, WIDTH // 4, 2, 0, 2, head_bytes, 2 * tokens)
        parts = [keys, PagePart(HEADS, 1, WIDTH // 2, head_bytes // 2, WIDTH // 2, head_bytes, 0)]
    return PageLayout(GroupKind.FULL, tokens, tokens, HEADS * head_bytes, tuple(parts))


def memory_of(page_bytes: int, offset: int = 0, gap: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    memory = torch.randint(
        0, 256, (offset + BLOCKS * (page_bytes + gap),), dtype=torch.uint8, generator=generator
    )
    return memory.as_strided((BLOCKS, page_bytes), (page_bytes + gap, 1), offset)


def expected(pages: CutHostPages, ids: list[int]) -> list[int]:
    content = memoryview(bytearray(len(ids) * pages.page_bytes))
    pages.read(np.array(ids), 0, content)
    words = np.frombuffer(content, dtype=np.uint8).reshape(len(ids), -1)
    found: list[int] = page_sums(words.view(np.int64)).tolist()
    return found


def cut(ours: PageLayout, theirs: PageLayout, raw: torch.Tensor, *, sends: bool = True) -> CutHostPages:
    (form,) = wire_forms([ours], [theirs], "a", "b", sends=sends)
    assert isinstance(form, WirePage)
    pages = cut_pages(HostPages(raw), ours, form)
    assert isinstance(pages, CutHostPages)
    return pages


PAIRS = [
    (layout("HND", 512), layout("HND", 128), True),
    (layout("HND", 512), layout("HND", 128), False),
    (layout("CPU", 512), layout("CPU", 128), True),
    (layout("CPU", 128), layout("CPU", 32), False),
    (layout("CPU", 96), layout("CPU", 64), True),
    (layout("NHD", 128), layout("HND", 128), False),
    (layout("HND", 128), layout("NHD", 128), False),
    (layout("NHD", 512), layout("HND", 128), True),
    (layout("HND", 512), layout("NHD", 128), True),
    (layout("NHD", 96), layout("HND", 64), False),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
@pytest.mark.parametrize("place", [(0, 0), (64, 0), (8, 24)])
def test_sums_are_those_of_the_wire_pages(
    number: int, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, sends = PAIRS[number]
    pages = cut(ours, theirs, memory_of(ours.page_bytes, *place), sends=sends)
    cuts = ours.page_bytes // pages.page_bytes
    whole = [block * cuts + each for block in (4, 1, 5, 0) for each in range(cuts)]
    torn = whole[1:-1]
    known = [expected(pages, ids) for ids in (whole, torn)]

    def sums_of_copies(*_: object) -> None:
        raise AssertionError("wire pages were gathered")

    monkeypatch.setattr(cut_pages_module, "byte_sums", sums_of_copies)
    for ids, sums in zip((whole, torn), known, strict=True):
        assert pages.sums(ids).wait().tolist() == sums


def test_wire_pages_of_any_number_and_order_have_their_sums() -> None:
    ours = layout("CPU", 512)
    pages = cut(ours, layout("CPU", 128), memory_of(ours.page_bytes))
    for ids in ([4, 9, 10], [9, 8, 11, 10], [3, 4, 5, 6, 7, 8], [6], [6, 6], []):
        assert pages.sums(ids).wait().tolist() == (expected(pages, ids) if ids else [])


def test_short_and_long_runs_in_one_page_have_their_own_sums() -> None:
    """Two wire pages of the long ones are as many words as four of the short ones."""
    parts = (
        PartRuns(3 * 128, 0, 0, 4, 128, 4096, ((3, 512, 128),), 128),
        PartRuns(2 * 256, 2048, 384, 4, 256, 4096, ((2, 1024, 256),), 256),
    )
    raw = memory_of(4096)
    pages = CutHostPages(raw, parts, BLOCKS)
    dense = raw.numpy()
    for ids in ([0, 1, 2, 3], [6, 7], [9, 10, 11], [5, 14, 15]):
        content = [
            dense[each // 4, at + each % 4 * run : at + each % 4 * run + run]
            for each in ids
            for at, run in ((0, 128), (512, 128), (1024, 128), (2048, 256), (3072, 256))
        ]
        words = np.concatenate(content).reshape(len(ids), -1)
        assert pages.sums(ids).wait().tolist() == page_sums(words.view(np.int64)).tolist()
        copied = memoryview(bytearray(len(ids) * pages.page_bytes))
        pages.read(np.array(ids), 0, copied)
        assert bytes(copied) == words.tobytes()


def test_a_page_that_is_not_there_is_refused() -> None:
    """Compiled loops would read, and write, the memory of others."""
    ours = layout("HND", 512)
    raw = memory_of(ours.page_bytes)
    own, pages = HostPages(raw), cut(ours, layout("HND", 128), raw)
    content, whole = (memoryview(bytearray(each.page_bytes)) for each in (pages, own))
    for block in (-1, 4 * BLOCKS):
        for attempt in (
            lambda at=block: pages.sums([0, at]),
            lambda at=block: own.sums([0, at]),
            lambda at=block: pages.read(np.array([at]), 0, content),
            lambda at=block: pages.write_run([at], [content]),
            lambda at=block: own.write_summed([at], [whole]),
        ):
            with pytest.raises(IndexError, match="no such page"):
                attempt()


def test_pages_that_begin_inside_a_word_are_summed_up_as_copies() -> None:
    ours, theirs = layout("HND", 512), layout("HND", 128)
    assert cut(ours, theirs, memory_of(ours.page_bytes))._dense is not None
    odd = cut(ours, theirs, memory_of(ours.page_bytes, 4))
    assert odd._dense is None
    assert odd.sums([0, 1, 2, 3]).wait().tolist() == expected(odd, [0, 1, 2, 3])


def test_sums_of_some_heads_are_computed_where_these_lie() -> None:
    ours, theirs = layout("HND", 512), layout("HND", 128)

    def of_one_head(kept: PageLayout) -> PageLayout:
        (part,) = kept.parts
        one = PagePart(1, 1, WIDTH, part.head_stride_bytes, part.token_stride_bytes, 0, 0)
        return PageLayout(kept.kind, kept.block_tokens, kept.page_tokens, kept.page_bytes, (one,))

    for raw_layout in (layout("NHD", 512), ours):
        pages = cut(of_one_head(raw_layout), of_one_head(theirs), memory_of(ours.page_bytes))
        assert pages._dense is not None
        assert pages.sums([0, 1, 2, 3]).wait().tolist() == expected(pages, [0, 1, 2, 3])
