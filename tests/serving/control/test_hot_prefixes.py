"""Hot prefixes: copied from pool to pool, within bounds, and what becomes of that."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from prfaas.core.prefix.hashing import BlockHasher, PromptChains, PromptTokens
from prfaas.core.prefix.index import PoolHit, PrefixHit
from prfaas.core.scheduling.rebalancing import Rebalancer
from prfaas.serving.control import hot_prefixes
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.pool.copier import PoolCopier
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.protocol.requests import CopyOrder, CopyResult
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.wire import body_of

from .world import KEY, LINK, FakeClock, FakeSender, cluster_state_of, deployment_of, report, with_pools

HASHER = BlockHasher(block_tokens=16, seed=3)


class FakePool:
    """The KV port of a pool that answers copies with what it is told to."""

    def __init__(self) -> None:
        self.answers: list[CopyResult | Exception] = []
        self.orders: list[CopyOrder] = []
        self.abandoned: list[bytes] = []

    async def request(self, transfer_id: bytes, order: Any, timeout_s: float) -> dict[str, Any]:
        self.orders.append(order)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return body_of(answer)

    async def abandon(self, transfer_id: bytes, reason: str, *, keep: bool = False) -> None:
        self.abandoned.append(transfer_id)

    async def close(self) -> None:
        pass


def chains(tokens: range) -> PromptChains:
    ids = list(tokens)
    prompt = PromptTokens(ids, "salt", "adapter")
    return PromptChains(len(ids), {16: HASHER.hashes(ids[:-1], 5)}, prompt=prompt)


def holds(tokens: int) -> PoolHit:
    return PoolHit(PrefixHit(tokens, tokens), PrefixHit(tokens, tokens))


class Hot:
    """Two clusters with pools, a fast link, and hot prefixes that ask for two misses."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.deployment = deployment_of(folder, text=with_pools())
        self.state = cluster_state_of(self.deployment, self.clock)
        link = self.state.view.links[LINK]
        link.up, link.capacity_bits_per_s = True, 1e11
        self.registry = CollectorRegistry()
        self.pools = {pool.name: FakePool() for pool in self.deployment.pools}
        self.rebalancer = Rebalancer(min_misses=2, period_s=0.01)
        self.hot = HotPrefixes(
            self.state,
            PoolCopier(RunningDeployment(self.deployment), KEY, self.pools),
            metrics=ControlMetrics(self.registry),
            rebalancer=self.rebalancer,
        )

    def run(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            running = asyncio.create_task(self.hot.run())
            try:
                await body()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(main())

    def request(self, tokens: range, *, far: int, home: int = 0) -> None:
        """A request that is prefilled at home; what the two pools hold of it."""
        held = {"far-pool": holds(far), "home-pool": holds(home)}
        self.hot.note("home-p0", chains(tokens), {name: hit for name, hit in held.items() if hit != holds(0)})

    async def outcome(self, decisions: int = 1) -> str:
        """Of the newest one of so many decisions, when all are over."""
        async with asyncio.timeout(30):
            while True:
                self.clock.now_s += 1
                self.state.view.links[LINK].seen_s = self.clock.now_s
                recent = self.hot.state(self.clock.now_s)["rebalancing"]["recent"]
                outcomes = [str(each["outcome"]) for each in recent]
                if len(outcomes) == decisions and not {"decided", "under way"} & set(outcomes):
                    return outcomes[-1]
                await asyncio.sleep(0.005)

    def metric(self, name: str) -> float:
        lines = generate_latest(self.registry).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"prfaas_control_{name}"))


@pytest.fixture
def hot(tmp_path: Path) -> Hot:
    return Hot(tmp_path)


