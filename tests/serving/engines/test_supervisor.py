"""Restarts of engines that end: later each time, at most so often, by a clock that the test moves."""

import asyncio
import itertools
from collections.abc import Collection

from prfaas.core.backoff import Backoff
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.supervisor import RestartLimits, Supervisor

NAMES = ("a", "b")


class World:
    """Engines that end and answer when the test says so."""

    def __init__(self, limits: RestartLimits) -> None:
        self.now_s = 100.0
        self.running = set(NAMES)
        self.ready: set[str] = set()
        self.starts: list[tuple[float, tuple[str, ...]]] = []
        self.refuses: str | None = None
        self.broken: set[str] = set()
        """Which can't be started; nothing that is to be started together with them is."""
        self.told: list[str] = []
        self.supervisor = Supervisor(self, NAMES, limits, self.told.append, clock=lambda: self.now_s)

    def is_running(self, name: str) -> bool:
        return name in self.running

    def ended_how(self, name: str) -> str:
        return "signal 9"

    def restart(self, names: Collection[str]) -> None:
        if self.refuses is not None:
            raise EngineError(self.refuses)
        for name in names:
            if name in self.broken:
                raise EngineError(f"engine {name} can't start: port 1 is already in use")
        self.starts.append((self.now_s, tuple(names)))
        self.running.update(names)

    def kill(self, name: str) -> None:
        self.running.discard(name)

    def answers(self, name: str) -> bool:
        return name in self.ready

    def end(self, *names: str) -> None:
        self.running.difference_update(names)
        self.ready.difference_update(names)

    async def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            await self.supervisor.look()


def test_an_engine_that_ends_is_started_again_and_said_to_be_ready() -> None:
    async def check() -> None:
        world = World(RestartLimits())
        await world.pass_s(5)
        assert not world.starts and not world.told
        world.end("a")
        await world.pass_s(2)
        assert world.starts == [(107.0, ("a",))]
        world.ready.add("a")
        await world.pass_s(1)
        assert world.told == [
            "engine a has ended (signal 9); restart 1 of 5 in 1 s",
            "engine a is ready again after 1 s",
        ]

    asyncio.run(check())


def test_waits_double_and_end_with_a_sentence() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=3, backoff=Backoff(2.0, 5.0)))
        for _ in range(30):
            world.end("a")
            await world.pass_s(1)
        at_s = [at for at, _ in world.starts]
        assert [b - a for a, b in itertools.pairwise(at_s)] == [5.0, 6.0]
        assert len(at_s) == 3
        assert world.told[-1] == "engine a has ended after 3 restarts (signal 9); the others go on without it"
        assert world.supervisor.given_up == ["a"]
        world.end("b")
        await world.pass_s(3)
        assert world.starts[-1][1] == ("b",)

    asyncio.run(check())


def test_without_restarts_it_only_says_so() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=0))
        world.end("a")
        await world.pass_s(9)
        assert not world.starts
        assert world.told == ["engine a has ended (signal 9); the others go on without it"]

    asyncio.run(check())


def test_engines_that_end_together_are_started_together() -> None:
    async def check() -> None:
        world = World(RestartLimits())
        world.end("a", "b")
        await world.pass_s(3)
        assert world.starts == [(102.0, ("a", "b"))]

    asyncio.run(check())


def test_one_that_cannot_be_started_costs_those_that_ended_with_it_nothing() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2))
        world.broken.add("a")
        world.end("a", "b")
        await world.pass_s(20)
        assert world.starts == [(102.0, ("b",))]
        assert world.running == {"b"}
        assert world.supervisor.given_up == ["a"]
        assert [said for said in world.told if "b" in said.split()] == [
            "engine b has ended (signal 9); restart 1 of 2 in 1 s"
        ]

    asyncio.run(check())


