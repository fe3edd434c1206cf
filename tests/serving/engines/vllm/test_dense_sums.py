"""Sums of wire pages in an engine's own pages: those of the wire pages themselves, without gathering each."""

import numpy as np
import pytest
import torch

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout, PagePart, WirePage, wire_forms
from prfaas.serving.engines.page_digests import page_sums
from prfaas.serving.engines.vllm import cut_pages as cut_pages_module
from prfaas.serving.engines.vllm.cut_pages import CutHostPages, cut_pages
from prfaas.serving.engines.vllm.dense_sums import DenseSums
from prfaas.serving.engines.vllm.pages import HostPages

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

    def page_sums_of_copies(*_: object, **__: object) -> None:
        raise AssertionError("wire pages were gathered")

    monkeypatch.setattr(cut_pages_module, "page_sums", page_sums_of_copies)
    for ids, sums in zip((whole, torn), known, strict=True):
        assert pages.sums(ids, loaded=False).wait().tolist() == sums


def test_of_pages_of_which_little_is_wanted_only_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = layout("HND", 512)
    pages = cut(ours, layout("HND", 128), memory_of(ours.page_bytes))
    ids = [4, 9, 10]
    sums = expected(pages, ids)

    def of_whole_pages(*_: object) -> None:
        raise AssertionError("whole pages were read")

    monkeypatch.setattr(DenseSums, "of", of_whole_pages)
    assert pages.sums(ids, loaded=False).wait().tolist() == sums
    assert pages.sums([], loaded=False).wait().tolist() == []


def test_pages_without_words_are_summed_up_as_copies() -> None:
    """Parts that begin inside a word, and heads of which a transfer moves few."""
    ours, theirs = layout("HND", 512), layout("HND", 128)
    assert cut(ours, theirs, memory_of(ours.page_bytes))._dense is not None
    odd = cut(ours, theirs, memory_of(ours.page_bytes, 4))
    assert odd._dense is None
    assert odd.sums([0, 1, 2, 3], loaded=False).wait().tolist() == expected(odd, [0, 1, 2, 3])

    def of_one_head(kept: PageLayout) -> PageLayout:
        (part,) = kept.parts
        one = PagePart(1, 1, WIDTH, part.head_stride_bytes, part.token_stride_bytes, 0, 0)
        return PageLayout(kept.kind, kept.block_tokens, kept.page_tokens, kept.page_bytes, (one,))

    few = cut(of_one_head(layout("NHD", 512)), of_one_head(theirs), memory_of(ours.page_bytes))
    assert few._dense is None
    together = cut(of_one_head(ours), of_one_head(theirs), memory_of(ours.page_bytes))
    assert together._dense is not None
    for pages in (few, together):
        assert pages.sums([0, 1, 2, 3], loaded=False).wait().tolist() == expected(pages, [0, 1, 2, 3])
