"""Events over real sockets: from the beginning, through gaps and restarts, into the index, without a thread left."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from prfaas.core.deployment import Deployment, EventsEndpoint
from prfaas.core.prefix import GlobalIndex
from prfaas.core.prefix.events import Cleared, EventBatch
from prfaas.serving.control.kv_events import EventFeed

from .publisher import Publisher, stored

NAMES = ("home-d0", "home-d1")


class Fed:
    """A feed into an index, and everything that was dropped."""

    def __init__(self, deployment: Deployment) -> None:
        self.index = GlobalIndex(seed=1)
        self.drops: list[tuple[str, str]] = []
        self.batches: list[str] = []
        self.endpoints = {name: endpoint_of(deployment, name) for name in NAMES}
        self.feed = EventFeed(self.endpoints, apply=self.apply, drop=self.drop)

    def apply(self, name: str, batch: EventBatch) -> None:
        self.batches.append(name)
        if any(isinstance(event, Cleared) for event in batch.events):
            raise ValueError("stands for any event that the index chokes on")
        self.index.apply(name, batch.events)

    def drop(self, name: str, reason: str) -> None:
        self.drops.append((name, reason))
        self.index.drop(name)

    def held(self, name: str, tokens: int = 64) -> int:
        held = self.index.match(self.index.chains(range(tokens + 1))).get(name)
        return held.attention_tokens if held is not None else 0


def endpoint_of(deployment: Deployment, name: str) -> EventsEndpoint:
    endpoint = deployment.events_endpoint(deployment.instance(name))
    assert endpoint is not None
    return endpoint


@asynccontextmanager
async def running(fed: Fed) -> AsyncIterator[None]:
    task = asyncio.create_task(fed.feed.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not any(thread.name == "prfaas-kv-events" for thread in threading.enumerate())


async def until(condition: Callable[[], bool], *publishers: Publisher) -> None:
    async with asyncio.timeout(120):
        while not condition():
            for publisher in publishers:
                publisher.serve()
            await asyncio.sleep(0.01)


def test_a_late_start_learns_what_happened_before(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])
    publisher.step(stored(range(32), [1, 2]))
    publisher.step(stored(range(32, 64), [3, 4], parent=2))

    async def main() -> None:
        async with running(fed):
            await until(lambda: fed.held("home-d0") == 64, publisher)
            publisher.step({"type": "BlockRemoved", "block_hashes": [4], "group_idx": 0})
            await until(lambda: fed.held("home-d0") == 48, publisher)
            assert fed.feed.state_of("home-d0", 0.0)["events"]["sequence"] == 2
            assert fed.feed.state_of("home-d1", 0.0)["events"]["sequence"] is None

    asyncio.run(main())
    publisher.close()
    assert (fed.drops, fed.held("home-d1")) == ([], 0)


def test_who_is_heard_late_is_asked_again(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stored something before it was heard, and nothing since."""
    monkeypatch.setattr("prfaas.core.prefix.events.REPLAY_TIMEOUT_S", 0.1)
    fed = Fed(deployment)

    async def main() -> None:
        async with running(fed):
            await asyncio.sleep(0.5)
            publisher = Publisher(fed.endpoints["home-d0"])
            publisher.step(stored(range(64), [1, 2, 3, 4]), lost=True)
            await until(lambda: fed.held("home-d0") == 64, publisher)
            publisher.close()

    asyncio.run(main())


def test_a_lost_batch_is_replayed(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])

    async def main() -> None:
        async with running(fed):
            publisher.step(stored(range(16), [1]))
            await until(lambda: fed.held("home-d0") == 16, publisher)
            publisher.step(stored(range(16, 32), [2], parent=1), lost=True)
            publisher.step(stored(range(32, 48), [3], parent=2))
            await until(lambda: fed.held("home-d0") == 48, publisher)
            assert fed.feed.state_of("home-d0", 0.0)["events"]["gaps"] == 1

    asyncio.run(main())
    publisher.close()
    assert fed.drops == []


