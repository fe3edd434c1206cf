"""Which heads two ranks have in common, beside vLLM's own division of heads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout, PagePart, UnlikePagesError
from prfaas.core.kv.rank_shares import RankGrid, RankPair, paired_ranks, transfers_per_rank

WIDTH, TOKENS = 8, 16


def page(heads: int) -> PageLayout:
    head_bytes = WIDTH * TOKENS
    part = PagePart(heads, 1, WIDTH, 0, WIDTH, head_bytes if heads > 1 else 0, 0)
    return PageLayout(GroupKind.FULL, TOKENS, TOKENS, heads * head_bytes, (part,))


def heads_of(heads: int, rank: int, ranks: int) -> list[int]:
    """vLLM's: consecutive ones, or a copy of one."""
    if heads >= ranks:
        each = heads // ranks
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (ranks // heads)]


def shared(all_heads: int, rank: int, ranks: int, layout: PageLayout) -> list[int]:
    """Which of the model's heads a narrowed page has, by the place of its part."""
    (part,) = layout.parts
    first = part.offset_bytes // (WIDTH * TOKENS)
    return heads_of(all_heads, rank, ranks)[first : first + part.heads]


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_each_rank_gets_each_of_its_heads_once(producers: int, consumers: int, heads_log2: int) -> None:
    producer_ranks, consumer_ranks, heads = 1 << producers, 1 << consumers, 1 << heads_log2
    for consumer in range(consumer_ranks):
        senders = paired_ranks(consumer, consumer_ranks, producer_ranks)
        assert len(senders) == transfers_per_rank(producer_ranks, consumer_ranks)
        got: list[int] = []
        for number, producer in enumerate(senders):
            assert consumer in paired_ranks(producer, producer_ranks, consumer_ranks)
            pair = RankPair(producer, producer_ranks, consumer, consumer_ranks)
            assert pair.number == number
            sent = page(len(heads_of(heads, producer, producer_ranks)))
            kept = page(len(heads_of(heads, consumer, consumer_ranks)))
            both = pair.share(sent, kept, "p", "c")
            if both is None:
                continue
            leaves = shared(heads, producer, producer_ranks, both[0])
            assert leaves == shared(heads, consumer, consumer_ranks, both[1])
            got += leaves
        assert got == heads_of(heads, consumer, consumer_ranks)


@given(st.sampled_from([(1, 4), (4, 1), (2, 8), (8, 2), (3, 3)]))
def test_no_two_pairs_have_the_same_finer_rank(sizes: tuple[int, int]) -> None:
    ours, theirs = sizes
    pairs = [
        RankPair(rank, ours, other, theirs)
        for rank in range(ours)
        for other in paired_ranks(rank, ours, theirs)
    ]
    assert sorted(pair.finer_rank for pair in pairs) == list(range(max(sizes)))


@given(st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 8), (8, 2)]), st.integers(1, 4))
def test_each_stage_sends_what_it_would_alone(sizes: tuple[int, int], stages: int) -> None:
    ours, theirs = RankGrid(sizes[0], stages), RankGrid(sizes[1])
    for consumer in range(theirs.count):
        senders = theirs.paired(consumer, ours)
        assert len(senders) == transfers_per_rank(ours.tensor, theirs.tensor, stages)
        for number, sender in enumerate(senders):
            assert consumer in ours.paired(sender, theirs)
            stage, producer = divmod(sender, ours.tensor)
            pair = RankPair(producer, ours.tensor, consumer, theirs.tensor, stage, stages)
            assert (pair.number, pair.transfers) == (number, len(senders))
            alone = RankPair(producer, ours.tensor, consumer, theirs.tensor)
            assert pair.share(page(4), page(4), "p", "c") == alone.share(page(4), page(4), "p", "c")
    assert ours.paired(0, RankGrid(sizes[1], 2)) == () or stages == 1


def test_sizes_of_which_none_divides_the_other_share_nothing() -> None:
    assert list(paired_ranks(1, 3, 2)) == []
    with pytest.raises(ValueError, match="rank 1 of 3 and rank 0 of 2 have no heads in common"):
        RankPair(1, 3, 0, 2)


def test_equal_sizes_share_their_pages_as_they_are() -> None:
    sent, kept = page(2), page(4)
    assert RankPair(1, 2, 1, 2).share(sent, kept, "p", "c") == (sent, kept)


def test_heads_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        UnlikePagesError, match="'heads' of full_attention layers on 4 and 2 ranks: p has 2, c has 3"
    ):
        RankPair(3, 4, 1, 2).share(page(2), page(3), "p", "c")
    with pytest.raises(UnlikePagesError, match="p has 3, c has 2"):
        RankPair(0, 1, 1, 2).share(page(3), page(2), "p", "c")


def test_pages_whose_order_is_not_known_are_left_to_the_first_rank() -> None:
    latent = replace(page(1), parts=())
    assert RankPair(0, 2, 0, 1).share(latent, latent, "p", "c") == (latent, latent)
    assert RankPair(1, 2, 0, 1).share(latent, latent, "p", "c") is None
    assert RankPair(0, 1, 1, 2).share(latent, latent, "p", "c") == (latent, latent)
