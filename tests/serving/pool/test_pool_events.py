"""A gateway's feed follows a pool over real sockets: through gaps, restarts, old replays and other kinds of pages."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.pool.pool_model import BLOCK, Prompt, geometry, held, prompts
from tests.serving.control.relay_port import RelayPort

from prfaas.core.pool.announced import Medium
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.core.prefix.index import NOTHING, GlobalIndex
from prfaas.serving.control.kv_events import EventFeed
from prfaas.serving.pool import events
from prfaas.serving.pool.events import PoolEventPublisher
from prfaas.serving.transport.protocol import event_log
from prfaas.serving.transport.protocol.requests import FollowedEvents, FollowOrder, PeerRequest
from prfaas.serving.transport.protocol.wire import HEADER_BYTES, parse_control, read_body, unpack_header

SEED = 3


@pytest.fixture
def publisher() -> Iterator[PoolEventPublisher]:
    made = PoolEventPublisher(SEED)
    made.start()
    yield made
    made.close()


class Followed:
    """An index that follows one pool."""

    def __init__(self, publisher: PoolEventPublisher) -> None:
        self.index = GlobalIndex(seed=SEED)
        self.drops: list[str] = []
        self.port = RelayPort(publisher.take)
        self.feed = EventFeed(["pool"], lambda _: self.port, apply=self.index.apply, drop=self.drop)

    def drop(self, name: str, reason: str) -> None:
        self.drops.append(reason)
        self.index.drop(name)

    def tokens(self, prompt: Prompt) -> int:
        chains = self.index.chains(prompt.token_ids, prompt.salt, prompt.adapter)
        return self.index.match(chains).get("pool", NOTHING).reusable_tokens


@asynccontextmanager
async def following(publisher: PoolEventPublisher) -> AsyncIterator[Followed]:
    followed = Followed(publisher)
    task = asyncio.create_task(followed.feed.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def store(publisher: PoolEventPublisher, prompt: Prompt) -> None:
    for page, identity in prompt.pages:
        publisher.stored(page, identity, "memory")


def test_a_pool_is_followed_as_an_engine_is(publisher: PoolEventPublisher) -> None:
    shape = geometry()
    first, second = Prompt(range(97), shape), Prompt(range(1000, 1097), shape)

    async def main() -> None:
        publisher.opened(shape, 1)
        store(publisher, first)
        async with following(publisher) as followed:
            await until(lambda: followed.tokens(first) == 96)
            store(publisher, second)
            await until(lambda: followed.tokens(second) == 96)
            publisher.removed(second.pages[-1][0], "memory")
            await until(lambda: followed.tokens(second) == 64)
            publisher.opened(shape, 2)
            await until(lambda: followed.tokens(first) == 0)
            store(publisher, first)
            await until(lambda: followed.tokens(first) == 96)
            assert followed.drops == ["cleared"]

    asyncio.run(main())


def test_another_kind_of_pages_and_a_new_daemon_are_noticed() -> None:
    hybrid, plain = geometry(), PoolGeometry("other", 1, geometry(hybrid=False).groups)
    first, other = Prompt(range(97), hybrid), Prompt(range(97), plain)

    async def main() -> None:
        publisher = PoolEventPublisher(SEED)
        publisher.start()
        publisher.opened(hybrid, 1)
        store(publisher, first)
        async with following(publisher) as followed:
            await until(lambda: followed.tokens(first) == 96)
            publisher.opened(plain, 1)
            await until(lambda: followed.tokens(first) == 0)
            for page, identity in other.pages[:3]:
                publisher.stored(page, identity, "memory")
            await until(lambda: followed.tokens(other) == 48)
            assert followed.drops == ["cleared"]
            publisher.close()
            followed.port.lose()
            publisher = PoolEventPublisher(SEED)
            publisher.start()
            followed.port.take = publisher.take
            publisher.opened(hybrid, 2)
            store(publisher, first)
            await until(lambda: followed.tokens(first) == 96)
            assert len(followed.drops) > 1
        publisher.close()

    asyncio.run(main())


def test_who_comes_late_gets_a_snapshot(
    publisher: PoolEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 3)
    shape = geometry()
    chance = random.Random(7)
    some = prompts(chance, shape, 30)

    async def main() -> None:
        publisher.opened(shape, 1)
        pages: set[bytes] = set()
        for prompt in some:
            before = publisher.state()["batches"]
            store(publisher, prompt)
            pages.update(page for page, _ in prompt.pages)
            await until(lambda before=before: publisher.state()["batches"] > before)
        async with following(publisher) as followed:
            for prompt in some:
                wanted = held(pages, prompt, shape).reusable_tokens
                await until(lambda prompt=prompt, wanted=wanted: followed.tokens(prompt) == wanted)
            assert publisher.state()["snapshots"] == 1 and followed.drops == []
            publisher.removed(some[0].pages[0][0], "memory")
            await until(lambda: followed.tokens(some[0]) == 0)

    asyncio.run(main())


def test_a_publisher_that_cannot_keep_up_says_that_nothing_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 10)
    shape = geometry(hybrid=False)
    prompt = Prompt(range(12 * BLOCK + 1), shape)
    publisher = PoolEventPublisher(SEED)
    publisher.opened(shape, 1)
    store(publisher, prompt)
    assert publisher.state()["overflows"] == 1
    publisher.start()

    async def main() -> None:
        async with following(publisher) as followed:
            await until(lambda: publisher.state()["batches"] > 0)
            store(publisher, Prompt(range(5000, 5000 + BLOCK + 1), shape))
            await until(lambda: followed.tokens(Prompt(range(5000, 5000 + BLOCK + 1), shape)) == BLOCK)
            assert followed.tokens(prompt) == 0

    asyncio.run(main())
    publisher.close()


class Follower:
    """An index that asks a publisher without a thread, now and then; some answers are lost on their way."""

    def __init__(self, publisher: PoolEventPublisher) -> None:
        self.publisher = publisher
        self.index = GlobalIndex(seed=SEED, needs_states=True, needs_windows=True)
        self.feed = EventFeed(
            ["pool"], lambda _: None, apply=self.index.apply, drop=lambda name, _: self.index.drop(name)
        )

    def ask(self, *, is_lost: bool = False) -> bool:
        """False: there is nothing more."""
        followed = self.feed._followed["pool"]
        told: list[bytes] = []
        order = FollowOrder(followed.session, followed.next)
        self.publisher._answer(PeerRequest("control", bytes(16), order, told.append))
        if told and not is_lost:
            header = unpack_header(told[0][:HEADER_BYTES])
            body = parse_control(header, told[0][HEADER_BYTES:])
            asyncio.run(self.feed._take("pool", followed, read_body(FollowedEvents, body)))
        return bool(told)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), kept=st.integers(1, 12))
def test_nothing_is_ever_claimed_that_was_not_held(seed: int, kept: int) -> None:
    """Stored, removed, moved between tiers, cleared; asked too late, answers lost, and the daemon starts anew."""
    chance = random.Random(seed)
    shape = geometry()
    some = prompts(chance, shape)
    every = [page for prompt in some for page in prompt.pages]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "KEPT_BATCHES", kept)
        patch.setattr(event_log, "_ANSWER_BYTES", chance.choice((1, 500, 1 << 20)))
        publisher = PoolEventPublisher(SEED)
        follower = Follower(publisher)
        tiers: dict[str, set[bytes]] = {"memory": set(), "ssd": set()}
        publisher.opened(shape, 1)
        for _ in range(chance.randrange(1, 60)):
            for _ in range(chance.randrange(1, 12)):
                medium: Medium = chance.choice(("memory", "ssd"))
                page, identity = chance.choice(every)
                if page in tiers[medium]:
                    tiers[medium].discard(page)
                    publisher.removed(page, medium)
                else:
                    tiers[medium].add(page)
                    publisher.stored(page, identity, medium)
            publisher._publish()
            happens = chance.random()
            if happens < 0.05:
                tiers = {"memory": set(), "ssd": set()}
                publisher.opened(shape, 2)
            elif happens < 0.1:
                # Another process.
                tiers = {"memory": set(), "ssd": set()}
                publisher.close()
                follower.publisher = publisher = PoolEventPublisher(SEED)
                publisher.opened(shape, 2)
            elif happens < 0.5:
                follower.ask(is_lost=chance.random() < 0.3)
                continue
            publisher._publish()
            if happens < 0.8:
                while follower.ask():
                    pass
                for prompt in some:
                    chains = follower.index.chains(prompt.token_ids, prompt.salt, prompt.adapter)
                    claimed = follower.index.match(chains).get("pool", NOTHING)
                    real = held(tiers["memory"] | tiers["ssd"], prompt, shape)
                    assert claimed.attention_tokens <= real.attention_tokens
                    assert claimed.reusable_tokens <= real.reusable_tokens
                    # A snapshot leaves out pages whose parents are gone.
                    assert claimed == real or publisher.snapshots
        publisher.close()
