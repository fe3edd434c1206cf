"""From the senders' rejections to the pairs that routing leaves out, and back; and how senders are asked."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from prfaas.core.deployment import Deployment
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.compatibility import Compatibility
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.rank_stats import RankStats
from prfaas.serving.running_deployment import RunningDeployment

from .world import FakeSender

SENTENCE = "KV layout differs in 'block_tokens': home-d0/0 has '16', far-0/0 has '32'"


class Asked:
    """Compatibility over fake KV ports."""

    def __init__(
        self,
        deployment: Deployment,
        cluster_state: ClusterState,
        on_silent: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        self.ports = {instance.name: FakeSender() for instance in deployment.instances}
        self.blocked = lambda: cluster_state.view.blocked
        ports = {name: (port,) for name, port in self.ports.items()}
        self.compatibility = Compatibility(cluster_state, on_silent)
        listeners = Listeners()
        listeners.told.append(self.compatibility.hear)
        self.stats = RankStats(RunningDeployment(deployment), ports, listeners)  # type: ignore[arg-type]

    async def ask(self) -> None:
        for name in self.ports:
            await self.stats.ask(name)


@pytest.fixture
def asked(deployment: Deployment, cluster_state: ClusterState) -> Asked:
    return Asked(deployment, cluster_state)


def test_a_rejected_pair_is_blocked_until_its_sender_says_otherwise(asked: Asked) -> None:
    async def main() -> None:
        await asked.ask()
        assert asked.blocked() == frozenset()
        asked.ports["far-0"].rejected = {"home-d0/0": SENTENCE}
        assert asked.compatibility.reason("far-0", "home-d0") is None
        await asked.stats.ask("far-0")
        assert asked.compatibility.reason("far-0", "home-d0") == SENTENCE
        assert asked.compatibility.reason("home-d0", "far-0") is None
        assert asked.blocked() == {("far-0", "home-d0")}
        assert asked.compatibility.state(0.0)["incompatible"] == [
            {"producer": "far-0", "consumer": "home-d0", "reason": SENTENCE}
        ]
        # One that does not answer is believed as before; a new one knows of no rejection.
        asked.ports["far-0"].links = None
        await asked.ask()
        assert asked.blocked() == {("far-0", "home-d0")}
        asked.ports["far-0"].links, asked.ports["far-0"].rejected = {}, {}
        await asked.ask()
        assert asked.blocked() == frozenset() and asked.compatibility.state(0.0)["incompatible"] == []

    asyncio.run(main())


@pytest.mark.parametrize("rejected", [["home-d0/0"], {"nobody/0": "x"}, {"home-d0/0\nx": "y"}, 5, None])
def test_garbage_blocks_nobody(asked: Asked, rejected: Any) -> None:
    async def main() -> None:
        asked.ports["far-0"].rejected = {"home-d0/0": SENTENCE}
        await asked.ask()

        async def stats() -> dict[str, Any]:
            return {"sender": {"links": {}, "rejected": rejected}}

        asked.ports["far-1"].stats = stats  # type: ignore[method-assign]
        await asked.ask()
        assert asked.blocked() == {("far-0", "home-d0")}

    asyncio.run(main())


def test_silent_paths_are_told_while_they_last(deployment: Deployment, cluster_state: ClusterState) -> None:
    async def main() -> None:
        told: list[tuple[str, str, str]] = []
        asked = Asked(deployment, cluster_state, lambda *pair: told.append(pair))
        report: dict[str, Any] = {"links": {}, "silent": {"home-d0/0": "nothing", "nobody/0": "x"}}

        async def stats() -> dict[str, Any]:
            return {"sender": report}

        asked.ports["far-0"].stats = stats  # type: ignore[method-assign]
        await asked.ask()
        await asked.ask()
        assert told == [("far-0", "home-d0", "nothing")] * 2
        assert asked.blocked() == frozenset()
        report["silent"] = {}
        await asked.ask()
        assert len(told) == 2

    asyncio.run(main())


def test_all_senders_are_asked_and_nothing_is_left_running(asked: Asked) -> None:
    async def main() -> None:
        running = asyncio.create_task(asked.stats.run())
        async with asyncio.timeout(60):
            while not all(port.asked >= 2 for port in asked.ports.values()):
                await asyncio.sleep(0.01)
            asked.ports["home-p0"].rejected = {"home-d1/0": SENTENCE}
            while not asked.blocked():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_who_has_not_been_asked_for_a_second_holds_nobody_up(asked: Asked) -> None:
    async def main() -> None:
        async def stats() -> dict[str, Any]:
            await asyncio.sleep(600)
            return {}

        asked.ports["far-0"].stats = stats  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            await asked.stats.ask("far-0")
        assert asked.compatibility.reason("far-0", "home-d0") is None

    asyncio.run(main())
