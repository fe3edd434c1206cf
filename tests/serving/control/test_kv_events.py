"""Events from an engine's sockets through its relay into the index: from the beginning, through gaps and restarts."""

import asyncio
import base64
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.core.deployment import Deployment
from prfaas.core.prefix.digests import HeldEvent, encode_events
from prfaas.core.prefix.events import Cleared
from prfaas.core.prefix.index import GlobalIndex
from prfaas.serving.control.kv_events import EventFeed
from prfaas.serving.engines.event_relay import EventRelay
from prfaas.serving.transport.protocol import event_log
from prfaas.serving.transport.protocol.requests import FollowOrder

from .publisher import Publisher, stored
from .relay_port import RelayPort

NAMES = ("home-d0", "home-d1")
SEED = 1


class Fed:
    """A feed into an index, and everything that was dropped."""

    def __init__(self, deployment: Deployment) -> None:
        self.index = GlobalIndex(seed=SEED)
        self.drops: list[tuple[str, str]] = []
        self.batches: list[str] = []
        self.endpoints = {name: deployment.events_endpoint(deployment.instance(name)) for name in NAMES}
        self.relays = {name: EventRelay(name, endpoint, SEED) for name, endpoint in self.endpoints.items()}
        self.ports = {name: RelayPort(relay.take) for name, relay in self.relays.items()}
        self.feed = EventFeed(NAMES, self.ports.get, apply=self.apply, drop=self.drop)

    def apply(self, name: str, events: Sequence[HeldEvent]) -> None:
        self.batches.append(name)
        if any(isinstance(event, Cleared) for event in events):
            raise ValueError("stands for any event that the index chokes on")
        self.index.apply(name, events)

    def drop(self, name: str, reason: str) -> None:
        self.drops.append((name, reason))
        self.index.drop(name)

    def held(self, name: str, tokens: int = 64) -> int:
        held = self.index.match(self.index.chains(range(tokens + 1))).get(name)
        return held.attention_tokens if held is not None else 0


@asynccontextmanager
async def running(fed: Fed) -> AsyncIterator[None]:
    for relay in fed.relays.values():
        relay.start()
    task = asyncio.create_task(fed.feed.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for relay in fed.relays.values():
            relay.close()
    assert len(asyncio.all_tasks()) == 1
    assert not any(thread.name.startswith("prfaas-events") for thread in threading.enumerate())


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
            assert fed.relays["home-d0"].state()["batches"] == 3

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
            assert fed.relays["home-d0"].state()["gaps"] == 1

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
                fed.feed.lost("home-d0")
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
            assert fed.relays["home-d0"].state()["malformed"] >= 1

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


def test_a_lost_connection_goes_on_where_it_broke(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])
    publisher.step(stored(range(16), [1]))

    async def main() -> None:
        async with running(fed):
            await until(lambda: fed.held("home-d0") == 16, publisher)
            fed.ports["home-d0"].lose()
            publisher.step(stored(range(16, 32), [2], parent=1))
            await until(lambda: fed.relays["home-d0"].state()["batches"] == 2, publisher)
            fed.ports["home-d0"].take = fed.relays["home-d0"].take
            await until(lambda: fed.held("home-d0") == 32, publisher)

    asyncio.run(main())
    publisher.close()
    assert (fed.drops, fed.batches) == ([], ["home-d0"] * 2)
    told = fed.feed.state_of("home-d0", 0.0)["events"]
    assert (told["gaps"], told["replays"], told["resyncs"]) == (1, 1, 0)


def test_who_is_gone_holds_nothing_until_it_is_back(deployment: Deployment) -> None:
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])
    publisher.step(stored(range(16), [1]))

    async def main() -> None:
        async with running(fed):
            await until(lambda: fed.held("home-d0") == 16, publisher)
            fed.ports["home-d0"].lose()
            await until(lambda: fed.drops == [("home-d0", "disconnected")])
            assert fed.held("home-d0") == 0
            fed.ports["home-d0"].take = fed.relays["home-d0"].take
            await until(lambda: fed.held("home-d0") == 16, publisher)

    asyncio.run(main())
    publisher.close()
    assert fed.drops == [("home-d0", "disconnected")]


