"""An index that follows a pool's events never claims what the pool lacks, and claims all that it can know of."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.pool.pool_model import BLOCK, Prompt, geometry, held, prompts
from tests.core.prefix.digested import HearingIndex

from prfaas.core.pool.announced import AnnouncedPages, Medium, block_hash
from prfaas.core.pool.geometry import PageIdentity
from prfaas.core.prefix.events import Event, EventBatch, RemovedBlocks, StoredBlocks, decode_batch
from prfaas.core.prefix.index import NOTHING


def told(events: list[Event]) -> list[Event]:
    """The events after they have crossed the wire."""
    return list(decode_batch(msgspec.msgpack.encode(EventBatch(1.0, events))).events)


class Follower:
    """An index with the pool under two names."""

    def __init__(self, pages: AnnouncedPages) -> None:
        self.index = HearingIndex(needs_states=True, needs_windows=True)
        self.apply(pages.beginning())

    def apply(self, events: list[Event]) -> None:
        arrived = told(events)
        self.index.apply("pool", arrived)
        in_memory = [event for event in arrived if getattr(event, "medium", "memory") == "memory"]
        self.index.apply("memory", in_memory)

    def check(self, tiers: dict[str, set[bytes]], prompt: Prompt, *, exactly: bool) -> None:
        hits = self.index.match(self.index.chains(prompt.token_ids, prompt.salt, prompt.adapter))
        everywhere = held(tiers["memory"] | tiers["ssd"], prompt, geometry())
        memory = held(tiers["memory"], prompt, geometry())
        found, in_memory = hits.get("pool", NOTHING), hits.get("memory", NOTHING)
        assert found.attention_tokens <= everywhere.attention_tokens
        assert found.reusable_tokens <= everywhere.reusable_tokens
        assert in_memory.attention_tokens <= memory.attention_tokens
        assert in_memory.reusable_tokens <= memory.reusable_tokens
        if exactly:
            assert (found, in_memory) == (everywhere, memory)


@pytest.mark.slow("a property over many random systems")
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_an_index_claims_exactly_what_the_tiers_hold(seed: int) -> None:
    """Children before parents, promotions, evictions in any order, and subscribers that came later."""
    chance = random.Random(seed)
    shape = geometry()
    some = prompts(chance, shape)
    every = [page for prompt in some for page in prompt.pages]
    tiers: dict[str, set[bytes]] = {"memory": set(), "ssd": set()}
    pages = AnnouncedPages(shape)
    followers = [Follower(pages)]
    for _ in range(chance.randrange(1, 200)):
        medium: Medium = chance.choice(("memory", "memory", "ssd"))
        there = sorted(tiers[medium])
        if there and chance.random() < 0.4:
            gone = chance.choice(there)
            tiers[medium].discard(gone)
            pages.removed(gone, medium)
        else:
            page, identity = chance.choice(every)
            if page not in tiers[medium]:
                tiers[medium].add(page)
                pages.stored(page, identity, medium)
        if chance.random() < 0.3:
            for events in pages.take_events(chance.choice((1, 3, 100))):
                for follower in followers:
                    follower.apply(events)
            for follower in followers:
                for prompt in some:
                    follower.check(tiers, prompt, exactly=follower is followers[0])
            if chance.random() < 0.2:
                late = Follower(pages)
                for events in pages.snapshot(chance.choice((1, 5, 100))):
                    late.apply(events)
                followers.append(late)
    assert len(pages._pages) == len(tiers["memory"] | tiers["ssd"])


def test_what_was_stored_in_any_order_is_told_as_one_chain() -> None:
    shape = geometry(hybrid=False)
    prompt = Prompt(range(6 * BLOCK), shape, salt="s", adapter="a")
    pages = AnnouncedPages(shape)
    for page, identity in reversed(prompt.pages):
        pages.stored(page, identity, "memory")
    (events,) = pages.take_events(100)
    (event,) = events
    assert isinstance(event, StoredBlocks)
    assert event.hashes == [block_hash(key) for key in prompt.keys]
    assert event.token_ids == list(range(6 * BLOCK)) and event.parent is None
    assert (event.medium, event.kind, event.adapter) == ("memory", "full_attention", "a")
    assert event.extra_keys == [["a", "s"], *([["a"]] * 5)]


def test_a_page_goes_from_tier_to_tier_and_is_held_once() -> None:
    shape = geometry(hybrid=False)
    (page, identity), *_ = Prompt(range(BLOCK), shape).pages
    pages = AnnouncedPages(shape)
    pages.stored(page, identity, "memory")
    pages.stored(page, identity, "ssd")
    (events,) = pages.take_events(100)
    assert [event.medium for event in events if isinstance(event, StoredBlocks)] == ["memory"]
    pages.removed(page, "memory")
    (events,) = pages.take_events(100)
    assert [type(event) for event in events] == [StoredBlocks, RemovedBlocks]
    assert [event.medium for event in events if not isinstance(event, type(None))] == ["ssd", "memory"]  # type: ignore[union-attr]
    pages.removed(page, "ssd")
    (events,) = pages.take_events(100)
    assert events == [RemovedBlocks([block_hash(page[:16])], group=0, medium="ssd")]
    assert len(pages._pages) == 0


def test_waiting_pages_leave_nothing_behind() -> None:
    shape = geometry()
    prompt = Prompt(range(8 * BLOCK), shape)
    pages = AnnouncedPages(shape)
    for _ in range(3):
        for page, identity in prompt.pages[3:]:
            pages.stored(page, identity, "ssd")
        for page, _ in prompt.pages[3:]:
            pages.removed(page, "ssd")
    assert not list(pages.take_events(100))
    assert (len(pages._pages), pages._waiting) == (0, {})


def test_pages_that_end_where_no_lead_page_ends_are_passed_over() -> None:
    pages = AnnouncedPages(geometry())
    pages.stored(b"k" * 16 + b"\x00", None, "memory")
    pages.stored(b"k" * 16 + b"\x07", PageIdentity(b"", b"", "", ""), "memory")
    assert len(pages._pages) == 0
