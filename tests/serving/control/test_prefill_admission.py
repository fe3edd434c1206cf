"""Waiting for a prefill instance, live."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec import structs
from tests.serving.control.world import LINK, FakeClock, cluster_state_of, decision

from prfaas.core.deployment import Deployment
from prfaas.core.prefix.hashing import PromptChains
from prfaas.core.scheduling.decision import Decision
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.prefill_admission import PrefillAdmission

CHAINS = PromptChains(5000, {})


class Yard:
    def __init__(self, deployment: Deployment, clock: FakeClock) -> None:
        self.cluster_state: ClusterState = cluster_state_of(deployment, clock)
        self.held: dict[str, int] = {}
        self.admission = PrefillAdmission(
            self.cluster_state,
            batch_tokens=2048,
            reusable_at=lambda _chains, name: self.held.get(name, 0),
        )
        self.log: list[str] = []

    def asks(self, label: str, what: Decision, hold: asyncio.Event | None = None) -> "asyncio.Task[None]":
        async def whole() -> None:
            async with self.admission.admit(what, CHAINS) as mine:
                self.log.append(f"{label} at {mine.prefill}")
                if hold is not None:
                    await hold.wait()

        return asyncio.create_task(whole())

    async def filled(self) -> "tuple[asyncio.Event, list[asyncio.Task[None]]]":
        """Every instance has a prefill, until the event is set."""
        hold = asyncio.Event()
        held = [self.asks(name, urgent(0.0), hold) for name in "ab"]
        await settled()
        return hold, held


def urgent(urgency_s: float, prefill: str = "far-0", *, tokens: int = 5000, bound: bool = False) -> Decision:
    return structs.replace(
        decision(prefill, "home-d0", prefill_tokens=tokens), urgency_s=urgency_s, is_bound=bound
    )


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_whoever_is_free_first_takes_the_most_urgent(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        holds = [asyncio.Event() for _ in range(2)]
        tasks = [yard.asks(f"r{i}", urgent(0.0), hold) for i, hold in enumerate(holds)]
        await settled()
        assert yard.log == ["r0 at far-0", "r1 at far-1"]
        tasks += [yard.asks("slow", urgent(9.0)), yard.asks("quick", urgent(5.0))]
        await settled()
        assert yard.cluster_state.view.clusters["far"].waiting_s > 0
        assert yard.cluster_state.residual_bytes(LINK) > 0
        holds[1].set()
        await settled()
        assert yard.log[2:] == ["quick at far-1", "slow at far-1"]
        assert yard.cluster_state.view.clusters["far"].waiting_s == 0.0
        holds[0].set()
        await asyncio.gather(*tasks)
        assert yard.cluster_state.instance("home-d0").in_flight == 0

    asyncio.run(main())


def test_the_view_says_what_prefills_have_waited(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        waits = yard.cluster_state.view.clusters["far"].waits
        holds = [asyncio.Event() for _ in range(2)]
        tasks = [yard.asks(f"r{i}", urgent(0.0), hold) for i, hold in enumerate(holds)]
        await settled()
        # They did not wait.
        assert waits.mean_prefill_s == 0.0
        tasks.append(yard.asks("late", urgent(1.0)))
        await settled()
        clock.now_s += 12.0
        holds[0].set()
        await settled()
        assert yard.log[2:] == ["late at far-0"]
        assert waits.mean_wait_s == pytest.approx(12.0)
        assert waits.mean_prefill_s == yard.cluster_state.view.clusters["far"].prefill_s(5000)
        assert yard.cluster_state.view.clusters["home"].waits.mean_prefill_s == 0.0
        holds[1].set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_short_prompts_share_an_instance_up_to_one_step(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        hold = asyncio.Event()
        tasks = [yard.asks(f"r{i}", urgent(float(i), bound=True, tokens=1024), hold) for i in range(3)]
        await settled()
        assert yard.log == ["r0 at far-0", "r1 at far-0"]
        hold.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_another_instance_computes_what_it_does_not_hold(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        yard.held = {"far-1": 1000}
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(yard.admission.admit(urgent(0.0), CHAINS))
            mine = await stack.enter_async_context(yard.admission.admit(urgent(0.0, tokens=3000), CHAINS))
            assert (mine.prefill, mine.prefill_tokens) == ("far-1", 4000)

    asyncio.run(main())


def test_who_goes_away_leaves_nothing_behind(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        hold = asyncio.Event()
        held = [yard.asks("a", urgent(0.0), hold), yard.asks("b", urgent(0.0), hold)]
        await settled()
        gone, stays = yard.asks("gone", urgent(1.0)), yard.asks("stays", urgent(2.0))
        await settled()
        gone.cancel()
        await settled()
        assert yard.admission.waiting("far") == 1
        hold.set()
        await asyncio.gather(*held, stays)
        assert yard.log[2:] == ["stays at far-0"] or yard.log[2:] == ["stays at far-1"]
        assert yard.cluster_state.view.clusters["far"].waiting_s == 0.0
        assert yard.cluster_state.residual_bytes(LINK) == 0

    asyncio.run(main())


def test_a_request_that_goes_just_before_its_turn_breaks_no_other(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        hold, held = await yard.filled()
        gone, stays = yard.asks("gone", urgent(1.0)), yard.asks("stays", urgent(2.0))
        await settled()
        # Those that hold an instance wake up first, and find a request that is cancelled but has not run yet.
        hold.set()
        gone.cancel()
        await asyncio.wait_for(asyncio.gather(*held, stays), 60)
        assert gone.cancelled()
        assert yard.cluster_state.view.clusters["far"].waiting_s == 0.0

    asyncio.run(main())


def test_a_request_that_goes_as_all_instances_leave_breaks_nothing(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        hold, held = await yard.filled()
        gone = yard.asks("gone", urgent(1.0))
        await settled()
        for name in ("far-0", "far-1"):
            yard.cluster_state.instance(name).healthy = False
        gone.cancel()
        yard.admission.changed("far-0")
        hold.set()
        await asyncio.wait_for(asyncio.gather(*held), 60)
        assert gone.cancelled() and yard.admission.waiting("far") == 0

    asyncio.run(main())


def test_a_turn_that_comes_as_its_request_goes_is_passed_on(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        hold, held = await yard.filled()
        first, second = yard.asks("first", urgent(1.0)), yard.asks("second", urgent(2.0))
        await settled()
        hold.set()
        held[0].add_done_callback(lambda _task: first.cancel())
        await asyncio.gather(*held, first, second, return_exceptions=True)
        assert "second at far-0" in yard.log or "second at far-1" in yard.log
        third = yard.asks("third", urgent(3.0))
        await asyncio.wait_for(third, 60)

    asyncio.run(main())


@pytest.mark.parametrize("all_gone", [False, True])
def test_nobody_waits_for_an_instance_that_is_gone(
    deployment: Deployment, clock: FakeClock, all_gone: bool
) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        hold, held = await yard.filled()
        bound = yard.asks("bound", urgent(1.0, "far-0", bound=True))
        await settled()
        for name in ("far-0", "far-1") if all_gone else ("far-0",):
            yard.cluster_state.instance(name).healthy = False
            yard.admission.changed(name)
        if not all_gone:
            hold.set()
        await asyncio.wait_for(bound, 60)
        assert yard.log[-1] == ("bound at far-0" if all_gone else "bound at far-1")
        hold.set()
        await asyncio.gather(*held)

    asyncio.run(main())


def test_without_urgency_nobody_waits(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        plain = decision("far-0", "home-d0", prefill_tokens=5000)
        async with AsyncExitStack() as stack:
            for _ in range(3):
                assert await stack.enter_async_context(yard.admission.admit(plain, CHAINS)) is plain

    asyncio.run(main())


def test_it_waits_for_an_instance_whose_consumer_takes_its_kv(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock)
        yard.cluster_state.set_blocked([("far-1", "home-d0")])
        hold = asyncio.Event()
        tasks = [yard.asks(f"r{i}", urgent(float(i)), hold) for i in range(2)]
        await settled()
        assert yard.log == ["r0 at far-0"]  # although far-1 is free
        hold.set()
        await asyncio.gather(*tasks)
        assert yard.log[1:] == ["r1 at far-0"]

    asyncio.run(main())


def test_who_is_taken_away_begins_only_what_ends_before(deployment: Deployment, clock: FakeClock) -> None:
    """1000 tokens take a second. `far-0` has ten left; what waits for it alone may go to any other."""

    async def main() -> None:
        yard = Yard(deployment, clock)
        holds = [asyncio.Event() for _ in range(2)]
        tasks = [yard.asks(f"r{i}", urgent(0.0), hold) for i, hold in enumerate(holds)]
        await settled()
        tasks += [
            yard.asks("long", urgent(5.0, tokens=11_000, bound=True)),
            yard.asks("short", urgent(9.0, tokens=9000)),
        ]
        await settled()
        yard.cluster_state.view.leaves_s["far-0"] = clock.now_s + 10
        yard.admission.changed("far-0")
        holds[0].set()
        await settled()
        assert yard.log == ["r0 at far-0", "r1 at far-1"]
        holds[1].set()
        await settled()
        assert yard.log[2] == "long at far-1"
        await asyncio.gather(*tasks)
        assert len(yard.log) == 4

    asyncio.run(main())
