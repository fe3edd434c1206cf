"""Thresholds and roles follow what is observed: at the start, with too little, when the mix or a link changes."""

import asyncio
import math
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment import Deployment
from prfaas.core.planner.two_clusters import best_threshold
from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.threshold import ThresholdOptimiser
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.engine_reading import read_exposition
from prfaas.serving.control.planning_inputs import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_STEP_S,
    LiveFacts,
    decode_slots,
    kv_model_of,
    prefill_curves,
)
from prfaas.serving.control.role_allocation import RoleAllocation, RoleChanges, stage_utilisation
from prfaas.serving.control.thresholds import DEFAULT_TOKENS, Thresholds
from prfaas.serving.running_deployment import RunningDeployment

from .world import LINK, FakeClock, cluster_state_of, decision, deployment_of


class Slow:
    """The slow loops of a deployment, by hand."""

    def __init__(self, deployment: Deployment, clock: FakeClock) -> None:
        self.deployment, self.clock = deployment, clock
        self.curves = prefill_curves(deployment)
        self.cluster_state = cluster_state_of(deployment, clock)
        self.engines = {name: EngineMeter(60.0) for name in self.cluster_state.names}
        self.window = LengthWindow(600.0)
        running = RunningDeployment(deployment)
        self.facts = LiveFacts(
            running, kv_model_of(deployment), self.cluster_state, self.curves, self.engines
        )
        self.changes: list[tuple[str, str]] = []
        self.thresholds = Thresholds(
            running,
            self.facts,
            self.window,
            clock=clock,
            on_change=lambda cluster, reason: self.changes.append((cluster, reason)),
        )
        self.roles = RoleChanges(self.cluster_state, on_end=lambda _: None)
        self.usage = stage_utilisation(self.cluster_state, self.engines, lambda _cluster: 0)
        self.allocating = RoleAllocation(
            running,
            self.facts,
            self.usage,
            self.window,
            self.roles,
        )

    @property
    def threshold(self) -> float:
        return self.cluster_state.view.threshold_tokens["home"]

    def observe(self, *, mean_log: float, count: int = 2000, seed: int = 0) -> None:
        chance = random.Random(seed)
        for _ in range(count):
            self.window.add(min(max(chance.lognormvariate(mean_log, 1.0), 128.0), 32_000.0), self.clock())

    def search(self) -> None:
        asyncio.run(self.thresholds.search())


def test_the_first_threshold_is_the_configured_one(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    assert slow.threshold == 4000.0
    assert slow.thresholds.state(clock.now_s)["thresholds"]["history"][0]["reason"] == "configured"


def test_without_one_it_is_planned_from_profiles(tmp_path: Path, clock: FakeClock) -> None:
    slow = Slow(deployment_of(tmp_path, no=", threshold_tokens: 4000 -> "), clock)
    assert slow.thresholds.state(clock.now_s)["thresholds"]["history"][0]["reason"] == "planned from profiles"
    assert 128 < slow.threshold < 32_768


def test_without_profiles_it_is_a_default(tmp_path: Path, clock: FakeClock) -> None:
    slow = Slow(
        deployment_of(
            tmp_path,
            no=", threshold_tokens: 4000 -> ",
            real="hardware: synthetic -> hardware: h20",
            far="    profile: internal-1t-h200\n -> ",
            home="    profile: internal-1t-h20\n -> ",
        ),
        clock,
    )
    assert slow.threshold == DEFAULT_TOKENS == 32_768 // 4


def test_too_few_requests_move_nothing(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0, count=10)
    slow.search()
    assert (slow.threshold, slow.thresholds.last["result"]) == (4000.0, "too few requests")


def test_it_moves_to_the_planners_optimum_and_stays(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0)
    slow.search()
    lengths = slow.window.lengths(clock.now_s)
    assert lengths is not None
    best = best_threshold(slow.facts.problem(lengths), 2)
    assert slow.threshold == pytest.approx(best.threshold_tokens, rel=0.05)
    assert slow.changes == [("home", "periodic")]
    before = slow.threshold
    slow.search()
    slow.observe(mean_log=9.0, count=500, seed=1)
    slow.search()
    assert slow.threshold == before
    assert slow.thresholds.last["result"] == "kept"


def test_what_was_searched_while_another_gateway_took_over_is_dropped(
    deployment: Deployment, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0)
    propose = ThresholdOptimiser.propose

    def late(*args: Any, **options: Any) -> Any:
        slow.thresholds.pause(True)
        return propose(*args, **options)

    monkeypatch.setattr(ThresholdOptimiser, "propose", late)
    slow.search()
    assert (slow.threshold, slow.thresholds.last["result"]) == (4000.0, "another gateway decides now")


def test_a_link_that_goes_down_ends_offloading_and_comes_back(
    deployment: Deployment, clock: FakeClock
) -> None:
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0)
    slow.search()
    before = slow.threshold
    slow.cluster_state.view.links[LINK].up = False
    slow.thresholds.ask("link")
    slow.search()
    assert math.isinf(slow.threshold)
    assert slow.thresholds.state(clock.now_s)["thresholds"]["history"][-1]["tokens"] is None
    slow.cluster_state.view.links[LINK].up = True
    slow.thresholds.ask("link")
    slow.search()
    assert slow.threshold == pytest.approx(before)
    assert slow.changes[-1] == ("home", "link")


