"""The ranks of a group start again as one; engines of their own are left alone."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

from prfaas.core.deployment import Instance
from prfaas.serving.engines.engine_units import RunningUnits, units_of
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.supervisor import RestartLimits, Supervisor


def instance(name: str, group: str | None, host: str = "127.0.0.1") -> Instance:
    fields: dict[str, Any] = {"cluster": "c", "roles": ("decode",), "http_port": 1, "kv_port": 2}
    return Instance(name=name, host=host, data_parallel=group, **fields)


INSTANCES = (
    instance("a", "moe"),
    instance("b", None),
    instance("c", "moe"),
    instance("d", "moe", "elsewhere"),
)
HERE = INSTANCES[:3]


class Engines:
    """Those of this machine: a, b and c."""

    def __init__(self) -> None:
        self.deployment = SimpleNamespace(instances=INSTANCES)
        self.running = {"a", "b", "c"}
        self.ready = {"a", "b", "c"}
        self.log: list[tuple[str, ...]] = []

    def is_running(self, name: str) -> bool:
        return name in self.running

    def ended_how(self, name: str) -> str:
        return f"signal 9 of {name}"

    def restart(self, names: Collection[str]) -> None:
        assert not self.running.intersection(names)
        self.log.append(("restart", *names))
        self.running.update(names)

    def kill(self, name: str) -> None:
        self.log.append(("kill", name))
        self.running.discard(name)

    def answers(self, name: str) -> bool:
        return name in self.ready


def test_a_group_starts_again_as_one() -> None:
    async def main() -> None:
        engines, told, now_s = Engines(), list[str](), [0.0]
        units = units_of(HERE)
        assert units == ("group moe", "b")
        running = RunningUnits(cast(RunningEngines, engines), lambda each: each.host == "127.0.0.1")
        supervisor = Supervisor(running, units, RestartLimits(), told.append, clock=lambda: now_s[0])

        async def look(seconds: int) -> None:
            for _ in range(seconds):
                now_s[0] += 1.0
                await supervisor.look()

        await look(2)
        assert not engines.log and not told
        engines.running.remove("c")
        engines.ready.remove("c")
        await look(3)
        assert engines.log == [("kill", "a"), ("restart", "a", "c")]
        assert told == ["engine group moe has ended (c: signal 9 of c); restart 1 of 5 in 1 s"]
        engines.ready.add("c")
        await look(1)
        assert told[1] == "engine group moe is ready again after 2 s"
        engines.running.remove("b")
        await look(2)
        assert engines.log[2:] == [("restart", "b")]
        assert told[2] == "engine b has ended (signal 9 of b); restart 1 of 5 in 1 s"

    asyncio.run(main())
