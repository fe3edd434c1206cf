"""Several control planes over one store: one decides, all do it, and nothing flaps when the one goes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.serving.control.world import (
    FILE,
    LINK,
    FakeClock,
    FakeHttp,
    FakeSender,
    decision,
    deployment_of,
    grouped_deployment_of,
    plane_of,
    report,
    take_on,
)

from prfaas.core.deployment import AppliedDeployment, Deployment, FleetConfig
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.role_allocation import RoleAllocation
from prfaas.serving.fleet.control import default_name, join_fleet
from prfaas.serving.fleet.messages import Announcement, Decisions, RoleDecision, file_digest
from prfaas.serving.fleet.store import StoreError

from .memory_store import MemoryEtcd, MemoryStore

LIMIT_S = 30.0
PREFIX = "/prfaas/test/"
WITHOUT_D1 = "".join(line for line in FILE.splitlines(keepends=True) if "home-d1" not in line)


def smaller(folder: Path) -> Deployment:
    """The same deployment without home-d1, in a folder of its own."""
    own = folder / "less"
    own.mkdir()
    return deployment_of(own, text=WITHOUT_D1)


class Node:
    """A gateway's plane of which only the fleet's loops run."""

    def __init__(self, deployment: Deployment, etcd: MemoryEtcd, name: str, clock: FakeClock) -> None:
        self.store = MemoryStore(etcd)
        self.registry = CollectorRegistry()
        fleet = FleetConfig(("http://127.0.0.1:1",), name, lease_s=3, period_s=0.01)
        self.plane = plane_of(
            replace(deployment, fleet=fleet),
            self.registry,
            None,
            clock=clock,
            http=FakeHttp(),
            sender_of=lambda *_: self._sender(),
        )
        self.fleet = join_fleet(self.plane, self.registry, self.store)
        self.allocation, self.budget = self.plane.part(RoleAllocation), self.plane.part(LinkBudget)
        self.task: asyncio.Task[None] | None = None

    def _sender(self) -> FakeSender:
        sender = FakeSender()
        sender.links = {"far->home": report()}
        return sender

    @property
    def name(self) -> str:
        return self.fleet.member.name

    @property
    def threshold(self) -> float:
        return self.plane.cluster_state.view.threshold_tokens["home"]

    def roles(self) -> dict[str, tuple[bool, bool, bool]]:
        views = self.plane.cluster_state.view.clusters["home"].instances
        return {view.name: (view.prefills, view.decodes, view.draining) for view in views}

    async def join(self) -> "Node":
        self.task = asyncio.create_task(self.fleet.run())
        await until(lambda: self.fleet.member.is_connected)
        return self

    async def die(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"prfaas_control_fleet_{name}")


class Stage:
    def __init__(self, deployment: Deployment, clock: FakeClock) -> None:
        self.deployment, self.clock = deployment, clock
        self.etcd = MemoryEtcd(clock)
        self.nodes: list[Node] = []

    async def join(self, *names: str, deployment: Deployment | None = None) -> list[Node]:
        for name in names:
            node = Node(deployment or self.deployment, self.etcd, name, self.clock)
            self.nodes.append(node)
            await node.join()
        await until(lambda: all(len(n.fleet.member.members) >= len(self.alive) for n in self.alive))
        return self.nodes[-len(names) :]

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.task is not None]

    async def kill(self, node: Node) -> None:
        """The process is gone; then its lease ends."""
        await node.die()
        self.etcd.end(self.etcd.holders[f"{PREFIX}gateways/{node.name}"])

    def decisions(self) -> Decisions:
        return msgspec.json.decode(self.etcd.entries[PREFIX + "decisions"].value, type=Decisions)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not what():
            await asyncio.sleep(0.005)


async def told() -> None:
    """Time enough for everybody to have heard everything, some periods long."""
    await asyncio.sleep(0.15)


async def heard(stage: Stage, node: Node, key: str) -> None:
    """Until a gateway has carried out the newest word of a key, which is written."""
    revision = next(each.revision for each in reversed(stage.etcd.history) if each.key == PREFIX + key)
    fleet = node.fleet
    await until(lambda: msgspec.json.decode(fleet.announcement(), type=Announcement).applied >= revision)


def play(deployment: Deployment, clock: FakeClock, scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        stage = Stage(deployment, clock)
        try:
            await scene(stage)
        finally:
            for node in stage.nodes:
                await node.die()
                await node.plane.close()

    asyncio.run(main())


def test_what_one_has_open_all_count_until_it_dies(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b, c = await stage.join("a", "b", "c")
        with (
            a.plane.cluster_state.prefilling(decision("far-0", "home-d0", prefill_tokens=3000)),
            b.plane.cluster_state.decoding("home-d0", 0),
        ):
            await until(
                lambda: {n.plane.cluster_state.instance("home-d0").decoding for n in stage.nodes} == {2}
            )
            await until(
                lambda: {n.plane.cluster_state.residual_bytes(LINK) for n in stage.nodes} == {3_000_000}
            )
            assert c.plane.cluster_state.view.clusters["far"].instances[0].in_flight == 1
            assert c.plane.state()["fleet"]["members"]["a"] == {"requests": 2, "same_file": True, "out": []}
            await stage.kill(a)
            await until(lambda: c.plane.cluster_state.residual_bytes(LINK) == 0)
            assert c.plane.cluster_state.instance("home-d0").decoding == 1
            await until(lambda: b.plane.cluster_state.instance("far-0").in_flight == 0)

    play(deployment, clock, scene)


def test_all_observe_the_traffic_of_all(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        for tokens in range(100, 130):
            a.plane.observe(2 * tokens, tokens)
        b.plane.observe(700, 900)
        await until(
            lambda: a.plane.thresholds.window.count(clock()) == b.plane.thresholds.window.count(clock()) == 31
        )
        clock.now_s += 10.0
        await told()
        assert b.plane.thresholds.window.count(clock()) == 31
        (late,) = await stage.join("late")
        await told()
        assert late.plane.thresholds.window.count(clock()) == 0

    play(deployment, clock, scene)


def test_the_leader_decides_and_the_others_follow(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        await until(lambda: PREFIX + "decisions" in stage.etcd.entries)
        assert stage.decisions().thresholds == {"home": 4000.0}
        assert a.budget.paused is False
        assert b.budget.paused is True
        assert not a.allocation.paused and b.allocation.paused
        a.plane.cluster_state.view.threshold_tokens["home"] = 6500.5
        await until(lambda: b.threshold == 6500.5)
        assert b.plane.state()["thresholds"]["history"][-1]["reason"] == "decided by a"
        a.plane.cluster_state.view.threshold_tokens["home"] = float("inf")
        await until(lambda: b.threshold == float("inf"))
        # An operator sets it at the leader, and it stays set when another one leads.
        with pytest.raises(ValueError, match="at the gateway that leads"):
            b.plane.thresholds.hold("home", 1234)
        a.plane.thresholds.hold("home", 1234)
        await until(lambda: b.threshold == 1234.0 and b.plane.thresholds.held == {"home"})
        a.plane.thresholds.hold("home", None)
        await until(lambda: not b.plane.thresholds.held)
        # What a follower thinks is nobody's decision.
        b.plane.cluster_state.view.threshold_tokens["home"] = 1.0
        await told()
        assert stage.decisions().thresholds == {"home": 1234.0}
        written = [each.entry for each in stage.etcd.history if each.key == PREFIX + "decisions"]
        leaders = {
            msgspec.json.decode(each.value, type=Decisions).leader for each in written if each is not None
        }
        assert leaders == {"a"}

    play(deployment, clock, scene)


def test_a_new_leader_goes_on_from_what_is_written_and_waits(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def scene(stage: Stage) -> None:
        a, b, c = await stage.join("a", "b", "c")
        a.plane.cluster_state.view.threshold_tokens["home"] = 7000.0
        a.plane.cluster_state.set_roles("home-d1", ["prefill"])
        await until(lambda: b.threshold == c.threshold == 7000.0)
        await until(lambda: a.roles() == b.roles() == c.roles())
        roles, written = a.roles(), stage.etcd.entries[PREFIX + "decisions"].value
        searched: list[str] = []
        for node in (b, c):
            node.plane.thresholds.search = lambda node=node: _noted(searched, node.name)  # type: ignore
            node.task_of_thresholds = asyncio.create_task(node.plane.thresholds.run())  # type: ignore
        await stage.kill(a)
        await until(lambda: b.fleet.state(0.0)["fleet"]["leads"] and not b.allocation.paused)
        await until(lambda: c.fleet.state(0.0)["fleet"]["leader"] == "b")
        await until(lambda: stage.decisions().leader == "b")
        for node in (b, c):
            assert (node.roles(), node.threshold) == (roles, 7000.0)
        before = msgspec.json.decode(written, type=Decisions)
        assert stage.decisions() == msgspec.structs.replace(before, leader="b")
        # A search that is asked for now is not made; one that comes a period later is.
        b.plane.thresholds.ask("roles")
        await asyncio.sleep(1.2)
        assert searched == []
        clock.now_s += 30.0
        for node in (b, c):
            node.plane.thresholds.ask("roles")
        await until(lambda: searched)
        assert set(searched) == {"b"}
        for node in (b, c):
            node.task_of_thresholds.cancel()  # type: ignore
            await asyncio.gather(node.task_of_thresholds, return_exceptions=True)  # type: ignore

    play(deployment, clock, scene)


async def _noted(searched: list[str], name: str) -> None:
    searched.append(name)


def test_a_conversion_waits_for_the_work_of_all_and_for_all_to_know(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        await told()
        changes = a.allocation.changes
        with b.plane.cluster_state.decoding("home-d1", 0):
            assert changes.begin("home-d1", "prefill", "a test")
            # Nobody else knows yet.
            changes.tick()
            assert changes.is_busy
            await until(lambda: b.roles()["home-d1"] == (False, True, True))
            await told()
            changes.tick()
            assert changes.is_busy
        await until(lambda: not a.plane.cluster_state.instance("home-d1").in_flight)
        changes.tick()
        assert not changes.is_busy
        assert changes.history[-1].outcome == "done"
        await until(lambda: b.roles()["home-d1"] == (True, False, False))
        assert a.roles() == b.roles()

    play(deployment, clock, scene)


def test_a_conversion_whose_leader_dies_is_seen_through_by_the_next(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def scene(stage: Stage) -> None:
        a, b, c = await stage.join("a", "b", "c")
        with c.plane.cluster_state.decoding("home-d1", 0):
            assert a.allocation.changes.begin("home-d1", "prefill", "a test")
            await until(lambda: b.roles()["home-d1"][2] and c.roles()["home-d1"][2])
            await stage.kill(a)
            await until(lambda: b.allocation.changes.converting == ("home-d1", "prefill"))
            assert b.roles()["home-d1"] == c.roles()["home-d1"] == (False, True, True)
            assert not c.allocation.changes.is_busy
        await until(lambda: not b.plane.cluster_state.instance("home-d1").in_flight)
        await until(lambda: b.allocation.changes.knows_all())
        b.allocation.changes.tick()
        await until(lambda: c.roles()["home-d1"] == (True, False, False))
        assert b.allocation.changes.history[-1].reason == "begun by a"

    play(deployment, clock, scene)


def test_a_group_is_converted_as_one_by_whoever_leads(tmp_path: Path, clock: FakeClock) -> None:
    ranks = ("home-d0", "home-d1")

    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        await told()
        with b.plane.cluster_state.decoding("home-d1", 0):
            assert a.allocation.changes.begin("home-d0", "prefill", "a test")
            await until(lambda: all(b.roles()[name] == (False, True, True) for name in ranks))
            await stage.kill(a)
            await until(lambda: b.allocation.changes.converting == ("home-d0", "prefill"))
        await until(lambda: not b.plane.cluster_state.instance("home-d1").in_flight)
        await until(lambda: b.allocation.changes.knows_all())
        b.allocation.changes.tick()
        assert [b.roles()[name] for name in ranks] == [(True, False, False)] * 2

    play(grouped_deployment_of(tmp_path), clock, scene)


def test_who_leads_no_more_hands_its_conversion_over(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        await told()
        assert a.allocation.changes.begin("home-d1", "prefill", "a test")
        await until(lambda: b.roles()["home-d1"][2])
        a.store.cut = True
        stage.etcd.end(stage.etcd.holders[f"{PREFIX}gateways/a"])
        await until(lambda: b.allocation.changes.is_busy)
        b.allocation.changes.tick()
        await until(lambda: stage.decisions().roles["home-d1"] == RoleDecision(prefills=True))
        a.store.cut = False
        await until(
            lambda: a.fleet.state(0.0)["fleet"]["leader"] == "b" and a.fleet.state(0.0)["fleet"]["connected"]
        )
        await until(lambda: a.roles() == b.roles())
        assert not a.allocation.changes.is_busy
        assert a.allocation.changes.history[-1].outcome == "handed-over"

    play(deployment, clock, scene)


def test_a_drain_mark_holds_in_all_gateways_and_in_later_ones(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def scene(stage: Stage) -> None:
        def drain_of(node: Node, name: str = "home-d0") -> object:
            return node.plane.state()["clusters"]["home"]["instances"][name]["drain"]

        a, b = await stage.join("a", "b")
        b.plane.drains.drain("home-d0", wanted=True)
        # Not before all know it.
        assert drain_of(b) == "draining"
        await until(lambda: a.plane.cluster_state.instance("home-d0").closed)
        await until(lambda: drain_of(a) == drain_of(b) == "drained")
        (late,) = await stage.join("late")
        assert late.plane.cluster_state.instance("home-d0").closed
        with late.plane.cluster_state.decoding("home-d0", 0):
            await until(lambda: drain_of(a) == "draining")
        a.plane.drains.drain("home-d0", wanted=False)
        await until(lambda: not any(n.plane.cluster_state.instance("home-d0").closed for n in stage.nodes))
        assert drain_of(b) is None

    play(deployment, clock, scene)


def test_without_etcd_all_go_on_and_a_mark_is_written_later(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        a.plane.cluster_state.view.threshold_tokens["home"] = 7000.0
        await until(lambda: b.threshold == 7000.0)
        held = b.plane.cluster_state.decoding("home-d0", 0)
        held.__enter__()
        await until(lambda: a.plane.cluster_state.instance("home-d0").decoding == 1)
        stage.etcd.stop()
        await until(lambda: not a.fleet.member.is_connected and not b.fleet.member.is_connected)
        # Links are still told their paces by the one that led; nothing new is decided.
        assert (a.budget.paused, b.budget.paused) == (False, True)
        await until(lambda: a.allocation.paused)
        assert a.plane.cluster_state.instance("home-d0").decoding == 1
        a.plane.drains.drain("home-d1", wanted=True)
        state = a.plane.state()
        assert state["fleet"]["problem"] == "etcd does not answer: it is stopped"
        assert state["fleet"]["unwritten_drains"] == ["home-d1"]
        # The other gateway does not know it.
        assert state["clusters"]["home"]["instances"]["home-d1"]["drain"] == "draining"
        clock.now_s += 3.5
        # What b told is too old to count.
        await until(lambda: a.plane.cluster_state.instance("home-d0").decoding == 0)
        assert b.plane.cluster_state.instance("home-d0").decoding == 1
        assert (a.threshold, b.threshold) == (7000.0, 7000.0)
        stage.etcd.start()
        await until(lambda: a.plane.cluster_state.instance("home-d0").decoding == 1)
        await until(lambda: b.plane.cluster_state.instance("home-d1").closed)
        held.__exit__(None, None, None)
        await until(lambda: a.plane.state()["fleet"]["unwritten_drains"] == [])
        assert a.plane.state()["fleet"]["leads"]
        await until(lambda: not a.allocation.paused)
        assert a.metric("losses_total") == 1.0
        assert (a.metric("members"), a.metric("leads"), b.metric("leads")) == (2.0, 1.0, 0.0)
        assert b.metric("leader_changes_total") == 0.0

    play(deployment, clock, scene)


def test_what_an_earlier_fleet_wrote_counts_only_for_the_same_file(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        (a,) = await stage.join("a")
        a.plane.cluster_state.view.threshold_tokens["home"] = 7000.0
        a.plane.cluster_state.set_roles("home-d1", ["prefill"])
        await until(lambda: stage.decisions().thresholds == {"home": 7000.0})
        await stage.kill(a)
        (again,) = await stage.join("again")
        assert again.threshold == 7000.0
        assert again.roles()["home-d1"] == (True, False, False)
        await stage.kill(again)
        folder = tmp_path / "other"
        folder.mkdir()
        other = deployment_of(folder, rate="bandwidth: 1 Gbit/s -> bandwidth: 2 Gbit/s")
        (new,) = await stage.join("new", deployment=other)
        assert new.threshold == 4000.0
        assert new.roles()["home-d1"] == (False, True, False)
        # Beside one that is there, its decisions count, and the difference is told.
        (beside,) = await stage.join("beside")
        new.plane.cluster_state.view.threshold_tokens["home"] = 8000.0
        await until(lambda: beside.threshold == 8000.0)
        assert beside.plane.state()["fleet"]["members"]["new"]["same_file"] is False

    play(deployment, clock, scene)


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b'{"leader": "x", "file": "y", "thresholds": {"home": -1}}',
        b'{"leader": "x", "file": "y", "roles": {"home-d0": {"to_role": "king"}}}',
        pytest.param(b'{"x":' + b"[" * 100_000, id="nested"),
    ],
)
def test_what_nobody_of_us_wrote_changes_nothing(
    deployment: Deployment, clock: FakeClock, value: bytes
) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        before = (b.threshold, b.roles())
        stage.etcd.set(PREFIX + "decisions", value)
        stage.etcd.set(PREFIX + "gateways/zz", value)
        stage.etcd.set(PREFIX + "drained/nobody", b"")
        await until(lambda: b.metric("unreadable_values_total"))
        await until(lambda: "zz" in b.fleet.member.members)
        assert (b.threshold, b.roles()) == before
        assert b.plane.state()["fleet"]["members"]["zz"] == {"requests": 0, "same_file": False, "out": []}
        a.plane.cluster_state.view.threshold_tokens["home"] = 5000.0
        await until(lambda: b.threshold == 5000.0)

    play(deployment, clock, scene)


def test_roles_that_would_lose_an_instance_are_not_followed(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        await told()
        before = b.roles()
        # It would write its own word again at once.
        a.store.cut = True
        wrong = Decisions(
            "a",
            "",
            {"nowhere": 5.0},
            {"home-d0": RoleDecision(), "far-0": RoleDecision(decodes=True), "nobody": RoleDecision(True)},
        )
        stage.etcd.set(PREFIX + "decisions", msgspec.json.encode(wrong))
        await until(lambda: b.fleet._followed == wrong)
        assert b.roles() == before
        assert not b.plane.cluster_state.instance("far-0").decodes
        assert "nowhere" not in b.plane.cluster_state.view.threshold_tokens

    play(deployment, clock, scene)


def test_an_announcement_is_small_and_an_idle_gateway_has_no_news(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def scene(stage: Stage) -> None:
        (a,) = await stage.join("a")
        await told()
        fleet = a.fleet
        first = fleet.announcement()
        assert len(first) < 200
        for _ in range(1000):
            a.plane.observe(5000, 5000)
        assert len(fleet.announcement()) < 4000
        clock.now_s += 5.0
        assert len(fleet.announcement()) < 200
        assert fleet.announcement() == fleet.announcement()
        read = msgspec.json.decode(fleet.announcement(), type=Announcement)
        assert (read.file, read.share.lengths_total) == (file_digest(deployment), 1000)

    play(deployment, clock, scene)


def test_a_reload_at_one_has_the_others_look_at_their_files(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        a, b, c = await stage.join("a", "b", "c")
        folder = tmp_path / "new"
        folder.mkdir()
        new = AppliedDeployment(deployment_of(folder, rate="1 Gbit/s -> 2 Gbit/s"), "")
        looked: list[str] = []

        def look(node: Node, *, has_new_file: bool) -> None:
            async def reload() -> None:
                looked.append(node.name)
                if not has_new_file:
                    raise ValueError("a mistake")
                take_on(node.plane, new)

            node.fleet.reloads.reload = reload

        look(a, has_new_file=True)
        look(b, has_new_file=True)
        look(c, has_new_file=False)
        take_on(a.plane, new)
        await until(lambda: len(looked) == 2)
        await told()
        # Once each; who was told does not tell it on.
        assert sorted(looked) == ["b", "c"]
        members = a.plane.state()["fleet"]["members"]
        assert {name: each["same_file"] for name, each in members.items()} == {
            "a": True,
            "b": True,
            "c": False,
        }
        (late,) = await stage.join("late", deployment=new.said)
        look(late, has_new_file=True)
        await told()
        assert sorted(looked) == ["b", "c"]
        # What is told while etcd is away is told afterwards.
        stage.etcd.stop()
        await until(lambda: not a.fleet.member.is_connected)
        take_on(a.plane, AppliedDeployment(deployment, ""))
        stage.etcd.start()
        await until(lambda: {"b", "late"} <= set(looked[2:]))

    play(deployment, clock, scene)


def test_a_second_reload_that_is_told_during_the_first_is_looked_at_too(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        files = []
        for rate in ("2 Gbit/s", "3 Gbit/s"):
            (tmp_path / rate[0]).mkdir()
            changed = deployment_of(tmp_path / rate[0], change=f"1 Gbit/s -> {rate}")
            files.append(AppliedDeployment(changed, ""))
        is_reading, may_end = asyncio.Event(), asyncio.Event()
        on_disk = iter(files)

        async def reload() -> None:
            new = next(on_disk)
            is_reading.set()
            await may_end.wait()
            take_on(b.plane, new)

        b.fleet.reloads.reload = reload
        take_on(a.plane, files[0])
        await until(is_reading.is_set)
        take_on(a.plane, files[1])
        await told()
        may_end.set()
        await until(lambda: a.plane.state()["fleet"]["members"]["b"]["same_file"])

    play(deployment, clock, scene)


def test_a_setting_of_gateways_alone_is_told_too_and_again_where_etcd_fails(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        said = replace(deployment, gateway=replace(deployment.gateway, shadow=0.5))
        assert file_digest(said) == file_digest(deployment)
        looked = asyncio.Event()

        async def reload() -> None:
            looked.set()

        b.fleet.reloads.reload = reload
        put_while, failures = a.store.put_while, iter([True, True])

        async def put_badly(key: str, value: bytes | None, holder: str, created: int) -> int | None:
            if key.endswith("reloaded") and next(failures, False):
                raise StoreError("too slow")
            return await put_while(key, value, holder, created)

        a.store.put_while = put_badly  # type: ignore[method-assign]
        take_on(a.plane, AppliedDeployment(said, ""))
        await until(looked.is_set)
        # The same again is no news.
        looked.clear()
        take_on(a.plane, AppliedDeployment(said, ""))
        await told()
        assert not looked.is_set()

    play(deployment, clock, scene)


def test_who_joins_is_drained_where_a_mark_says_so_and_who_leaves_is_not_undrained(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        gone = next(each for each in deployment.instances if each.name == "home-d1")
        less = smaller(tmp_path)

        def is_closed(node: Node) -> bool:
            return node.plane.cluster_state.instance("home-d1").closed

        a.plane.drains.drain("home-d1", wanted=True)
        await until(lambda: is_closed(b))
        take_on(b.plane, AppliedDeployment(less, "", (gone,)))
        # The other gateway has not read its file yet, and takes the mark back, and sets it again.
        a.plane.drains.drain("home-d1", wanted=False)
        await until(lambda: PREFIX + "drained/home-d1" not in stage.etcd.entries)
        await heard(stage, b, "drained/home-d1")
        assert is_closed(b)
        take_on(b.plane, AppliedDeployment(less, ""))
        a.plane.drains.drain("home-d1", wanted=True)
        await until(lambda: PREFIX + "drained/home-d1" in stage.etcd.entries)
        await heard(stage, b, "drained/home-d1")
        take_on(b.plane, AppliedDeployment(deployment, ""))
        assert is_closed(b)
        a.plane.drains.drain("home-d1", wanted=False)
        await until(lambda: not is_closed(b))

    play(deployment, clock, scene)


def test_who_joins_has_the_role_that_the_leader_has_decided(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        (a,) = await stage.join("a")
        less = smaller(tmp_path)
        (b,) = await stage.join("b", deployment=less)
        a.plane.cluster_state.set_roles("home-d1", ["prefill"])
        await until(lambda: stage.decisions().roles["home-d1"].prefills)
        await heard(stage, b, "decisions")
        take_on(b.plane, AppliedDeployment(deployment, ""))
        assert b.roles()["home-d1"] == (True, False, False)

    play(deployment, clock, scene)


def test_an_etcd_that_has_lost_its_data_is_told_everything_again(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        looked = asyncio.Event()

        async def reload() -> None:
            looked.set()

        b.fleet.reloads.reload = reload
        take_on(
            a.plane,
            AppliedDeployment(replace(deployment, gateway=replace(deployment.gateway, shadow=0.5)), ""),
        )
        await until(looked.is_set)
        looked.clear()
        a.plane.drains.drain("home-d0", wanted=True)
        a.plane.cluster_state.view.threshold_tokens["home"] = 7000.0
        await until(lambda: b.threshold == 7000.0 and b.plane.cluster_state.instance("home-d0").closed)
        for _ in range(100):
            stage.etcd.set(PREFIX + "nothing", b"")
        stage.etcd.stop()
        await until(lambda: not any(node.fleet.member.is_connected for node in stage.nodes))
        stage.etcd.lose()
        stage.etcd.start()
        await until(lambda: {PREFIX + "decisions", PREFIX + "drained/home-d0"} <= stage.etcd.entries.keys())
        assert stage.decisions().thresholds["home"] == 7000.0
        await until(lambda: all(node.fleet.member.is_connected for node in stage.nodes))
        await told()
        assert all(node.plane.cluster_state.instance("home-d0").closed for node in stage.nodes)
        # Words with lower revisions than those before are heard.
        take_on(a.plane, AppliedDeployment(deployment, ""))
        await until(looked.is_set)
        a.plane.drains.drain("home-d0", wanted=False)
        await until(lambda: not b.plane.cluster_state.instance("home-d0").closed)
        (late,) = await stage.join("late")
        assert not late.plane.cluster_state.instance("home-d0").closed
        stage.nodes[0].plane.cluster_state.view.threshold_tokens["home"] = 6000.0
        stage.nodes[1].plane.cluster_state.view.threshold_tokens["home"] = 6000.0
        await until(lambda: late.threshold == 6000.0)

    play(deployment, clock, scene)


def test_the_digest_is_of_what_gateways_share(deployment: Deployment, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    same = deployment_of(folder)
    assert file_digest(same) == file_digest(deployment)
    assert default_name(deployment).endswith("-8000")
    for change in (
        "home-d1, roles: [decode] -> home-d1, roles: [prefill]",
        "1 Gbit/s -> 2 Gbit/s",
        "policy: paper -> policy: tilted",
        "allocation_period_s: 60 -> allocation_period_s: 61",
    ):
        assert file_digest(deployment_of(folder, change=change)) != file_digest(deployment)


def test_marks_that_come_and_go_leave_nothing(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await stage.join("a", "b")
        for number in range(100):
            stage.etcd.set(f"{PREFIX}drained/x{number}", b"")
            stage.etcd.set(f"{PREFIX}drained/x{number}", None)
        for wanted in (True, False):
            a.plane.drains.drain("home-d0", wanted=wanted)
            await until(lambda: not a.fleet.state(0.0)["fleet"]["unwritten_drains"])
        await heard(stage, a, "drained/home-d0")
        await heard(stage, b, "drained/home-d0")
        for node in (a, b):
            assert (node.fleet._marks._revisions, node.fleet._marks._marked) == ({}, set())
        # Its own word, and then what the watch tells late of the time before.
        marks = a.fleet._marks
        marks._note("home-d1", False, 1000)
        marks.hear("home-d1", True, 999)
        assert marks._marked == set()
        marks.hear("home-d1", False, 1000)
        assert marks._revisions == {}

    play(deployment, clock, scene)


class NotSearched(list[str]):
    def __contains__(self, _: object) -> bool:
        raise AssertionError("searched once for each threshold: 75,000 of both took minutes")


def test_a_decision_is_read_once(deployment: Deployment, clock: FakeClock) -> None:
    async def scene(stage: Stage) -> None:
        (a,) = await stage.join("a")
        told = Decisions("x", "y", thresholds={"home": 77.0, "nobody": 1.0}, held=NotSearched(["home"]))
        a.fleet._decisions.follow(told)
        assert a.threshold == 77.0

    play(deployment, clock, scene)
