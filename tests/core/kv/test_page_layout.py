"""What two engines tell each other of their pages, and the form that follows from it."""

import json
from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import (
    PageLayout,
    PagePart,
    UnlikePagesError,
    WirePage,
    mark_of,
    read_layouts,
    told_layouts,
    wire_forms,
)


def attention(
    block_tokens: int, order: str = "HND", heads: int = 2, width: int = 128, split: int = 1
) -> PageLayout:
    tokens = block_tokens // split
    strides = (width, tokens * width) if order == "HND" else (heads * width, width)
    part = PagePart(heads, 1, width, 0, *strides, 0)
    return PageLayout(GroupKind.FULL, block_tokens, tokens, heads * block_tokens * width, (part,))


def state(block_tokens: int, page_bytes: int = 1000) -> PageLayout:
    return PageLayout(GroupKind.STATE, block_tokens, block_tokens, page_bytes)


LAYOUTS = st.builds(
    lambda count, order, split: attention(16 * count * split, order, split=split),
    st.integers(1, 12),
    st.sampled_from(["HND", "NHD"]),
    st.integers(1, 3),
)
SIDES = st.lists(LAYOUTS, min_size=4, max_size=4)


@given(SIDES, SIDES)
def test_both_sides_come_to_the_same_form(ours: list[PageLayout], theirs: list[PageLayout]) -> None:
    forms = wire_forms(ours, theirs, "a", "b", sends=True)
    assert forms == wire_forms(theirs, ours, "b", "a", sends=False)
    for mine, other, form in zip(ours, theirs, forms, strict=True):
        assert (form is None) == (mine == other)
        if form is not None:
            assert form.tokens == gcd(mine.page_tokens, other.page_tokens)
            (part,) = form.parts
            # A side whose pages are as small has them as they travel; if both have, the one that sends.
            finer = other if other.page_tokens == form.tokens < mine.page_tokens else mine
            is_outside = finer.parts[0].token_stride_bytes > finer.parts[0].head_stride_bytes
            assert part == attention(form.tokens, "NHD" if is_outside else "HND").parts[0]
    assert (mark_of(forms) == "") == (ours == theirs)


@given(SIDES, SIDES, SIDES)
def test_another_form_has_another_mark(
    ours: list[PageLayout], theirs: list[PageLayout], others: list[PageLayout]
) -> None:
    first, second = (wire_forms(ours, sides, "a", "b", sends=True) for sides in (theirs, others))
    assert (mark_of(first) == mark_of(second)) == (first == second)


@given(st.lists(st.one_of(LAYOUTS, st.builds(state, st.integers(1, 500))), max_size=70))
def test_what_is_told_is_understood(layouts: list[PageLayout]) -> None:
    told = json.loads(json.dumps(told_layouts(layouts)))
    assert len(json.dumps(told)) <= 4096
    if isinstance(told, str):
        with pytest.raises(ValueError, match="a list of at most 65536 entries is expected"):
            read_layouts(told)
    else:
        assert read_layouts(told) == tuple(layouts)


def test_a_model_of_many_equal_layers_is_told_in_few_words() -> None:
    latent = PageLayout(GroupKind.FULL, 16, 16, 16 * 1152, (PagePart(1, 1, 1152, 0, 1152, 0, 0),))
    told = told_layouts([latent] * 61)
    assert told == [[61, "full_attention", 16, 16, 18432, [[1, 1, 1152, 0, 1152, 0, 0]], ""]]


def test_a_state_is_one_page_whatever_a_block_has() -> None:
    assert wire_forms([state(24)], [state(16)], "a", "b", sends=True) == (WirePage(8),)


