"""A plane whose instances join and leave, and whose settings change, while it decides."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from prfaas.core.deployment import AppliedDeployment, Deployment, Instance
from prfaas.serving.control.deployed_view import DeployedView
from prfaas.serving.control.engine_monitor import EngineMonitor
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.plane import GaugeWriter
from prfaas.serving.control.planning_inputs import kv_model_of
from prfaas.serving.control.role_allocation import RoleAllocation

from .world import (
    FILE,
    LINK,
    FakeClock,
    FakeHttp,
    FakeSender,
    decision,
    deployment_of,
    kv_facts,
    plane_of,
    report,
    take_on,
)

NEW = "      - {name: home-d2, roles: [decode], host: 127.0.0.1, http_port: 21006, kv_port: 22006}\n"
WITH_NEW = FILE.replace("links:", f"{NEW}links:")
WITHOUT_D1 = "".join(line for line in FILE.splitlines(keepends=True) if "home-d1" not in line)
IDLE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nprocess_start_time_seconds 1\n"
BUSY = IDLE.replace(b"running 0", b"running 1")


WEST = """
  - name: west
    kind: prfaas
    hardware: synthetic
    profile: internal-1t-h200
    instances:
      - {name: west-0, roles: [prefill], host: 127.0.0.1, http_port: 21010, kv_port: 22010}
"""
WITH_WEST = FILE.replace("links:", f"{WEST}links:\n  - {{source: west, target: home, bandwidth: 2 Gbit/s}}")
AWAY = """
  - name: away
    kind: pd
    hardware: synthetic
    profile: internal-1t-h20
    instances:
      - {name: away-0, roles: [prefill, decode], host: 127.0.0.1, http_port: 21012, kv_port: 22012}
