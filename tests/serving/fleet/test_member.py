"""Who is a member, who leads, and what is left when the store goes."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.deployment import FleetConfig
from prfaas.serving.fleet import member
from prfaas.serving.fleet.member import FleetMember
from prfaas.serving.fleet.store import Entry, StoreChange

from .memory_store import MemoryEtcd, MemoryStore

LIMIT_S = 30.0


class Node:
    """One member with what it was told."""

    def __init__(self, etcd: MemoryEtcd, name: str) -> None:
        self.store = MemoryStore(etcd)
        self.name = name
        self.said = name.encode()
        self.values: dict[str, bytes] = {}
        self.joined = 0
        self.member = FleetMember(
            self.store, "/prfaas/test/", name, FleetConfig(etcd=(), lease_s=3, period_s=0.01), self
        )
        self.task = asyncio.create_task(self.member.run())

    def announcement(self) -> bytes:
        return self.said

    def take_value(self, key: str, value: bytes | None, revision: int) -> None:
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def steer(self) -> None:
        self.joined += 1

    def forget_revisions(self) -> None:
        """The values that are told next are all that there are."""

    async def die(self) -> None:
        """Without a word, as a process that is killed."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not what():
            await asyncio.sleep(0.005)


class Time:
    """Of the leases: it stands still until a test moves it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def play(scene: Callable[[MemoryEtcd, Time], Awaitable[list[Node]]]) -> None:
    async def main() -> None:
        clock = Time()
        nodes = await scene(MemoryEtcd(clock), clock)
        for node in nodes:
            await node.die()

    asyncio.run(main())


async def fleet(etcd: MemoryEtcd, *names: str) -> list[Node]:
    nodes = []
    for name in names:
        nodes.append(Node(etcd, name))
        await until(lambda: nodes[-1].member.is_connected)
    await until(lambda: all(len(node.member.members) == len(names) for node in nodes))
    return nodes


def test_the_oldest_leads_and_the_next_oldest_after_it() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        a, b, c = nodes = await fleet(etcd, "z", "b", "a")
        assert {node.member.leader for node in nodes} == {"z"}
        assert [node.member.leads for node in nodes] == [True, False, False]
        await a.die()
        # Until its lease has ended it is a member.
        assert b.member.leader == "z"
        clock.now_s += 2.9
        await b.store.keep(2)
        await c.store.keep(3)
        assert b.member.leader == "z"
        clock.now_s += 0.2
        etcd.expire()
        await until(lambda: b.member.leader == c.member.leader == "b")
        assert list(c.member.others) == ["b"]
        return [b, c]

    play(scene)


def test_who_leaves_is_gone_at_once() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        a, b = await fleet(etcd, "a", "b")
        await a.die()
        await a.member.leave()
        assert a.store.closed
        await until(lambda: b.member.leads)
        return [b]

    play(scene)


def test_members_tell_and_are_told() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        a, b = nodes = await fleet(etcd, "a", "b")
        a.said = b"news"
        await until(lambda: b.member.members["a"].value == b"news")
        assert await a.member.put("decisions", b"x")
        assert await b.member.put("drained/i", b"y")
        await until(lambda: a.values == b.values == {"decisions": b"x", "drained/i": b"y"})
        assert await b.member.put("drained/i", None)
        await until(lambda: a.values == b.values == {"decisions": b"x"})
        late = Node(etcd, "late")
        await until(lambda: late.joined)
        assert late.values == {"decisions": b"x"}
        assert late.member.leader == "a"
        return [*nodes, late]

    play(scene)


def test_a_short_silence_of_the_store_changes_no_leader() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        a, b = nodes = await fleet(etcd, "a", "b")
        created = a.member.members["a"].created
        etcd.stop()
        await until(lambda: not a.member.is_connected and not b.member.is_connected)
        # What was known is known.
        assert {node.member.leader for node in nodes} == {"a"}
        assert a.member.leads
        assert a.member.problem == "etcd does not answer: it is stopped"
        assert await a.member.put("decisions", b"x") is None
        clock.now_s += 100.0
        etcd.start()
        await until(lambda: a.member.is_connected and b.member.is_connected)
        assert {node.member.leader for node in nodes} == {"a"}
        assert a.member.members["a"].created == created
        assert (a.joined, a.member.losses, a.member.problem) == (2, 1, None)
        return nodes

    play(scene)


def test_what_changed_meanwhile_is_learnt_afterwards() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        a, b = nodes = await fleet(etcd, "a", "b")
        await a.member.put("drained/i", b"y")
        await a.member.put("drained/j", b"y")
        await until(lambda: len(b.values) == 2)
        b.store.cut = True
        etcd._wake()
        await until(lambda: not b.member.is_connected)
        await a.member.put("drained/i", None)
        await a.member.put("decisions", b"x")
        b.store.cut = False
        await until(lambda: b.member.is_connected)
        assert b.values == {"drained/j": b"y", "decisions": b"x"}
        return nodes

    play(scene)


def test_a_leader_that_was_thought_dead_writes_nothing_and_comes_back_as_the_youngest() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        a, b = nodes = await fleet(etcd, "a", "b")
        a.store.cut = True
        clock.now_s += 4.0
        etcd.leases[2] = clock.now_s + 3
        etcd.expire()
        await until(lambda: b.member.leads)
        # It knows nothing of that yet; its connection is back.
        a.store.cut = False
        revision = etcd.revision
        if a.member.is_connected:
            assert await a.member.put("decisions", b"of the dead") is None
        assert "/prfaas/test/decisions" not in etcd.entries
        assert etcd.revision == revision
        await until(lambda: a.member.is_connected and len(a.member.members) == 2)
        assert a.member.leader == b.member.leader == "b"
        return nodes

    play(scene)


def test_it_ends_when_it_is_told_to_at_the_moment_at_which_the_store_goes() -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        (a,) = await fleet(etcd, "a")
        await until(lambda: a.member.is_connected)
        etcd.stop()
        async with asyncio.timeout(LIMIT_S):
            await a.die()
        assert a.task.cancelled()
        return []

    play(scene)


def test_two_of_one_name_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        (a,) = await fleet(etcd, "a")
        second = Node(etcd, "a")
        await until(lambda: "give each gateway its own fleet.name" in (second.member.problem or ""))
        assert not second.member.has_joined and not second.member.leads
        assert a.member.is_connected
        # It was this one's earlier life: when its lease ends, the name is free.
        await a.die()
        clock.now_s += 4.0
        await until(lambda: second.member.is_connected)
        assert second.member.leads
        return [second]

    play(scene)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["join", "die", "leave"]), min_size=1, max_size=8))
def test_there_is_one_leader_and_it_changes_only_when_it_goes(steps: list[str]) -> None:
    async def scene(etcd: MemoryEtcd, clock: Time) -> list[Node]:
        nodes: list[Node] = []
        names = (f"g{number}" for number in itertools.count())
        leader = None
        for step in steps:
            if step == "join" or not nodes:
                nodes.append(Node(etcd, next(names)))
                await until(lambda: nodes[-1].member.is_connected)
            else:
                node = nodes.pop(len(nodes) // 2)
                await node.die()
                if step == "leave":
                    await node.member.leave()
                else:
                    lease = etcd.holders["/prfaas/test/gateways/" + node.member.name]
                    etcd.end(lease)
            alive = {node.member.name for node in nodes}
            await until(lambda alive=alive: all(set(node.member.members) == alive for node in nodes))
            leaders = {node.member.leader for node in nodes}
            assert len(leaders) == min(len(nodes), 1)
            if leader in alive:
                assert leaders == {leader}
            leader = next(iter(leaders), None)
            assert [node.member.name for node in nodes if node.member.leads] == [leader] * bool(nodes)
        return nodes

    play(scene)


def test_a_value_that_cannot_be_taken_costs_a_session_and_no_more() -> None:
    async def scene(etcd: MemoryEtcd, _clock: Time) -> list[Node]:
        a, b = await fleet(etcd, "a", "b")

        def fail(*_: object) -> None:
            raise ZeroDivisionError("absurd")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(b, "take_value", fail)
            await a.member.put("decisions", b"absurd")
            await asyncio.wait([b.task], timeout=LIMIT_S)
            # Who keeps its loops begins it again; until then it must not count as a member that follows.
            assert isinstance(b.task.exception(), ZeroDivisionError)
            assert (b.member.is_connected, b.member.problem) == (False, "absurd")
        b.task = asyncio.create_task(b.member.run())
        await until(lambda: b.member.is_connected and b.values == {"decisions": b"absurd"})
        return [a, b]

    play(scene)


def test_keys_without_end_get_no_more_than_a_fleet_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_MOST_GATEWAYS", 8)
    monkeypatch.setattr(member, "_MOST_KEYS", 20)
    monkeypatch.setattr(member, "_MOST_VALUE_BYTES", 1000)

    async def scene(etcd: MemoryEtcd, _clock: Time) -> list[Node]:
        (a,) = await fleet(etcd, "z")
        for number in range(100):
            etcd.set(f"/prfaas/test/gateways/a{number}", b"x")
            etcd.set(f"/prfaas/test/drained/a{number}", b"x")
        etcd.set("/prfaas/test/drained/a3", None)
        etcd.set("/prfaas/test/decisions", bytes(1001))
        etcd.set("/prfaas/test/" + "k" * 600, b"x")
        etcd.set("/prfaas/test/reloaded", b"the last")
        # Heard by the watch, and read by who joins.
        late = Node(etcd, "late")
        nodes = [a, late]
        await until(lambda: "reloaded" in a.values and late.member.is_connected)
        for node in nodes:
            assert len(node.member.members) <= 9 and len(node.values) <= 20
            assert node.name in node.member.members and "decisions" not in node.values
        assert a.member.leader == "z"
        return nodes

    play(scene)


def test_a_watch_that_tells_without_end_leaves_the_loop_to_others() -> None:
    async def scene(etcd: MemoryEtcd, _clock: Time) -> list[Node]:
        (a,) = await fleet(etcd, "a")
        entry = Entry("/prfaas/test/decisions", b"x", 5, 5)
        told, turns = asyncio.Event(), 0

        async def endless(_prefix: str, _first: int) -> AsyncIterator[Sequence[StoreChange]]:
            nonlocal turns
            turns = 0
            for _ in range(1000):
                yield [StoreChange(entry.key, entry, entry.changed)]
            yield [StoreChange(entry.key, entry, entry.changed)] * 100_000
            told.set()
            await asyncio.Event().wait()

        a.store.watch = endless  # type: ignore[method-assign]
        etcd.stop()
        await until(lambda: not a.member.is_connected)
        etcd.start()
        while not told.is_set():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 1000 + 100_000 / 256
        return [a]

    play(scene)