def test_a_hot_prefix_is_copied(hot: Hot) -> None:
    async def body() -> None:
        for end in (500, 600):
            hot.request(range(end), far=480, home=160)
        hot.pools["home-pool"].answers = [CopyResult(3_200_000, 480, "")]
        assert await hot.outcome() == "done"
        (order,) = hot.pools["home-pool"].orders
        ticket = Ticket.unseal(order.ticket, KEY, 0.0)
        assert (ticket.producer, ticket.consumer, ticket.num_tokens) == ("far-pool", "home-pool", 480)
        assert ticket.attributes.service.background
        assert (list(order.token_ids), order.salt, order.adapter) == (list(range(480)), "salt", "adapter")
        state = hot.hot.state(0)["rebalancing"]
        assert (state["copied"], state["copied_bytes"], state["copied_tokens"]) == (1, 3_200_000, 320)
        assert hot.metric('prefix_copies_ended_total{outcome="done"}') == 1
        assert hot.metric("prefix_copied_bytes_total") == 3_200_000
        assert hot.metric("prefix_copied_tokens_total") == 320

    hot.run(body)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (CopyResult(0, 0, "gone: it was evicted"), "gone"),
        (CopyResult(7, 0, "whatever: it says"), "failed"),
        (ConnectionError("nobody there"), "target"),
        (TimeoutError(), "deadline"),
    ],
)
def test_a_copy_that_fails_is_not_counted_as_copied(
    hot: Hot, answer: CopyResult | Exception, outcome: str
) -> None:
    async def body() -> None:
        for _ in range(2):
            hot.request(range(500), far=480)
        hot.pools["home-pool"].answers = [answer]
        assert await hot.outcome() == outcome
        state = hot.hot.state(0)["rebalancing"]
        assert (state["copied"], state["copied_tokens"]) == (0, 0)
        await asyncio.sleep(0.01)
        assert len(hot.pools["home-pool"].abandoned) == isinstance(answer, Exception)

    hot.run(body)


def test_prompts_are_kept_only_for_what_was_missed_twice_and_within_bounds(
    hot: Hot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_prefixes, "_MOST_TOKENS_KEPT", 1000)
    for start in (0, 1000, 2000):
        hot.request(range(start, start + 500), far=480)
        assert hot.hot._wanted_tokens == min(start // 1000, 2) * 480
        for _ in range(3):
            hot.request(range(start, start + 500), far=480)
        assert hot.hot._wanted_tokens <= 1000

    async def body() -> None:
        # The first one of the three was forgotten for the third.
        hot.pools["home-pool"].answers = [CopyResult(1, 480, "")] * 2
        await hot.outcome(3)
        outcomes = [each["outcome"] for each in hot.hot.state(0)["rebalancing"]["recent"]]
        assert sorted(outcomes) == ["done", "done", "forgotten"]
        assert hot.hot._wanted_tokens == 0

    hot.run(body)


def test_senders_of_pools_are_heard_and_told_their_pace(tmp_path: Path) -> None:
    clock = FakeClock()
    deployment = deployment_of(tmp_path, text=with_pools())
    state = cluster_state_of(deployment, clock)
    ports = {each.name: (FakeSender(),) for each in deployment.instances}
    pools: dict[str, Any] = {pool.name: FakeSender() for pool in deployment.pools}
    for sender in (ports["far-0"][0], pools["far-pool"]):
        sender.links = {"far->home": report()}
    heard: list[str] = []
    monitor = LinkMonitor(
        RunningDeployment(deployment),
        lambda instance, rank: ports[instance.name][rank],
        state,
        on_change=lambda _: None,
        on_answer=lambda name, _: heard.append(name),
        pool_ports=pools,
    )
    every_port = {**ports, **{name: (port,) for name, port in pools.items()}}
    budget = LinkBudget(
        RunningDeployment(deployment), every_port, state.view.links, monitor.samples, clock=clock
    )

    async def main() -> None:
        monitor.ask()
        for _ in range(5):
            await asyncio.sleep(0)
        monitor.conclude()
        budget.divide()
        assert set(monitor.samples(LINK)) == {"far-0/0", "far-pool/0"}
        assert {name for name, _ in budget.orders()} == {"far-0/0", "far-pool/0"}
        assert {"far-pool", "home-pool"} <= set(heard)
        await monitor.close()

    asyncio.run(main())