"""
WITH_AWAY = FILE.replace("links:", f"{AWAY}links:")


class Changing:
    """A plane with its membership, and what is applied to it."""

    def __init__(self, folder: Path, text: str = FILE) -> None:
        self._folder = folder
        self.clock = FakeClock()
        self.http = FakeHttp()
        self.senders: dict[str, FakeSender] = {}
        self.registry = CollectorRegistry()
        deployment = deployment_of(folder, text=text)
        self.plane = plane_of(
            deployment,
            self.registry,
            kv_model_of(deployment),
            clock=self.clock,
            http=self.http,
            sender_of=self._sender_of,
        )
        self.plane.cluster_state.view.kv = kv_facts()
        self.applied = AppliedDeployment(deployment, "0")

    def _sender_of(self, instance: Instance, _rank: int) -> FakeSender:
        sender = self.senders[instance.name] = FakeSender()
        sender.links = {"far->home": report()}
        sender.roster = {"digest": "", "told": True, "trouble": ""}
        return sender

    def take_on(self, text: str) -> Deployment:
        deployment = deployment_of(self._folder, text=text)
        self.applied = self.applied.taking_on(deployment, "1")
        take_on(self.plane, self.applied)
        return deployment

    def leave(self, name: str) -> None:
        self.applied = self.applied.without(name)
        take_on(self.plane, self.applied)

    async def probe_until(self, what: Callable[[], bool]) -> None:
        """Watch the health of all until something is so."""
        watching = [asyncio.create_task(loop.run()) for loop in (self.plane.loop_clock, self.plane.health)]
        try:
            async with asyncio.timeout(20):
                while not what():
                    await asyncio.sleep(0.01)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def decodes(self) -> set[str]:
        """Where ten short prompts go in turn, each while the others are open."""
        found: set[str] = set()
        with_work = []
        for _ in range(10):
            chosen = self.plane.router.route(100, self.plane.prefixes.chains(range(100), "", ""))
            scope = self.plane.waits.decoding(chosen.decode, 0)
            scope.__enter__()
            with_work.append(scope)
            found.add(chosen.decode)
        for scope in with_work:
            scope.__exit__(None, None, None)
        return found


@pytest.fixture
def in_change(tmp_path: Path) -> Callable[[Callable[[Changing], Awaitable[None]]], None]:
    def run(body: Callable[[Changing], Awaitable[None]]) -> None:
        async def main() -> None:
            changing = Changing(tmp_path)
            try:
                await body(changing)
            finally:
                await changing.plane.close()
            assert all(sender.closed for sender in changing.senders.values())

        asyncio.run(main())

    return run


InChange = Callable[[Callable[[Changing], Awaitable[None]]], None]


def state_of(changing: Changing, name: str) -> dict[str, Any]:
    for cluster in changing.plane.state()["clusters"].values():
        if name in cluster["instances"]:
            found: dict[str, Any] = cluster["instances"][name]
            return found
    raise KeyError(name)


def test_who_joins_gets_work_once_it_has_answered(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        assert changing.decodes() == {"home-d0", "home-d1"}
        changing.http.healthy["home-d2"] = False
        changing.take_on(WITH_NEW)
        assert state_of(changing, "home-d2")["suspicion"] == "it has joined and has not answered yet"
        assert changing.decodes() == {"home-d0", "home-d1"}
        await changing.probe_until(lambda: "home-d2" in changing.http.probed)
        assert changing.decodes() == {"home-d0", "home-d1"}
        changing.http.healthy["home-d2"] = True
        changing.clock.now_s += 10
        await changing.probe_until(lambda: state_of(changing, "home-d2")["healthy"])
        assert changing.decodes() == {"home-d0", "home-d1", "home-d2"}
        assert changing.plane.members.instance("home-d2").http_port == 21006
        # Every part knows it: counters, links, budget, rosters.
        await changing.plane.part(EngineMonitor).ask(changing.plane.members.instance("home-d2"))
        assert changing.plane.waits.answer_s("home-d2", 5) == 0.0
        changing.plane.links.ask()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert changing.senders["home-d2"].asked > 0
        changing.plane.part(RoleAllocation).last = {}
        await changing.plane.part(RoleAllocation).evaluate()
        await changing.plane.rank_stats.ask("home-d2")

    in_change(body)


def test_who_leaves_ends_its_work_first(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        changing.http.texts["home-d1"] = BUSY
        with plane.waits.decoding("home-d1", 0):
            changing.take_on(WITHOUT_D1)
            assert changing.decodes() == {"home-d0"}
            assert not changing.plane.drains.is_idle("home-d1")
            assert state_of(changing, "home-d1")["drain"] == "draining"
            assert plane.state()["applied"] == {"digest": "1", "leaving": ["home-d1"], "rosters_behind": []}
        changing.clock.now_s += 1
        await plane.part(EngineMonitor).ask(plane.members.instance("home-d1"))
        assert not changing.plane.drains.is_idle("home-d1"), "another gateway's request is open there"
        changing.http.texts["home-d1"] = IDLE
        changing.clock.now_s += 1
        await plane.part(EngineMonitor).ask(plane.members.instance("home-d1"))
        assert changing.plane.drains.is_idle("home-d1")
        sender = changing.senders["home-d1"]
        changing.leave("home-d1")
        await asyncio.sleep(0.01)
        assert sender.closed
        with pytest.raises(KeyError):
            state_of(changing, "home-d1")
        assert changing.decodes() == {"home-d0"}
        # Late answers and late suspicions of it do nothing.
        plane.health.suspect("home-d1", "late")
        await plane.part(EngineMonitor).ask(changing.applied.said.instance("home-d0"))
        plane.health.judge()
        plane.admission.changed("home-d0")

    in_change(body)


def test_who_leaves_is_kept_while_a_decision_for_it_is_not_carried_out(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.http.texts["home-d1"] = IDLE
        with (
            changing.plane.cluster_state.planned(decision("home-p0", "home-d1")),
            changing.plane.cluster_state.planned(decision("home-p0", "home-d1")),
        ):
            changing.take_on(WITHOUT_D1)
            changing.clock.now_s += 1
            await changing.plane.part(EngineMonitor).ask(changing.plane.members.instance("home-d1"))
            assert not changing.plane.drains.is_idle("home-d1")
        assert changing.plane.drains.is_idle("home-d1")
        assert not changing.plane.cluster_state.is_planned("home-p0")

    in_change(body)


def test_who_leaves_frozen_leaves_its_address_to_others(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane, told = changing.plane, list[tuple[int, bool]]()
        plane.listeners.frozen.append(
            lambda name, reason: told.append((plane.members.instance(name).http_port, reason is not None))
        )
        port = plane.members.instance("home-d1").http_port
        changing.http.texts["home-d1"] = BUSY
        for _ in range(2):
            await plane.part(EngineMonitor).ask(plane.members.instance("home-d1"))
            changing.clock.now_s += 1000
        plane.health.judge()
        assert told == [(port, True)]
        changing.take_on(WITHOUT_D1)
        assert changing.plane.drains.is_idle("home-d1")
        changing.leave("home-d1")
        assert told == [(port, True), (port, False)]

    in_change(body)


def test_an_instance_that_has_left_is_not_converted(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.take_on(WITHOUT_D1)
        changing.leave("home-d1")
        assert not changing.plane.part(RoleAllocation).changes.begin(
            "home-d1", "prefill", "it was there when this was planned"
        )

    in_change(body)


def test_an_old_reading_does_not_say_that_it_is_idle(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.http.texts["home-d1"] = IDLE
        await changing.plane.part(EngineMonitor).ask(changing.plane.members.instance("home-d1"))
        changing.clock.now_s += 1
        changing.take_on(WITHOUT_D1)
        assert not changing.plane.drains.is_idle("home-d1")

    in_change(body)


def test_a_prefill_that_was_granted_keeps_its_instance(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        chains = plane.prefixes.chains(range(1000), "", "")
        given = decision("home-p1", "home-d0")
        async with plane.admission.admit(
            structs.replace(given, urgency_s=1.0, is_bound=True), chains
        ) as admitted:
            assert admitted.prefill == "home-p1"
            text = "".join(line for line in FILE.splitlines(keepends=True) if "home-p1" not in line)
            changing.take_on(text)
            assert not changing.plane.drains.is_idle("home-p1")
        assert changing.plane.drains.is_idle("home-p1")

    in_change(body)


def test_who_does_not_answer_has_no_work_left(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.http.texts["home-d1"] = BUSY
        await changing.plane.part(EngineMonitor).ask(changing.plane.members.instance("home-d1"))
        changing.plane.health.suspect("home-d1", "gone", lost_cache=True)
        changing.take_on(WITHOUT_D1)
        assert changing.plane.drains.is_idle("home-d1")

    in_change(body)


def test_who_comes_back_while_it_leaves_takes_part_again(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.take_on(WITHOUT_D1)
        assert changing.decodes() == {"home-d0"}
        changing.take_on(FILE)
        assert changing.decodes() == {"home-d0", "home-d1"}
        assert changing.applied.leaving == ()

    in_change(body)


def test_an_operators_drain_outlives_a_reload(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.plane.drains.drain("home-d1", wanted=True)
        changing.take_on(WITH_NEW)
        assert changing.decodes() == {"home-d0"}

    in_change(body)


def test_the_policy_its_parameters_and_the_threshold_change(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane

        def reason(tokens: int) -> str:
            return plane.router.route(tokens, plane.prefixes.chains(range(tokens), "", "")).reason

        assert (reason(5000), reason(3000)) == ("long", "short")
        changing.take_on(FILE.replace("threshold_tokens: 4000", "threshold_tokens: 6000"))
        assert (reason(7000), reason(5000)) == ("long", "short")
        changing.take_on(FILE.replace("policy: paper, threshold_tokens: 4000", "policy: local_only"))
        assert plane.router.route(9000, plane.prefixes.chains(range(9000), "", "")).prefill.startswith("home")
        assert plane.state()["policy"] == "local_only"

    in_change(body)


def test_links_prices_and_periods_change(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        changing.take_on(
            FILE.replace("bandwidth: 1 Gbit/s", "bandwidth: 4 Gbit/s, egress_per_gb: 0.5")
            .replace("slo:", "prices: {synthetic: 2.0}\nslo:")
            .replace("allocation_period_s: 60", "allocation_period_s: 6, stale_after_s: 9, silence_s: 7")
        )
        link = plane.cluster_state.view.links[LINK]
        plane.links.conclude()
        assert link.capacity_bits_per_s == 4e9
        assert link.egress_price_per_byte == 0.5e-9
        assert plane.cluster_state.view.clusters["home"].instance_price_per_s == pytest.approx(2 / 3600)
        assert plane.cluster_state.view.stale_after_s == 9
        assert plane.state()["links"]["far->home"]["configured_bits_per_s"] == 4e9
        plane.part(LinkBudget).divide()
        changing.take_on(FILE)
        plane.links.conclude()
        assert link.capacity_bits_per_s == 1e9

    in_change(body)


def test_a_limit_of_the_file_counts_at_the_next_look(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        changing.http.texts["home-d1"] = BUSY
        for _ in range(2):
            await plane.part(EngineMonitor).ask(plane.members.instance("home-d1"))
            changing.clock.now_s += 10
        plane.health.judge()
        assert not plane.health.is_suspect("home-d1")
        changing.take_on(FILE.replace("window_s: 600", "window_s: 600, stall_s: 5"))
        plane.health.judge()
        assert not plane.cluster_state.instance("home-d1").healthy
        assert "for 5 s" in state_of(changing, "home-d1")["suspicion"]

    in_change(body)


def test_roles_of_the_file_count_at_once(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        assert plane.part(RoleAllocation).changes.begin("home-p1", "decode", "test")
        changing.take_on(
            FILE.replace("home-p1, roles: [prefill]", "home-p1, roles: [decode]").replace(
                "home-d1, roles: [decode]", "home-d1, roles: [prefill, decode]"
            )
        )
        assert state_of(changing, "home-p1")["role"] == "decode"
        assert not state_of(changing, "home-p1")["draining"]
        assert state_of(changing, "home-d1")["role"] == "prefill+decode"
        assert not plane.part(RoleAllocation).changes.is_busy
        plane.part(RoleAllocation).changes.tick()
        # The same file again changes nothing that the plane has decided itself.
        plane.cluster_state.set_roles("home-p0", ["decode"])
        changing.take_on(
            FILE.replace("home-p1, roles: [prefill]", "home-p1, roles: [decode]").replace(
                "home-d1, roles: [decode]", "home-d1, roles: [prefill, decode]"
            )
        )
        assert state_of(changing, "home-p0")["role"] == "decode"

    in_change(body)


def test_a_conversion_of_one_that_leaves_is_given_up(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        assert plane.part(RoleAllocation).changes.begin("home-d1", "prefill", "test")
        changing.take_on(WITHOUT_D1)
        assert not plane.part(RoleAllocation).changes.is_busy
        changing.leave("home-d1")
        plane.part(RoleAllocation).changes.tick()

    in_change(body)


def test_engines_are_told_their_rosters(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        changing.take_on(WITH_NEW)
        for _ in range(10):
            await asyncio.sleep(0)
        sender = changing.senders["far-0"]
        assert [set(roster.peers) for roster in sender.rosters] == [
            {"home-p0/0", "home-p1/0", "home-d0/0", "home-d1/0", "home-d2/0"}
        ] * 2
        assert changing.senders["home-d2"].rosters[0].producers == {
            *("far-0/0", "far-1/0", "home-p0/0", "home-p1/0", "home-d0/0", "home-d1/0")
        }

    in_change(body)


def test_metrics_forget_who_has_left(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        plane.part(GaugeWriter).write()
        plane.health.suspect("home-d1", "gone", lost_cache=True)
        assert b'instance="home-d1"' in generate_latest(changing.registry)
        changing.take_on(WITHOUT_D1)
        changing.leave("home-d1")
        plane.part(GaugeWriter).write()
        assert b"home-d1" not in generate_latest(changing.registry)

    in_change(body)


def test_a_policy_that_cannot_be_made_changes_nothing(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        from prfaas.core.deployment import DeploymentError

        with pytest.raises(DeploymentError, match="no_such"):
            changing.take_on(WITH_NEW.replace("policy: paper", "policy: no_such"))
        assert "home-d2" not in changing.plane.members.instances
        assert changing.plane.state()["policy"] == "paper"

    in_change(body)


async def look_at_links(changing: Changing) -> None:
    changing.plane.links.ask()
    for _ in range(5):
        await asyncio.sleep(0)
    changing.plane.links.conclude()


def test_a_cluster_and_its_link_are_used_once_the_engines_know_them(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        for name in ("far-0", "far-1"):
            plane.drains.drain(name, wanted=True)

        def prefill() -> str:
            return plane.router.route(20_000, plane.prefixes.chains(range(20_000), "", "")).prefill

        assert prefill().startswith("home-")
        changing.take_on(WITH_WEST)
        assert plane.state()["links"]["west->home"]["configured_bits_per_s"] == 2e9
        # Nobody has spoken of the link yet: the engines may not know it.
        await look_at_links(changing)
        assert not plane.state()["links"]["west->home"]["up"] and plane.state()["links"]["far->home"]["up"]
        changing.clock.now_s += 10
        await changing.probe_until(lambda: state_of(changing, "west-0")["healthy"])
        await look_at_links(changing)
        assert not plane.state()["links"]["west->home"]["up"] and prefill().startswith("home-")
        changing.senders["west-0"].links = {"west->home": report()}
        await look_at_links(changing)
        assert plane.state()["links"]["west->home"]["up"]
        assert prefill() == "west-0"
        # Every part knows it: admission, measured speeds, budget, breakers, metrics, the planner.
        chains = plane.prefixes.chains(range(20_000), "", "")
        chosen = plane.router.route(20_000, chains)
        async with plane.admission.admit(chosen, chains) as admitted:
            assert admitted.prefill == "west-0"
            with plane.prefilling(admitted) as prefilling:
                changing.clock.now_s += 5
                prefilling.measured()
        plane.part(LinkBudget).divide()
        assert plane.links.by_pair["west", "home"].breaker.is_up(changing.clock.now_s)
        await plane.part(RoleAllocation).evaluate()
        plane.part(GaugeWriter).write()
        assert 'prfaas_control_link_up{link="west->home"} 1.0' in generate_latest(changing.registry).decode()
        assert plane.waits.least() >= 0

    in_change(body)


def test_a_pd_cluster_that_is_added_has_a_threshold_and_answers(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane = changing.plane
        changing.take_on(WITH_AWAY)
        assert plane.cluster_state.view.threshold_tokens["away"] == 4000.0
        changing.clock.now_s += 10
        await changing.probe_until(lambda: state_of(changing, "away-0")["healthy"])
        for name in ("home-d0", "home-d1"):
            plane.drains.drain(name, wanted=True)
        assert changing.decodes() == {"away-0"}
        # A link to it comes later.
        link = "links:\n  - {source: far, target: away, bandwidth: 3 Gbit/s, encryption: false}"
        changing.take_on(WITH_AWAY.replace("links:", link))
        for name in ("far-0", "far-1"):
            changing.senders[name].links = {"far->home": report(), "far->away": report()}
        await look_at_links(changing)
        assert plane.state()["links"]["far->away"]["up"]
        chosen = plane.router.route(20_000, plane.prefixes.chains(range(20_000), "", ""))
        assert chosen.prefill.startswith("far-") and chosen.decode == "away-0"

    in_change(body)


def test_a_pd_cluster_begins_with_the_default_where_no_threshold_is_configured(tmp_path: Path) -> None:
    async def main() -> None:
        free = "routing: {policy: paper}"
        changing = Changing(tmp_path, FILE.replace("routing: {policy: paper, threshold_tokens: 4000}", free))
        changing.take_on(WITH_AWAY.replace("routing: {policy: paper, threshold_tokens: 4000}", free))
        thresholds = changing.plane.state()["thresholds"]["history"]
        assert (thresholds[-1]["cluster"], thresholds[-1]["reason"]) == ("away", "default")
        assert changing.plane.cluster_state.view.threshold_tokens["away"] == 8192.0
        await changing.plane.close()

    asyncio.run(main())


def test_nothing_is_left_of_clusters_and_links_that_not_all_could_follow(in_change: InChange) -> None:
    async def body(changing: Changing) -> None:
        plane, before = changing.plane, changing.applied
        names = set(plane.state()["clusters"])
        changing.take_on(WITH_WEST.replace("links:", f"{AWAY}links:"))
        assert set(plane.state()["clusters"]) == names | {"west", "away"}
        take_on(changing.plane, before)
        assert set(plane.state()["clusters"]) == names == set(plane.part(DeployedView)._curves)
        view = plane.cluster_state.view
        assert set(view.clusters) == names and set(view.links) == {LINK} == set(plane.links.by_pair)
        assert set(view.threshold_tokens) == {"home"}
        await look_at_links(changing)
        plane.part(LinkBudget).divide()
        assert changing.decodes() == {"home-d0", "home-d1"}
        # The same again is taken on as if for the first time.
        changing.applied = before
        changing.take_on(WITH_WEST)
        assert not plane.state()["links"]["west->home"]["up"]

    in_change(body)
