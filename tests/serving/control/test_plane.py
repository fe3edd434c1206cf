"""The whole plane: routes, accounts, states, metrics, and nothing left behind."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from prfaas.core.deployment import AppliedDeployment, Deployment, DeploymentError, Instance
from prfaas.core.prefix.digests import EventDigests
from prfaas.core.prefix.events import StoredBlocks
from prfaas.core.prefix.hashing import seed_of
from prfaas.core.scheduling.decision import Route
from prfaas.core.scheduling.policy import make_policy
from prfaas.core.scheduling.view import NoDecodeInstanceError
from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.control.engine_monitor import EngineMonitor
from prfaas.serving.control.engine_reading import read_exposition
from prfaas.serving.control.hot_prefixes import HotPrefixes
from prfaas.serving.control.kv_events import EventFeed
from prfaas.serving.control.plane import GaugeWriter, LivePlane
from prfaas.serving.control.planning_inputs import kv_model_of, policy_of
from prfaas.serving.control.role_allocation import RoleAllocation
from prfaas.serving.engines.event_relay import EventRelay

from .publisher import Publisher, stored
from .relay_port import RelayPort
from .world import (
    FILE,
    LINK,
    FakeClock,
    FakeHttp,
    FakeSender,
    deployment_of,
    kv_facts,
    plane_of,
    report,
    take_on,
    with_pools,
)

T = TypeVar("T")


class Planes:
    """Makes planes over fake engines, inside a running loop, and closes them."""

    def __init__(self, deployment: Deployment, clock: FakeClock) -> None:
        self.deployment, self.clock = deployment, clock
        self.http = FakeHttp()
        self.senders: dict[str, FakeSender] = {}
        self.registry = CollectorRegistry()

    def run(self, use: Callable[[LivePlane], T]) -> T:
        async def main() -> T:
            plane = self.made()
            try:
                return use(plane)
            finally:
                await plane.close()

        return asyncio.run(main())

    def made(self) -> LivePlane:
        return plane_of(
            self.deployment,
            self.registry,
            kv_model_of(self.deployment),
            clock=self.clock,
            http=self.http,
            sender_of=self.sender_of,
        )

    def sender_of(self, instance: Instance, _rank: int) -> FakeSender:
        sender = self.senders[instance.name] = FakeSender()
        sender.links = {"far->home": report()}
        return sender


@pytest.fixture
def planes(deployment: Deployment, clock: FakeClock) -> Planes:
    return Planes(deployment, clock)


def test_long_goes_far_and_short_stays(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        long = plane.router.route(10_000, plane.prefixes.chains(range(10_000), "", ""))
        short = plane.router.route(3000, plane.prefixes.chains(range(3000), "", ""))
        assert (long.route, plane.members.instance(long.prefill).cluster) == (Route.OFFLOAD, "far")
        assert (short.route, plane.members.instance(short.prefill).cluster) == (Route.LOCAL, "home")
        kept = plane.router.route(10_000, plane.prefixes.chains(range(10_000), "", ""), offload=False)
        assert kept.route is Route.LOCAL
        other = plane.router.route(
            10_000, plane.prefixes.chains(range(10_000), "", ""), avoid=(long.prefill, long.decode)
        )
        assert {other.prefill, other.decode}.isdisjoint({long.prefill, long.decode})
        unseen = plane.router.at_decode(77)
        assert (unseen.prefill, unseen.prefill_tokens) == (unseen.decode, 77)
        with pytest.raises(NoDecodeInstanceError):
            plane.router.at_decode(9, avoid=[i.name for i in plane.members.running.current.instances])
        with pytest.raises(DeploymentError):
            plane.members.instance("nobody")
        routes = plane.state()["routes"]
        assert (sum(routes["local"].values()), sum(routes["offload"].values())) == (2, 2)

    planes.run(use)


@pytest.mark.parametrize(
    ("per_gb", "route"), [(0.0, Route.OFFLOAD), (0.001, Route.OFFLOAD), (1e6, Route.LOCAL)]
)
def test_where_bytes_are_too_dear_long_stays(
    tmp_path: Path, clock: FakeClock, per_gb: float, route: Route
) -> None:
    """10,000 tokens take 1.8 s at home; at 1 per GPU-hour that is worth 0.0005."""
    prices = f"prices: {{synthetic: 1.0, egress_per_gb: {per_gb:.6f}}}"
    deployment = deployment_of(tmp_path, prices=f"slo: -> {prices}\nslo:")

    def use(plane: LivePlane) -> None:
        view = plane.cluster_state.view
        view.kv = kv_facts()
        assert view.clusters["home"].instance_price_per_s == pytest.approx(1 / 3600)
        assert view.links[LINK].egress_price_per_byte == pytest.approx(per_gb / 1e9)
        long = plane.router.route(10_000, plane.prefixes.chains(range(10_000), "", ""))
        assert (long.route, long.reason) == (route, "long" if route is Route.OFFLOAD else "egress-price")
        assert plane.router.route(3000, plane.prefixes.chains(range(3000), "", "")).reason == "short"

    Planes(deployment, clock).run(use)


def test_a_known_prefix_attracts_and_shortens(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        ids = range(10_000)
        hashes: list[int | bytes] = list(range(1, 37))
        full = StoredBlocks(
            hashes=hashes, block_tokens=256, token_ids=list(range(9216)), kind="full_attention"
        )
        state = StoredBlocks(
            hashes=[36], block_tokens=256, token_ids=list(range(9216)), group=1, kind="mamba"
        )
        plane.prefixes.apply("home-p1", EventDigests(seed_of(plane.members.key)).of([state, full]))
        decision = plane.router.route(10_000, plane.prefixes.chains(ids, "", ""))
        assert (decision.prefill, decision.uncached_tokens) == ("home-p1", 10_000 - 9216)
        assert plane.router.route(10_000, plane.prefixes.chains(ids, "tenant", "")).prefill != "home-p1"
        plane.health.suspect("home-p1", "unreachable", lost_cache=True)
        assert plane.router.route(10_000, plane.prefixes.chains(ids, "", "")).uncached_tokens == 10_000

    planes.run(use)


def test_what_cannot_be_split_goes_where_most_of_it_is_held(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        ids = [range(512), range(1000, 1600)]
        assert plane.router.at_decode(1112).decode == "home-d0"
        digests = EventDigests(seed_of(plane.members.key))
        for first, each in enumerate(ids, start=1):
            stored: Any = {"hashes": [first], "block_tokens": 256, "token_ids": list(each[:256])}
            state = StoredBlocks(**stored, group=1, kind="mamba")
            full = StoredBlocks(**stored, kind="full_attention")
            plane.prefixes.apply("home-d1", digests.of([state, full]))
        chains = [plane.prefixes.chains(each, "", "") for each in ids]
        decision = plane.router.at_decode(1112, chains, reason="batch")
        assert (decision.prefill, decision.decode, decision.reason) == ("home-d1", "home-d1", "batch")
        assert (decision.prefill_tokens, decision.reused_tokens, decision.uncached_tokens) == (600, 512, 600)
        anew = plane.router.at_decode(1112, chains, reuses=False)
        assert (anew.decode, anew.prefill_tokens, anew.reused_tokens) == ("home-d1", 1112, 0)
        assert anew.predicted_ttft_s > decision.predicted_ttft_s
        with plane.waits.decoding("home-d1", 600, 512, answers=50):
            assert plane.router.at_decode(1112, chains).decode == "home-d0"

    planes.run(use)


def test_suspects_get_nothing_and_dead_ones_lose_their_cache(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        chains = plane.prefixes.chains(range(10_000), "", "")
        for name in ("far-0", "far-1"):
            plane.health.suspect(name, "http-500")
        assert plane.router.route(10_000, chains).route is Route.LOCAL
        instances = plane.state()["clusters"]["far"]["instances"]
        assert [instance["healthy"] for instance in instances.values()] == [False, False]
        assert instances["far-0"]["suspicion"] == "http-500"

    planes.run(use)


def test_service_times_correct_the_curve(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        decision = plane.router.route(10_000, plane.prefixes.chains(range(10_000), "", ""))
        prefill_s = plane.cluster_state.view.clusters["far"].prefill_s
        before_s = prefill_s(10_000)
        for _ in range(40):
            with plane.prefilling(decision) as work:
                planes.clock.now_s += 4 * before_s
                work.measured()
            planes.clock.now_s += 1
        assert prefill_s(10_000) > 3 * before_s

    planes.run(use)


def test_transfers_that_fail_again_and_again_close_the_link(planes: Planes) -> None:
    async def main() -> None:
        plane = planes.made()
        chains = plane.prefixes.chains(range(10_000), "", "")
        for name in ("far-0", "far-1", "far-0"):
            decision = plane.router.route(10_000, chains, avoid=[i for i in ("far-0", "far-1") if i != name])
            assert decision.prefill == name
            with pytest.raises(RuntimeError), plane.prefilling(decision):
                plane.health.suspect(name, "transfer-failed")
                raise RuntimeError
            planes.clock.now_s += 4
            for _ in range(2):
                plane.loop_clock._on_time_s += 1
                await asyncio.gather(*plane.health.due())
        plane.links.conclude()
        assert not plane.cluster_state.view.links[LINK].up
        assert plane.router.route(10_000, chains).route is Route.LOCAL
        planes.clock.now_s += 10
        plane.links.ask()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        plane.links.conclude()
        assert plane.router.route(10_000, chains).route is Route.OFFLOAD
        await plane.close()

    asyncio.run(main())


def test_a_clients_fault_and_a_dead_engine_are_not_the_links(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        chains = plane.prefixes.chains(range(10_000), "", "")
        for _ in range(9):
            decision = plane.router.route(10_000, chains)
            with pytest.raises(RuntimeError), plane.prefilling(decision):
                raise RuntimeError
            with pytest.raises(RuntimeError), plane.prefilling(decision):
                plane.health.suspect(decision.prefill, "unreachable", lost_cache=True)
                raise RuntimeError
        assert plane.links.by_pair[LINK].breaker.is_up(planes.clock.now_s)

    planes.run(use)


def test_stale_links_are_not_used_and_come_back(planes: Planes) -> None:
    async def main() -> None:
        plane = planes.made()
        chains = plane.prefixes.chains(range(10_000), "", "")
        planes.clock.now_s += 31
        assert plane.router.route(10_000, chains).route is Route.LOCAL
        plane.links.ask()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        plane.links.conclude()
        assert plane.router.route(10_000, chains).route is Route.OFFLOAD
        await plane.close()

    asyncio.run(main())


def test_missing_prefixes_are_decided_to_be_copied(tmp_path: Path, clock: FakeClock) -> None:
    back = "links: -> links:\n  - {source: home, target: far, bandwidth: 1 Gbit/s}"
    planes = Planes(deployment_of(tmp_path, text=with_pools(), back=back), clock)

    def use(plane: LivePlane) -> None:
        hashes: list[int | bytes] = list(range(1, 9))
        full = StoredBlocks(
            hashes=hashes, block_tokens=256, token_ids=list(range(2048)), kind="full_attention"
        )
        state = StoredBlocks(hashes=[8], block_tokens=256, token_ids=list(range(2048)), group=1, kind="mamba")
        plane.prefixes.apply("home-pool", EventDigests(seed_of(plane.members.key)).of([state, full]))
        planes.clock.now_s += 20  # so that no cache crosses a link on demand
        for tail in range(6):
            decision = plane.router.route(
                12_000, plane.prefixes.chains([*range(2048), *([tail] * 9952)], "", "")
            )
            assert decision.route is Route.OFFLOAD
        for link in plane.cluster_state.view.links.values():
            link.seen_s = planes.clock.now_s
        plane.part(HotPrefixes).decide()
        (copy,) = plane.state()["rebalancing"]["recent"]
        assert (copy["source"], copy["target"], copy["tokens"]) == ("home", "far", 2048)

    planes.run(use)


def test_an_operator_drains_an_instance_and_lets_it_take_part_again(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        def told() -> Any:
            return plane.state()["clusters"]["home"]["instances"]["home-d0"]["drain"]

        view = plane.cluster_state.instance("home-d0")
        assert told() is None
        with plane.waits.decoding("home-d0", 0):
            plane.drains.drain("home-d0", wanted=True)
            assert (told(), view.takes_decodes) == ("draining", False)
            # A role change and a suspicion end without opening it again.
            plane.part(RoleAllocation).changes.begin("home-d0", "prefill", "")
        plane.part(RoleAllocation).changes.tick()
        plane.health.suspect("home-d0", "")
        assert (told(), view.takes_prefills) == ("drained", False)
        # Another gateway's requests are work too.
        plane.part(EngineMonitor).meters["home-d0"].add(read_exposition(b"vllm:num_requests_running 2"), 0.0)
        assert told() == "draining"
        for _ in range(20):
            assert plane.router.route(100, plane.prefixes.chains(range(100), "", "")).decode == "home-d1"
        plane.drains.drain("home-d1", wanted=True)
        plane.drains.drain("home-d0", wanted=False)
        view.healthy = True
        assert told() is None and view.takes_prefills

    planes.run(use)


def test_notice_is_told_and_ends_when_another_process_answers(planes: Planes) -> None:
    def use(plane: LivePlane) -> None:
        def told() -> tuple[Any, Any]:
            state = plane.state()["clusters"]["far"]["instances"]["far-0"]
            return state["leaves_in_s"], state["drain"]

        heard: list[tuple[str, float]] = []
        plane.listeners.noticed.append(lambda name, seconds: heard.append((name, seconds)))
        decision = plane.router.route(10_000, plane.prefixes.chains(range(10_000), "", ""))
        assert decision.prefill == "far-0" and told() == (None, None)
        with plane.prefilling(decision) as work:
            before_s = work.left_s
            assert before_s > 0.5
            plane.drains.give_notice("far-0", 0.5)
            assert heard == [("far-0", 0.5)] and told() == (0.5, None)
            assert (
                plane.router.route(10_000, plane.prefixes.chains(range(1, 10_001), "", "")).prefill == "far-1"
            )
            planes.clock.now_s += 2.0
            assert work.left_s == pytest.approx(before_s - 2.0)
        for started in (b"1", b"2"):
            assert told() == (0.0, None)
            text = b"process_start_time_seconds " + started
            if plane.part(EngineMonitor).meters["far-0"].add(read_exposition(text), 0.0):
                plane.listeners.restarted.tell("far-0")
        assert told() == (None, None) and plane.cluster_state.instance("far-0").takes_prefills

    planes.run(use)


def test_a_fixed_threshold_is_not_searched(tmp_path: Path, clock: FakeClock) -> None:
    planes = Planes(deployment_of(tmp_path, policy="policy: paper -> policy: static_threshold"), clock)

    async def main() -> None:
        plane = planes.made()
        for length in range(1000, 21_000, 100):
            plane.observe(length, length)
        await plane.thresholds.search()
        state = plane.state()
        assert state["clusters"]["home"]["threshold_tokens"] == 4000
        assert state["thresholds"]["last_search"] == {"result": "fixed by policy static_threshold"}
        await plane.close()

    asyncio.run(main())


def test_policies_by_name(tmp_path: Path, clock: FakeClock) -> None:
    for policy in ("tilted", "local_only", "offload_all", "static_threshold", "least_ttft", "round_robin"):
        planes = Planes(deployment_of(tmp_path, policy=f"policy: paper -> policy: {policy}"), clock)
        decision = planes.run(
            lambda plane: plane.router.route(20_000, plane.prefixes.chains(range(20_000), "", ""))
        )
        assert decision.route is (Route.LOCAL if policy == "local_only" else Route.OFFLOAD) or (
            policy == "round_robin"
        )


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        (
            "tilted, params: {fairness: -1}",
            "routing.params.fairness: policy tilted takes for fairness a number, at least 0 and at most 1",
        ),
        (
            "tilted, params: {fairnes: 1}",
            'routing.params.fairnes: policy tilted has no parameter "fairnes"; its parameters',
        ),
        (
            "no_such:Policy",
            'routing.policy: policy no_such:Policy: module "no_such" can\'t be imported: No module',
        ),
    ],
)
def test_a_policy_that_can_not_be_is_said_with_its_line(tmp_path: Path, routing: str, problem: str) -> None:
    deployment = deployment_of(tmp_path, policy=f"policy: paper -> policy: {routing}")
    with pytest.raises(DeploymentError) as caught:
        policy_of(deployment)
    assert caught.value.line is not None and problem in str(caught.value)


def test_parameters_of_the_file_reach_the_policy(tmp_path: Path) -> None:
    changed = deployment_of(tmp_path, policy="policy: paper -> policy: tilted, params: {fairness: 0.7}")
    assert policy_of(changed) == make_policy("tilted", {"fairness": 0.7})


@pytest.mark.parametrize("http", [None, "fake"])
def test_runs_and_ends_with_nothing_left(planes: Planes, http: str | None) -> None:
    threads = set(threading.enumerate())

    async def main() -> None:
        plane = plane_of(
            planes.deployment,
            planes.registry,
            kv_model_of(planes.deployment),
            http=planes.http if http else EngineHttp(),
            sender_of=planes.sender_of if http else None,
        )
        endpoint = planes.deployment.events_endpoint(plane.members.instance("home-d0"))
        relay = EventRelay("home-d0", endpoint, seed_of(plane.members.key))
        plane.members.kv_ports["home-d0"][0].request = RelayPort(relay.take).request  # type: ignore[method-assign]
        publisher = Publisher(endpoint)
        publisher.step(stored(range(512), [1, 2], block=256))
        relay.start()
        running = asyncio.create_task(plane.run())
        async with asyncio.timeout(120):
            while plane.prefixes.blocks("home-d0") < 2:
                publisher.serve()
                await asyncio.sleep(0.01)
            while http and plane.cluster_state.view.links[LINK].rtt_s != 0.001:
                await asyncio.sleep(0.01)
        plane.health.suspect("home-d0", "unreachable", lost_cache=True)
        assert plane.prefixes.blocks("home-d0") == 0
        async with asyncio.timeout(120):
            # It lives after all, and tells what it holds.
            while plane.prefixes.blocks("home-d0") < 2:
                publisher.serve()
                await asyncio.sleep(0.01)
        plane.observe(1000, 1000)
        state = json.loads(json.dumps(plane.state(), allow_nan=False))
        assert state["clusters"]["home"]["instances"]["home-d0"]["events"]["malformed"] == 0
        assert state["clusters"]["home"]["instances"]["home-d1"]["events"] is None
        assert state["clusters"]["home"]["instances"]["home-d0"]["role"] == "decode"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        publisher.close()
        relay.close()
        await plane.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert {thread for thread in threading.enumerate() if "asyncio" not in thread.name} <= threads
    text = generate_latest(planes.registry).decode()
    assert 'prfaas_control_kv_events_total{instance="home-d0"} 2.0' in text
    assert 'prfaas_control_threshold_tokens{cluster="home"} 4000.0' in text


def test_what_an_engine_says_of_itself_is_shown(planes: Planes) -> None:
    def use(plane: LivePlane) -> str:
        plane.part(EngineMonitor).meters["home-d0"].add(
            read_exposition(
                b"vllm:kv_cache_usage_perc 0.25\nvllm:num_requests_running 1\n"
                b"vllm:prefix_cache_queries_total 0\nvllm:prefix_cache_hits_total 0\n"
            ),
            planes.clock(),
        )
        plane.part(EngineMonitor).meters["home-d0"].add(
            read_exposition(
                b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 1\n"
                b"vllm:prefix_cache_queries_total 400\nvllm:prefix_cache_hits_total 100\n"
            ),
            planes.clock() + 1,
        )
        with plane.waits.decoding("home-d0", 0):
            plane.part(GaugeWriter).write()
        return generate_latest(planes.registry).decode()

    text = planes.run(use)
    for series in (
        'info{cluster="home",instance="home-d0",kind="pd"} 1.0',
        'kv_usage_ratio{instance="home-d0"} 0.5',
        'prefix_hit_ratio{instance="home-d0"} 0.25',
        'decoding_requests{instance="home-d0"} 1.0',
        'decode_slots{instance="home-d0"} 16.0',
        'queued_prefills{instance="far-0"} 0.0',
    ):
        assert f"prfaas_control_instance_{series}" in text
    # Of the others nothing is known yet, which is not 0.
    assert text.count("prfaas_control_instance_kv_usage_ratio{") == 1
    assert 'prfaas_control_link_configured_bits_per_second{link="far->home"} 1e+09' in text


def test_what_left_the_deployment_is_shown_no_more(planes: Planes, tmp_path: Path) -> None:
    only_home = FILE[: FILE.index("  - name: far")] + FILE[FILE.index("  - name: home") :]
    text = "".join(
        line for line in only_home.splitlines(keepends=True) if not line.startswith(("links:", "  - {source"))
    )
    less = deployment_of(
        tmp_path, text="".join(line for line in text.splitlines(keepends=True) if "home-d1" not in line)
    )

    def use(plane: LivePlane) -> str:
        for name in ("home-d0", "home-d1", "far-0"):
            plane.part(EventFeed)._drop(name, "gap")
        plane.part(GaugeWriter).write()
        before = generate_latest(planes.registry).decode()
        assert all(name in before for name in ('"home-d1"', '"far-0"', '"far"', '"far->home"'))
        take_on(plane, AppliedDeployment(less, ""))
        plane.part(GaugeWriter).write()
        # The last of its events come late.
        plane.part(EventFeed)._drop("home-d1", "gap")
        plane.part(GaugeWriter).write()
        return generate_latest(planes.registry).decode()

    text = planes.run(use)
    assert [name for name in ('"home-d1"', '"far-0"', '"far"', '"far->home"') if name in text] == []
    assert 'prfaas_control_holdings_dropped_total{instance="home-d0",reason="gap"} 1.0' in text
    assert 'prfaas_control_instance_healthy{instance="home-d0"} 1.0' in text


def test_what_roles_were_chosen_for_is_told(planes: Planes) -> None:
    async def main() -> dict[str, Any]:
        plane = planes.made()
        for _ in range(500):
            plane.thresholds.window.add(3000, planes.clock())
        try:
            await plane.part(RoleAllocation).evaluate()
            return plane.state()
        finally:
            await plane.close()

    told = json.loads(json.dumps(asyncio.run(main())["roles"]["last_evaluation"], allow_nan=False))
    assert told["result"] == "kept"
    assert told["traffic"] == {"uncached_tokens": 3000.0, "output_tokens": 512.0}


def test_labels_are_bounded(planes: Planes) -> None:
    """However many requests come, whatever reasons are given: no new series."""

    def use(plane: LivePlane) -> tuple[int, int]:
        def some(count: int) -> int:
            for number in range(count):
                decision = plane.router.route(
                    5000 + number, plane.prefixes.chains(range(5000), str(number), "")
                )
                with plane.prefilling(decision) as work:
                    work.measured()
                plane.health.suspect("home-p0", f"reason {number}", lost_cache=True)
            return len(generate_latest(planes.registry).splitlines())

        return some(3), some(60)

    few, many = planes.run(use)
    assert many - few <= 4