def test_more_prefill_instances_raise_it(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0)
    slow.search()
    before = slow.threshold
    slow.cluster_state.set_roles("home-d1", ["prefill"])
    slow.thresholds.ask("roles")
    slow.search()
    assert slow.threshold > before


def test_the_threshold_loop_wakes_up_when_asked(
    deployment: Deployment, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.serving.control.thresholds.SETTLE_S", 0.0)
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0)

    async def main() -> None:
        loop = asyncio.create_task(slow.thresholds.run())
        await asyncio.sleep(0)
        slow.thresholds.ask("link")
        async with asyncio.timeout(120):
            while not slow.changes:
                await asyncio.sleep(0.01)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    asyncio.run(main())


def test_no_healthy_pd_instance_is_no_problem_to_plan(deployment: Deployment, clock: FakeClock) -> None:
    slow = Slow(deployment, clock)
    slow.observe(mean_log=9.0)
    for instance in slow.cluster_state.view.clusters["home"].instances:
        instance.healthy = False
    slow.search()
    asyncio.run(slow.allocating.evaluate())
    assert "no PD cluster" in slow.thresholds.last["result"]
    assert "no PD cluster" in slow.allocating.last["result"]


def test_roles_are_converted_when_the_measurements_agree(tmp_path: Path, clock: FakeClock) -> None:
    """Long prompts, short answers, idle decode: a decode instance goes to prefill, once, and drains first."""
    slow = Slow(deployment_of(tmp_path), clock)
    slow.observe(mean_log=9.5)
    for answers in (0, 100):
        text = b"vllm:request_generation_tokens_sum %d\nvllm:request_generation_tokens_count %d\n" % (
            answers * 64,
            answers,
        )
        slow.engines["home-d0"].add(read_exposition(text), clock())
    assert slow.facts.output_tokens == 64
    for _ in range(3):
        with (
            slow.cluster_state.prefilling(_local("home-p0")),
            slow.cluster_state.prefilling(_local("home-p1")),
        ):
            clock.now_s += 60
        asyncio.run(slow.allocating.evaluate())
    (change,) = slow.roles.history
    assert slow.allocating.last["reason"] == change.reason == "prefill is the limit: 2 prefill, best 3"
    assert (change.to_role, change.instance, change.outcome) == ("prefill", "home-d0", "draining")
    assert slow.cluster_state.instance("home-d0").draining
    # Planned for with the role that it is going to have.
    assert slow.facts.prefill_instances("home") == 3
    asyncio.run(slow.allocating.evaluate())
    assert slow.allocating.last["result"] == "converting"
    slow.roles.tick()
    assert slow.facts.prefill_instances("home") == 3


def test_allocation_can_be_switched_off(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.serving.control.role_allocation.DRAIN_CHECK_S", 0.001)
    evaluated = []
    for text in ("window_s: 600 -> window_s: 600, allocation: false", "window_s: 600 -> window_s: 599"):
        slow = Slow(deployment_of(tmp_path, change=text), clock)

        async def main(slow: Slow = slow) -> None:
            loop = asyncio.create_task(slow.allocating.run())
            for _ in range(20):
                await asyncio.sleep(0.002)
                clock.now_s += 30
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

        asyncio.run(main())
        evaluated.append(bool(slow.allocating.last))
    assert evaluated == [False, True]


def test_decode_facts(deployment: Deployment, tmp_path: Path, clock: FakeClock) -> None:
    home = deployment.cluster("home")
    assert decode_slots(deployment, home) == 16
    assert Slow(deployment, clock).facts.decode(home).step_s == pytest.approx(0.025, rel=0.3)
    plain = Slow(
        deployment_of(
            tmp_path,
            real="hardware: synthetic -> hardware: h20",
            far="    profile: internal-1t-h200\n -> ",
            home="    profile: internal-1t-h20\n -> ",
        ),
        clock,
    )
    assert plain.facts.decode(plain.deployment.cluster("home")).step_s == DEFAULT_STEP_S
    assert plain.facts.output_tokens == DEFAULT_OUTPUT_TOKENS


def _local(prefill: str) -> Decision:
    return decision(prefill, "home-d1", prefill_tokens=9000)


@pytest.mark.parametrize(("decoding", "waits"), [(3, (5.0, 0.0)), (18, (3.0, 2.0)), (40, (0.0, 5.0))])
def test_who_waits_for_a_slot_waits_for_no_prefill(
    deployment: Deployment, clock: FakeClock, decoding: int, waits: tuple[float, float]
) -> None:
    """Five wait in the engine of an instance that does both, with sixteen slots; nobody is counted twice."""
    slow = Slow(deployment, clock)
    for name in ("home-p0", "home-p1", "home-d0"):
        slow.cluster_state.instance(name).healthy = False
    slow.cluster_state.set_roles("home-d1", ["prefill", "decode"])
    slow.engines["home-d1"].add(read_exposition(b"vllm:num_requests_waiting 5\n"), clock())
    with ExitStack() as open_there:
        for _ in range(decoding):
            open_there.enter_context(slow.cluster_state.decoding("home-d1", 0))
        (load,) = slow.usage.loads(clock() + 1.0)
    assert (load.prefill.waiting, load.decode.waiting) == waits