def test_new_ones_are_given_up_each_for_its_own_reason() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2))
        world.broken.add("c")
        for name in ("c", "d"):
            world.supervisor.watch(name)
        await world.pass_s(3)
        assert world.supervisor.given_up == ["c"]
        assert world.running == {"a", "b", "d"}
        assert world.told == ["no restart of c: engine c can't start: port 1 is already in use"]

    asyncio.run(check())


def test_one_that_leaves_while_the_others_are_refused_is_not_started() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2))
        starts = world.restart

        def leaving(names: Collection[str]) -> None:
            if len(names) > 1:
                world.supervisor.leave("b")
                raise EngineError("port 1 is already in use")
            starts(names)

        world.restart = leaving  # type: ignore[method-assign]
        world.end("a", "b")
        await world.pass_s(5)
        assert world.running == {"a"}

    asyncio.run(check())


def test_a_restart_that_is_never_ready_is_ended_and_counts() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2, ready_timeout_s=10.0))
        world.end("a")
        await world.pass_s(60)
        assert len(world.starts) == 2
        assert world.supervisor.given_up == ["a"]
        assert "engine a is not ready 10 s after its restart" in world.told

    asyncio.run(check())


def test_a_restart_that_is_refused_counts() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2))
        world.refuses = "port 1 is already in use"
        world.end("a")
        await world.pass_s(20)
        assert world.told.count("no restart of a: port 1 is already in use") == 2
        assert world.supervisor.given_up == ["a"]

    asyncio.run(check())


def test_an_engine_that_stays_is_sound_again() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=1, steady_s=30.0))
        for _ in range(3):
            world.end("a")
            await world.pass_s(3)
            world.ready.add("a")
            await world.pass_s(40)
        assert len(world.starts) == 3
        assert not world.supervisor.given_up

    asyncio.run(check())


def test_one_more_is_started_and_one_that_leaves_is_let_go() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2))
        world.supervisor.watch("c")
        await world.pass_s(1)
        assert world.starts == [(101.0, ("c",))]
        world.ready.add("c")
        await world.pass_s(1)
        assert world.told == ["engine c is ready after 1 s"]
        world.supervisor.watch("c")
        world.supervisor.leave("b")
        world.end("b", "c")
        await world.pass_s(3)
        assert world.told[1:] == ["engine c has ended (signal 9); restart 1 of 2 in 1 s"]
        assert world.running == {"a", "c"}

    asyncio.run(check())


def test_what_fails_unexpectedly_ends_no_supervision() -> None:
    async def check() -> None:
        world = World(RestartLimits())
        starts = world.restart

        def broken(_names: Collection[str]) -> None:
            world.restart = starts  # type: ignore[method-assign]
            raise KeyError("a")

        world.restart = broken  # type: ignore[method-assign]
        world.end("a")
        await world.pass_s(10)
        assert world.running == {"a", "b"}
        assert world.told[0] == "engine a has ended (signal 9); restart 1 of 5 in 1 s"

    asyncio.run(check())


def test_one_more_that_cannot_be_started_is_given_up() -> None:
    async def check() -> None:
        world = World(RestartLimits(most=2))
        world.refuses = "port 1 is already in use"
        world.supervisor.watch("c")
        await world.pass_s(5)
        assert world.told == ["no restart of c: port 1 is already in use"]
        assert world.supervisor.given_up == ["c"]

    asyncio.run(check())


def test_what_was_ended_on_purpose_is_started_at_once_and_is_no_failure() -> None:
    async def main() -> None:
        world = World(RestartLimits(most=1))
        world.end("a")
        await world.pass_s(3)
        world.end("a")
        await world.pass_s(3)
        assert world.supervisor.given_up == ["a"] and len(world.starts) == 1
        world.supervisor.start_again("a")
        world.supervisor.start_again("nobody")
        await world.pass_s(1)
        assert len(world.starts) == 2 and world.supervisor.given_up == []
        # It has all of its restarts again.
        world.end("a")
        await world.pass_s(3)
        assert len(world.starts) == 3

    asyncio.run(main())