def test_batches_that_are_no_longer_kept_are_a_gap(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 2)
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])
    publisher.step(stored(range(16), [1]))

    async def main() -> None:
        async with running(fed):
            await until(lambda: fed.held("home-d0") == 16, publisher)
            fed.ports["home-d0"].lose()
            for number in range(2, 6):
                publisher.step(stored(range(100 * number, 100 * number + 16), [number]))
            await until(lambda: fed.relays["home-d0"].state()["batches"] == 5, publisher)
            fed.ports["home-d0"].take = fed.relays["home-d0"].take
            await until(lambda: fed.index.blocks("home-d0") == 2, publisher)

    asyncio.run(main())
    publisher.close()
    assert fed.drops == [("home-d0", "gap")] and fed.held("home-d0") == 0
    assert fed.feed.state_of("home-d0", 0.0)["events"]["resyncs"] == 1


def test_neither_token_ids_nor_salts_leave_the_relay(deployment: Deployment) -> None:
    """The same search finds them in what the engine publishes."""
    fed = Fed(deployment)
    publisher = Publisher(fed.endpoints["home-d0"])
    ids = [(1 << 20) + number for number in range(16)]
    event = stored(ids, [1]) | {"extra_keys": [["salt-of-a-tenant"]], "lora_name": None}
    publisher.step(event)

    async def main() -> None:
        async with running(fed):
            await until(lambda: fed.index.blocks("home-d0") == 1, publisher)

    asyncio.run(main())
    publisher.close()

    def found(data: bytes) -> set[str]:
        texts = [data]
        for frame in re.findall(rb'"([A-Za-z0-9+/]+=*)"', data):
            with contextlib.suppress(ValueError):
                texts.append(base64.b64decode(frame, validate=True))
        told = b"".join(texts)
        secrets = {f"id {each}": each.to_bytes(3, "big") for each in ids} | {"salt": b"salt-of-a-tenant"}
        return {name for name, secret in secrets.items() if secret in told}

    assert len(found(publisher.kept[0][1])) == 17
    assert fed.ports["home-d0"].frames and not found(b"".join(fed.ports["home-d0"].frames))
    chains = fed.index.chains([*ids, 0], "salt-of-a-tenant")
    assert fed.index.match(chains)["home-d0"].attention_tokens == 16


@pytest.mark.parametrize("kind", ["nothing", "another session", "unreadable"])
def test_who_answers_at_once_with_nothing_to_go_on_from_is_asked_less_and_less(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    pauses: list[float] = []
    drops: list[str] = []
    real_sleep = asyncio.sleep

    async def noted_sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real_sleep(0)

    class Port:
        async def request(self, _id: bytes, order: FollowOrder, _timeout_s: float) -> dict[str, object]:
            nonlocal asked
            asked += 1
            if asked > 12:
                await asyncio.Event().wait()
            session = str(asked) if kind == "another session" else "s"
            batches = (
                [] if kind == "nothing" else [b"\xc1" if kind == "unreadable" else encode_events([])] * 500
            )
            return {"session": session, "first": order.first, "batches": batches, "reason": "gap"}

    async def main() -> EventFeed:
        port: Any = Port()
        feed = EventFeed(
            ["evil"], lambda _: port, apply=lambda *_: None, drop=lambda _, why: drops.append(why)
        )
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", noted_sleep)
            task = asyncio.create_task(feed.run())
            async with asyncio.timeout(60):
                while asked <= 12:
                    await real_sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return feed

    feed = asyncio.run(main())
    waited = [pause for pause in pauses if pause]
    # The first answer may begin a session.
    assert len(waited) >= 11 and waited == sorted(waited) and max(waited) == 5.0
    assert feed.waiting_batches == 0
    # Of an answer that can't be read nothing more is tried.
    assert len(drops) == {"nothing": 0, "another session": 11, "unreadable": 12}[kind]
