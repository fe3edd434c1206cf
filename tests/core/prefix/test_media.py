"""Blocks with media in them: what engines' events say of them is what prompts are looked up by."""

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.core.prefix.events import StoredBlocks, keyed_blocks
from prfaas.core.prefix.hashing import Hashers, MediaItem
from prfaas.serving.transport.protocol.ticket import prompt_digest

from .digested import HearingIndex

BLOCK = 4


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaItem]]:
    """Ids, and items that don't overlap."""
    ids: list[int] = []
    media = []
    for _ in range(draw(st.integers(1, 4))):
        ids += draw(st.lists(st.integers(0, 3), max_size=6))
        tokens = draw(st.integers(1, 9))
        media.append(MediaItem(draw(st.sampled_from(["a", "b", "1:a", "a0;1:a"])), len(ids), tokens))
        ids += [7] * tokens
    return ids + draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)), media


def keys_of(media: list[MediaItem], blocks: int) -> list[list[Any] | None]:
    """Per block as vLLM 0.32 tells it in events: identifiers, and their beginnings counted from the block's."""
    return [
        [
            [item.digest, item.offset - start]
            for item in media
            if item.offset < start + BLOCK and item.offset + item.tokens > start
        ]
        or None
        for start in range(0, blocks * BLOCK, BLOCK)
    ]


@settings(deadline=None)
@given(prompts(), st.sampled_from(["", "salt"]), st.sampled_from(["", "poet"]))
def test_an_engine_that_told_of_a_prompt_holds_it(
    prompt: tuple[list[int], list[MediaItem]], salt: str, adapter: str
) -> None:
    ids, media = prompt
    blocks = (len(ids) - 1) // BLOCK
    assume(blocks)
    keys = keys_of(media, blocks)
    first = ([adapter] if adapter else []) + (keys[0] or []) + ([salt] if salt else [])
    keys = [first or None, *([[adapter, *(key or [])] for key in keys[1:]] if adapter else keys[1:])]
    index = HearingIndex(seed=5)
    event = StoredBlocks(
        hashes=list(range(1, blocks + 1)),
        block_tokens=BLOCK,
        token_ids=ids[: blocks * BLOCK],
        adapter=adapter or None,
        extra_keys=keys,
    )
    index.apply("engine", [event])
    held = index.match(index.chains(ids, salt, adapter, media))
    assert held["engine"].reusable_tokens == blocks * BLOCK
    for other in (index.chains(ids, salt + "x", adapter, media), index.chains(ids, salt, adapter)):
        shared = index.match(other).get("engine")
        assert shared is None or shared.reusable_tokens <= media[0].offset


@settings(deadline=None)
@given(prompts(), st.data())
def test_prompts_that_differ_in_one_item_share_nothing_behind_it(
    prompt: tuple[list[int], list[MediaItem]], data: st.DataObject
) -> None:
    ids, media = prompt
    place = data.draw(st.integers(0, len(media) - 1))
    item = media[place]
    changed = data.draw(
        st.sampled_from(
            [
                [item._replace(digest=item.digest + "!")],
                *([[item._replace(tokens=item.tokens - 1)]] if item.tokens > 1 else []),
                *(
                    [[item._replace(offset=item.offset + 1, tokens=item.tokens - 1)]]
                    if item.tokens > 1
                    else []
                ),
                [],
            ]
        )
    )
    other = [*media[:place], *changed, *media[place + 1 :]]
    assert prompt_digest(ids, media=media) != prompt_digest(ids, media=other)
    if changed and changed[0].digest == item.digest:
        # Where an item ends within a block is in no block's key; it is the ids that say so then.
        return
    hashers = Hashers(3)
    for block in (1, 3, 8):
        one, two = (hashers.chains(ids, "", "", [block], media=each) for each in (media, other))
        first = item.offset // block
        assert one.by_block_tokens[block][:first] == two.by_block_tokens[block][:first]
        assert not {*one.by_block_tokens[block][first:]} & {*two.by_block_tokens[block][first:]}


def test_embeddings_end_what_can_be_told() -> None:
    event = StoredBlocks(
        hashes=[1, 2, 3],
        block_tokens=BLOCK,
        token_ids=[7] * 12,
        extra_keys=[[["a", 0], "salt"], None, [b"digest"]],
    )
    assert keyed_blocks(event) == ("salt", 2, [b"1:a0;", b""])
