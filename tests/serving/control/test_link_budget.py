"""A link's bandwidth goes to the senders that have something to send, follows what the link carries, and is told."""

import asyncio

import pytest

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.link.budget import STANDING_PART, TRICKLE_PART
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.link_budget import HOLD_S, LinkBudget
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.running_deployment import RunningDeployment

from .world import LINK, FakeClock, FakeSender, report

NAME = "far->home"


class Budgets:
    """A link of 1 Gbit/s with two senders."""

    def __init__(self, deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> None:
        self.clock = clock
        self.ports = {
            instance.name: tuple(FakeSender() for _ in range(instance.tensor_parallel))
            for instance in deployment.instances
        }
        self.monitor = LinkMonitor(
            RunningDeployment(deployment), self.port_of, cluster_state, on_change=lambda _: None
        )
        self.budget = LinkBudget(
            RunningDeployment(deployment),
            self.ports,
            cluster_state.view.links,
            self.monitor.samples,
            clock=clock,
        )
        self.senders = [self.ports["far-0"][0], self.ports["far-1"][0]]

    def port_of(self, instance: Instance, rank: int) -> FakeSender:
        return self.ports[instance.name][rank]

    async def round(self, seconds: float = 0.1) -> dict[str, int]:
        """A look at the senders; returns the orders that follow, by sender."""
        self.clock.now_s += seconds
        self.monitor.ask()
        for _ in range(5):
            await asyncio.sleep(0)
        self.budget.divide()
        return {name: order.bits_per_s[NAME] for name, order in self.budget.orders()}


@pytest.fixture
def budgets(deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> Budgets:
    return Budgets(deployment, cluster_state, clock)


def works(acked: int = 0, queued: int = 0, still: int = 1 << 30) -> dict[str, dict[str, object]]:
    return {NAME: report(acked_bytes_total=acked, queued_bytes=queued, open_bytes=queued + still)}


def test_one_sender_has_the_link_for_itself(budgets: Budgets) -> None:
    async def main() -> None:
        for sender in budgets.senders:
            sender.links = {NAME: report()}
        assert await budgets.round() == {"far-0/0": 5e8, "far-1/0": 5e8}
        budgets.senders[0].links = works(queued=1 << 28)
        orders = await budgets.round()
        assert orders == {"far-0/0": 1e9, "far-1/0": 1e9 * STANDING_PART / 2}
        budgets.senders[1].links = works(queued=1 << 28)
        assert await budgets.round() == {"far-0/0": 5e8, "far-1/0": 5e8}
        await budgets.monitor.close()

    asyncio.run(main())


def test_a_prefill_that_makes_little_leaves_the_rest(budgets: Budgets) -> None:
    async def main() -> None:
        made = 0
        told: dict[str, int] = {}
        for _ in range(40):
            made += 1_250_000  # 100 Mbit/s, all of it acknowledged at once
            budgets.senders[0].links = works(acked=made)
            budgets.senders[1].links = works(queued=1 << 30)
            told |= await budgets.round()
        assert told["far-0/0"] == pytest.approx(1.25e8, rel=0.06)
        assert told["far-1/0"] == pytest.approx(9e8, rel=0.06)
        await budgets.monitor.close()

    asyncio.run(main())


def test_copies_get_what_is_left(budgets: Budgets) -> None:
    async def main() -> None:
        budgets.senders[0].links = {
            NAME: report(queued_bytes=1 << 28, background_bytes=1 << 28, open_bytes=1 << 28)
        }
        budgets.senders[1].links = works(queued=1 << 28)
        told = await budgets.round()
        assert told["far-1/0"] == 1e9 * (1 - TRICKLE_PART) and told["far-0/0"] == 1e9 * TRICKLE_PART
        budgets.senders[1].links = {NAME: report()}
        assert (await budgets.round())["far-0/0"] == 1e9
        await budgets.monitor.close()

    asyncio.run(main())


def test_what_is_believed_slow_is_used_a_little_beyond(budgets: Budgets, cluster_state: ClusterState) -> None:
    async def main() -> None:
        cluster_state.view.links[LINK].pace_bits_per_s = 1.15e8
        for sender in budgets.senders:
            sender.links = works(queued=1 << 28)
        assert sum((await budgets.round()).values()) == pytest.approx(1.15e8)
        await budgets.monitor.close()

    asyncio.run(main())


def test_an_order_is_told_when_it_changes_and_again_before_it_ends(budgets: Budgets) -> None:
    async def main() -> None:
        for sender in budgets.senders:
            sender.links = works(queued=1 << 28)
        assert len(await budgets.round()) == 2
        quiet_s = 0.0
        while not (orders := await budgets.round()):
            quiet_s += 0.1
        assert 0.5 < quiet_s < HOLD_S / 2 and len(orders) == 2
        budgets.senders[1].links = None  # silent: in the end the other has all
        for _ in range(40):
            orders |= await budgets.round()
        assert orders["far-0/0"] == 1e9
        await budgets.monitor.close()

    asyncio.run(main())


def test_a_process_that_starts_again_claims_nothing_for_it(budgets: Budgets) -> None:
    async def main() -> None:
        budgets.senders[0].links = works(acked=1 << 40)
        await budgets.round()
        budgets.senders[0].links = works(acked=0)
        budgets.senders[1].links = works(queued=1 << 30)
        await budgets.round()
        told: dict[str, int] = {}
        for _ in range(30):
            told |= await budgets.round()
        assert told["far-1/0"] == 1e9
        await budgets.monitor.close()

    asyncio.run(main())


def test_the_loop_tells_and_ends(budgets: Budgets) -> None:
    async def main() -> None:
        for sender in budgets.senders:
            sender.links = works(queued=1 << 28)
        await budgets.round()
        budgets.budget._told.clear()
        running = asyncio.create_task(budgets.budget.run())
        async with asyncio.timeout(60):
            while not all(sender.orders for sender in budgets.senders):
                await asyncio.sleep(0.01)
        assert budgets.senders[0].orders[0].bits_per_s == {NAME: 5e8}
        assert budgets.senders[0].orders[0].hold_ms == 1000 * HOLD_S
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await budgets.monitor.close()

    asyncio.run(main())
