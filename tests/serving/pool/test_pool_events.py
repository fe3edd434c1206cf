"""A gateway's feed follows a pool over real sockets: through gaps, restarts, old replays and other kinds of pages."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.pool.pool_model import BLOCK, Prompt, geometry, held, prompts

from prfaas.core.deployment import EventsEndpoint
from prfaas.core.pool.announced import Medium
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.core.prefix import NOTHING, GlobalIndex
from prfaas.core.prefix.events import Apply, Cleared, Drop, EventBatch, Step, Subscription, decode_batch
from prfaas.serving.control.kv_events import EventFeed
from prfaas.serving.pool import events
from prfaas.serving.pool.events import PoolEventLog, PoolEventPublisher


@pytest.fixture
def endpoint(tmp_path: Path) -> EventsEndpoint:
    publish, replay = (f"ipc://{tmp_path}/{end}" for end in ("live", "replay"))
    return EventsEndpoint(publish, replay, publish, replay)


@pytest.fixture
def publisher(endpoint: EventsEndpoint) -> Iterator[PoolEventPublisher]:
    made = PoolEventPublisher(endpoint)
    made.start()
    yield made
    made.close()


class Followed:
    """An index that follows one pool."""

    def __init__(self, endpoint: EventsEndpoint) -> None:
        self.index = GlobalIndex()
        self.drops: list[str] = []
        self.feed = EventFeed({"pool": endpoint}, apply=self.apply, drop=self.drop)

    def apply(self, name: str, batch: EventBatch) -> None:
        self.index.apply(name, batch.events)

    def drop(self, name: str, reason: str) -> None:
        self.drops.append(reason)
        self.index.drop(name)

    def tokens(self, prompt: Prompt) -> int:
        chains = self.index.chains(prompt.token_ids, prompt.salt, prompt.adapter)
        return self.index.match(chains).get("pool", NOTHING).reusable_tokens


@asynccontextmanager
async def following(endpoint: EventsEndpoint) -> AsyncIterator[Followed]:
    followed = Followed(endpoint)
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


def test_a_pool_is_followed_as_an_engine_is(endpoint: EventsEndpoint, publisher: PoolEventPublisher) -> None:
    shape = geometry()
    first, second = Prompt(range(97), shape), Prompt(range(1000, 1097), shape)

    async def main() -> None:
        publisher.opened(shape, 1)
        store(publisher, first)
        async with following(endpoint) as followed:
            await until(lambda: followed.tokens(first) == 96)
            store(publisher, second)
            await until(lambda: followed.tokens(second) == 96)
            publisher.removed(second.pages[-1][0], "memory")
            await until(lambda: followed.tokens(second) == 64)
            publisher.cleared()
            await until(lambda: followed.tokens(first) == 0)
            store(publisher, first)
            await until(lambda: followed.tokens(first) == 96)
            assert followed.drops == []

    asyncio.run(main())


def test_another_kind_of_pages_and_a_new_daemon_are_noticed(endpoint: EventsEndpoint) -> None:
    hybrid, plain = geometry(), PoolGeometry("other", 1, geometry(hybrid=False).groups)
    first, other = Prompt(range(97), hybrid), Prompt(range(97), plain)

    async def main() -> None:
        publisher = PoolEventPublisher(endpoint)
        publisher.start()
        publisher.opened(hybrid, 1)
        store(publisher, first)
        async with following(endpoint) as followed:
            await until(lambda: followed.tokens(first) == 96)
            publisher.opened(plain, 1)
            await until(lambda: followed.tokens(first) == 0)
            for page, identity in other.pages[:3]:
                publisher.stored(page, identity, "memory")
            await until(lambda: followed.tokens(other) == 48)
            assert followed.drops == ["restart"]
            publisher.close()
            publisher = PoolEventPublisher(endpoint)
            publisher.start()
            publisher.opened(hybrid, 2)
            store(publisher, first)
            await until(lambda: followed.tokens(first) == 96)
            assert len(followed.drops) > 1
        publisher.close()

    asyncio.run(main())


def test_who_comes_late_gets_a_snapshot(
    endpoint: EventsEndpoint, publisher: PoolEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEPT_BATCHES", 3)
    shape = geometry()
    chance = random.Random(7)
    some = prompts(chance, shape, 30)

    async def main() -> None:
        publisher.opened(shape, 1)
        pages: set[bytes] = set()
        for prompt in some:
            before = publisher.batches
            store(publisher, prompt)
            pages.update(page for page, _ in prompt.pages)
            await until(lambda before=before: publisher.batches > before)
        async with following(endpoint) as followed:
            for prompt in some:
                wanted = held(pages, prompt, shape).reusable_tokens
                await until(lambda prompt=prompt, wanted=wanted: followed.tokens(prompt) == wanted)
            # A second time where the first question came before the connection.
            assert publisher.state()["snapshots"] in (1, 2)
            assert followed.feed.state_of("pool", 0.0)["events"]["resyncs"] == 1
            publisher.removed(some[0].pages[0][0], "memory")
            await until(lambda: followed.tokens(some[0]) == 0)

    asyncio.run(main())


def test_a_publisher_that_cannot_keep_up_says_that_nothing_is_held(
    endpoint: EventsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 10)
    shape = geometry(hybrid=False)
    prompt = Prompt(range(12 * BLOCK + 1), shape)
    publisher = PoolEventPublisher(endpoint)
    publisher.opened(shape, 1)
    store(publisher, prompt)
    assert publisher.state()["overflows"] == 1
    publisher.start()

    async def main() -> None:
        async with following(endpoint) as followed:
            await until(lambda: publisher.batches > 0)
            store(publisher, Prompt(range(5000, 5000 + BLOCK + 1), shape))
            await until(lambda: followed.tokens(Prompt(range(5000, 5000 + BLOCK + 1), shape)) == BLOCK)
            assert followed.tokens(prompt) == 0

    asyncio.run(main())
    publisher.close()


def test_a_question_in_another_form_is_passed_over(
    endpoint: EventsEndpoint, publisher: PoolEventPublisher
) -> None:
    import zmq

    shape = geometry(hybrid=False)
    prompt = Prompt(range(97), shape)
    publisher.opened(shape, 1)
    store(publisher, prompt)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(endpoint.replay)
        asking.send_multipart([b"", b"all of it"])
        asking.send_multipart([b"garbage"])

        async def main() -> None:
            async with following(endpoint) as followed:
                await until(lambda: followed.tokens(prompt) == 96)

        asyncio.run(main())


@pytest.mark.parametrize("kept", [1, 2, 5, 100])
def test_a_replay_ends_with_the_last_number_and_has_none_too_low(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEPT_BATCHES", kept)
    shape = geometry(hybrid=False)
    log = PoolEventLog()
    assert list(log.replay(0)) == []
    log.open(shape, 1000.0)
    published = 1
    for number in range(30):
        prompt = Prompt(range(1000 * number, 1000 * number + 5 * BLOCK), shape)
        assert log.pages is not None
        for page, identity in prompt.pages:
            log.pages.stored(page, identity, "ssd")
        for batch in log.pages.take_events(2):
            log.add(batch, 1000.0)
            published += 1
    for first in range(published + 2):
        told = list(log.replay(first))
        numbers = [sequence for sequence, _ in told]
        if first >= published:
            assert not told
            continue
        assert numbers == list(range(numbers[0], published)) and numbers[0] >= first
        if first < published - kept:
            beginning = decode_batch(told[0][1]).events[0]
            assert isinstance(beginning, Cleared)
        else:
            assert numbers[0] == first


class LossyLine:
    """A subscription and an index behind a line that loses live and replayed batches."""

    def __init__(self, log: PoolEventLog, chance: random.Random) -> None:
        self.log, self.chance = log, chance
        self.subscription, self.index = Subscription(), GlobalIndex(needs_states=True, needs_windows=True)
        self.loss = 0.2
        self.asked: int | None = None
        self.applied_s: float | None = None
        self.now_s = 0.0
        self._take(self.subscription.start(0.0))

    def live(self, batch: tuple[int, bytes]) -> None:
        if self.chance.random() >= self.loss:
            self._take(self.subscription.live(batch[0], decode_batch(batch[1]), self.now_s))

    def answer(self) -> None:
        asked, self.asked = self.asked, None
        if asked is None:
            return
        for sequence, payload in self.log.replay(asked):
            if self.chance.random() >= self.loss / 2:
                self._take(self.subscription.replayed(sequence, decode_batch(payload), self.now_s))
        self._take(self.subscription.replay_ended(self.now_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._take(self.subscription.tick(self.now_s))

    def restarted(self) -> None:
        self._take(self.subscription.restarted(self.now_s, "disconnected"))

    def _take(self, steps: Iterable[Step]) -> None:
        steps, unanswered = list(steps), False
        for step in steps:
            if isinstance(step, Apply):
                self.index.apply("pool", step.batch.events)
                self.applied_s = step.batch.at_s
            elif isinstance(step, Drop):
                self.index.drop("pool")
                self.applied_s = None
                unanswered = unanswered or step.reason == "unanswered"
            else:
                self.asked = step.sequence
        if unanswered:
            # A pool can always tell all that it holds.
            self.restarted()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), kept=st.integers(1, 12))
def test_nothing_is_ever_claimed_that_was_not_held(seed: int, kept: int) -> None:
    """Stored, removed, moved between tiers, cleared; lost, replayed too late, and the daemon starts anew."""
    chance = random.Random(seed)
    shape = geometry()
    some = prompts(chance, shape)
    every = [page for prompt in some for page in prompt.pages]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "KEPT_BATCHES", kept)
        log, clock_s = PoolEventLog(), 1000.0
        line = LossyLine(log, chance)
        tiers: dict[str, set[bytes]] = {"memory": set(), "ssd": set()}
        truth: dict[float, set[bytes]] = {}

        def publish(batch: tuple[int, bytes], *, lost: bool = False) -> None:
            truth[decode_batch(batch[1]).at_s] = tiers["memory"] | tiers["ssd"]
            if not lost:
                line.live(batch)

        def check(*, exactly: bool = False) -> None:
            there = truth.get(line.applied_s or 0.0, set())
            for prompt in some:
                chains = line.index.chains(prompt.token_ids, prompt.salt, prompt.adapter)
                claimed = line.index.match(chains).get("pool", NOTHING)
                real = held(there, prompt, shape)
                assert claimed.attention_tokens <= real.attention_tokens
                assert claimed.reusable_tokens <= real.reusable_tokens
                if exactly:
                    assert claimed == real

        publish(log.open(shape, clock_s))
        for _ in range(chance.randrange(1, 120)):
            clock_s += chance.choice((0.0, 0.01, 1.0))
            assert log.pages is not None
            for _ in range(chance.randrange(1, 12)):
                medium: Medium = chance.choice(("memory", "ssd"))
                page, identity = chance.choice(every)
                if page in tiers[medium]:
                    tiers[medium].discard(page)
                    log.pages.removed(page, medium)
                else:
                    tiers[medium].add(page)
                    log.pages.stored(page, identity, medium)
            batches = list(log.pages.take_events(1000))
            for batch in batches:
                publish(log.add(batch, clock_s))
            happens = chance.random()
            if happens < 0.04:
                tiers = {"memory": set(), "ssd": set()}
                publish(log.open(shape, clock_s))
            elif happens < 0.08:
                # Another process; the connection was lost with it.
                tiers = {"memory": set(), "ssd": set()}
                line.log = log = PoolEventLog()
                clock_s += 1.0
                publish(log.open(shape, clock_s), lost=True)
                line.restarted()
            elif happens < 0.5:
                line.answer()
            elif happens < 0.6:
                line.wait(2.5)
            check()
        # Chains without holes, and a line that has become good: all is known.
        tiers = {"memory": set(), "ssd": set()}
        publish(log.open(shape, clock_s))
        assert log.pages is not None
        for prompt in some:
            for page, identity in prompt.pages:
                if page not in tiers["ssd"]:
                    tiers["ssd"].add(page)
                    log.pages.stored(page, identity, "ssd")
            for batch in log.pages.take_events(1000):
                publish(log.add(batch, clock_s))
        line.loss = 0.0
        for _ in range(3):
            line.wait(2.5)
            publish(log.add([], clock_s))
            while line.asked is not None:
                line.answer()
        check(exactly=True)
