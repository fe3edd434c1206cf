"""The hybrid rule against a plain search over all ends."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.depth import PrefixDepth, needed_blocks, usable_end

STEP = 4
STEPS = 24


@st.composite
def groups(draw: st.DrawFn) -> tuple[KvGroup, ...]:
    kinds = [GroupKind.FULL, *draw(st.lists(st.sampled_from(list(GroupKind)), max_size=3))]
    return tuple(
        KvGroup(
            index,
            kind,
            draw(st.sampled_from((4, 8, 12, 16))),
            draw(st.integers(1, 40)) if kind is GroupKind.WINDOW else 0,
        )
        for index, kind in enumerate(kinds)
    )


def has(group: KvGroup, held: set[int], block: int) -> bool:
    return (block + 1) * group.block_tokens // STEP - 1 in held


def suits(group: KvGroup, held: set[int], start_tokens: int, end_tokens: int) -> bool:
    """By KvGroup's own words for what must move."""
    return end_tokens % group.block_tokens == 0 and all(
        has(group, held, block) for block in group.moving_blocks(end_tokens, start_tokens)
    )


@given(groups=groups(), data=st.data(), start=st.integers(0, 20), limit=st.integers(0, 110))
def test_the_usable_end_is_the_largest_that_suits_every_group(
    groups: tuple[KvGroup, ...], data: st.DataObject, start: int, limit: int
) -> None:
    start_tokens = start * STEP
    everything = data.draw(st.booleans())
    rows = st.sets(st.integers(0, STEPS - 1))
    held = {g.index: set(range(STEPS)) - (set() if everything else data.draw(rows)) for g in groups}
    found = usable_end(groups, range(STEPS), STEP, held, start_tokens, limit)
    limit_tokens = min(limit, STEPS * STEP)
    full = [g for g in groups if g.kind is GroupKind.FULL]
    reached = [
        end
        for end in range(start_tokens + 1, limit_tokens + 1)
        if all(
            has(g, held[g.index], block)
            for g in full
            for block in range(start_tokens // g.block_tokens, -(-end // g.block_tokens))
        )
    ]
    suited = [end for end in reached if all(suits(g, held[g.index], start_tokens, end) for g in groups)]
    assert found.usable_tokens == max(suited, default=0)
    depth = found.attention_tokens
    for group in full:
        assert all(
            has(group, held[group.index], block)
            for block in range(start_tokens // group.block_tokens, depth // group.block_tokens)
        )
    assert depth >= max(start_tokens, found.usable_tokens)


def test_a_state_deeper_than_attention_is_of_no_use() -> None:
    full, state = KvGroup(0, GroupKind.FULL, 4, 0), KvGroup(1, GroupKind.STATE, 4, 0)
    held: dict[int, set[int]] = {0: {0, 1, 2}, 1: {1, 5}}
    assert usable_end((full, state), range(8), 4, held, 0, 31) == PrefixDepth(8, 12)
    assert usable_end((full, state), range(8), 4, held, 8, 31) == PrefixDepth(0, 12)
    assert usable_end((full, state), range(8), 4, held, 4, 31) == PrefixDepth(8, 12)


def test_what_a_load_must_fill() -> None:
    groups = (
        KvGroup(0, GroupKind.FULL, 16, 0),
        KvGroup(1, GroupKind.STATE, 16, 0),
        KvGroup(2, GroupKind.WINDOW, 8, 20),
    )
    assert needed_blocks(groups, 32, 96) == ((0, range(2, 6)), (1, range(5, 6)), (2, range(9, 12)))