UNKNOWN = PageLayout(GroupKind.FULL, 16, 16, 4096)


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        (
            [attention(16)],
            [attention(16, heads=4)],
            "KV layout differs in 'heads' of full_attention layers: home has 2, east has 4",
        ),
        (
            [attention(16)],
            [attention(32, width=64)],
            "KV layout differs in 'width_bytes' of full_attention layers: home has 128, east has 64",
        ),
        (
            [attention(16)],
            [replace(attention(32), parts=attention(32).parts * 2)],
            "KV layout differs in 'parts' of full_attention layers: home has 1, east has 2",
        ),
        (
            [state(16)],
            [state(16, 999)],
            "KV layout differs in 'page_bytes' of linear_state layers: home has 1000, east has 999, and in which order "
            "home keeps heads and tokens in a page is not known",
        ),
        (
            [state(16)],
            [attention(16)],
            "KV layout differs in 'kind' of a layer: home has 'linear_state', east has 'full_attention'",
        ),
        (
            [attention(16)],
            [attention(16)] * 2,
            "KV layout differs in 'regions' of a transfer: home has 1, east has 2",
        ),
        (
            [attention(32)],
            [UNKNOWN],
            "KV layout differs in 'block_tokens' of full_attention layers: home has 32, east has 16, and in which "
            "order east keeps heads and tokens in a page is not known",
        ),
        (
            [UNKNOWN],
            [replace(UNKNOWN, page_bytes=2048)],
            "KV layout differs in 'page_bytes' of full_attention layers: home has 4096, east has 2048, and in which "
            "order home keeps heads and tokens in a page is not known",
        ),
    ],
)
def test_what_cannot_be_mapped_is_told_with_both_values(
    ours: list[PageLayout], theirs: list[PageLayout], sentence: str
) -> None:
    with pytest.raises(UnlikePagesError) as caught:
        wire_forms(ours, theirs, "home", "east", sends=True)
    assert str(caught.value) == sentence


ENTRY = [1, "full_attention", 16, 16, 4096, [[2, 1, 128, 0, 128, 2048, 0]], ""]


@pytest.mark.parametrize(
    "told",
    [
        None,
        "0" * 16,
        {},
        [7],
        [[]],
        [ENTRY[:6]],
        [[0, *ENTRY[1:]]],
        [[1 << 17, *ENTRY[1:]]],
        [[1 << 16, *ENTRY[1:]], ENTRY],
        [[True, *ENTRY[1:]]],
        [[1.0, *ENTRY[1:]]],
        [[1, "elephant", *ENTRY[2:]]],
        [[1, ["full_attention"], *ENTRY[2:]]],
        [[*ENTRY[:2], 0, 16, *ENTRY[4:]]],
        [[*ENTRY[:2], 16, 0, *ENTRY[4:]]],
        [[*ENTRY[:2], 16, 3, *ENTRY[4:]]],
        [[*ENTRY[:2], 1 << 60, 1, *ENTRY[4:]]],
        [[*ENTRY[:4], -1, *ENTRY[5:]]],
        [[*ENTRY[:6], "int3"]],
        [[*ENTRY[:5], [], "bfloat16"]],
        [[*ENTRY[:5], "parts", ""]],
        [[*ENTRY[:5], [[2, 1, 128, 0, 128, 2048]], ""]],
        [[*ENTRY[:5], [[0, 1, 128, 0, 128, 0, 0]], ""]],
        [[*ENTRY[:5], [[2, 1, 128, -1, 128, 0, 0]], ""]],
        [[*ENTRY[:5], [[2, 1, 128, 0, 128, 1 << 50, 0]], ""]],
        [[*ENTRY[:5], [[2, 1, 128, 0, 128, 0, 0]] * 65, ""]],
    ],
)
def test_what_no_engine_would_tell_is_not_read(told: object) -> None:
    with pytest.raises(ValueError, match=r"expected|kind of layer|whole number|more than|elements"):
        read_layouts(told)


def test_the_good_entry_of_the_bad_ones_above_is_read() -> None:
    (layout,) = read_layouts([ENTRY])
    assert layout == attention(16)


def test_what_a_later_release_adds_is_not_read() -> None:
    parts = [[*part, "more"] for part in ENTRY[5]]  # type: ignore[attr-defined]
    assert read_layouts([[*ENTRY[:5], parts, ENTRY[6], "more"]]) == read_layouts([ENTRY])