def test_a_gap_that_nobody_can_fill_drops(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])

    async def main() -> None:
        async with running(fed):
            publisher.step(stored(range(16), [1]))
            await until(lambda: fed.held("home-d0") == 16, publisher)
            publisher.step(lost=True)
            publisher.step(stored(range(16), [9]))
            del publisher.kept[:2]
            await until(lambda: fed.drops == [("home-d0", "gap")] and fed.held("home-d0") == 16, publisher)

    asyncio.run(main())
    publisher.close()


@pytest.mark.parametrize("told", [False, True])
def test_a_restarted_engine_holds_only_what_it_says(deployment: Deployment, told: bool) -> None:
    fed = Fed(deployment)
    first = Publisher(fed.endpoints["home-d0"])
    other = Publisher(fed.endpoints["home-d1"])

    async def main() -> None:
        async with running(fed):
            first.step(stored(range(32), [1, 2]))
            other.step(stored(range(32), [1, 2]))
            await until(lambda: fed.held("home-d0") == fed.held("home-d1") == 32, first, other)
            first.close()
            second = Publisher(fed.endpoints["home-d0"], process=1)
            second.step(stored(range(16), [7]))
            if told:
                fed.feed.reset("home-d0", "died")
            # Whatever it published before it was heard is found out with the next step.
            async with asyncio.timeout(120):
                while fed.held("home-d0") != 16:
                    second.step()
                    second.serve()
                    await asyncio.sleep(0.01)
            second.close()

    asyncio.run(main())
    other.close()
    assert {name for name, _ in fed.drops} == {"home-d0"}
    assert fed.held("home-d1") == 32


def test_what_cannot_be_read_is_a_gap(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])

    async def main() -> None:
        async with running(fed):
            publisher.step(stored(range(16), [1]))
            await until(lambda: fed.held("home-d0") == 16, publisher)
            publisher.kept.append((1, b"\xc1"))
            publisher._next = 2
            publisher.step(stored(range(16), [5]))
            await until(lambda: ("home-d0", "gap") in fed.drops, publisher)
            await until(lambda: fed.held("home-d0") == 16, publisher)
            assert fed.feed.state_of("home-d0", 0.0)["events"]["malformed"] >= 1

    asyncio.run(main())
    publisher.close()


def test_what_cannot_be_applied_harms_nobody_else(deployment: Deployment) -> None:
    fed = Fed(deployment)
    odd, good = (Publisher(fed.endpoints[name]) for name in NAMES)

    async def main() -> None:
        async with running(fed):
            odd.step(stored(range(16), [1]))
            await until(lambda: fed.held("home-d0") == 16, odd, good)
            odd.step({"type": "AllBlocksCleared"})
            await until(lambda: fed.drops == [("home-d0", "unreadable")], odd, good)
            good.step(stored(range(32), [1, 2]))
            odd.step(stored(range(16), [9]))
            await until(lambda: fed.held("home-d1") == 32 and fed.held("home-d0") == 16, odd, good)

    asyncio.run(main())
    odd.close()
    good.close()
    assert fed.feed.refused_batches == 1


def test_many_batches_leave_the_loop_time_between(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])
    for number in range(500):
        parent = None if number == 0 else number
        publisher.step(stored(range(16 * number, 16 * number + 16), [number + 1], parent=parent))

    async def main() -> None:
        async with running(fed):
            await until(lambda: fed.held("home-d0", 8000) == 8000, publisher)
            assert fed.feed.waiting_batches == 0

    asyncio.run(main())
    publisher.close()
    assert fed.batches == ["home-d0"] * 500


def test_nobody_to_hear_costs_no_core(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poller without sockets returns at once: it must not be asked again and again."""
    rounds = 0
    follow = EventFeed._follow

    def counted(feed: EventFeed, *args: object) -> None:
        nonlocal rounds
        rounds += 1
        follow(feed, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EventFeed, "_follow", counted)
    fed = Fed(deployment)
    for name in NAMES:
        fed.feed.leave(name)

    async def main() -> None:
        async with running(fed):
            await asyncio.sleep(0.5)

    asyncio.run(main())
    assert 1 <= rounds <= 10
