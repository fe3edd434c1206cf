"""Pools in the control plane: what they hold counts for their machines, and what they say of themselves is shown."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.core.pool.pool_model import BLOCK, Prompt

from prfaas.core.deployment import AppliedDeployment, Deployment
from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.announced import AnnouncedPages
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.core.prefix.digests import EventDigests
from prfaas.core.prefix.hashing import seed_of
from prfaas.core.prefix.index import NOTHING, GlobalIndex, PrefixHit
from prfaas.core.scheduling.decision import CacheTransfer
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.engine_reading import read_exposition
from prfaas.serving.control.plane import GaugeWriter
from prfaas.serving.control.planning_inputs import kv_model_of
from prfaas.serving.control.pool_monitor import PoolMonitor
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge
from prfaas.serving.running_deployment import RunningDeployment

from .world import (
    BYTES_PER_TOKEN,
    FakeClock,
    FakeHttp,
    FakeSender,
    cluster_state_of,
    decision,
    deployment_of,
    kv_facts,
    plane_of,
    with_pools,
)

SHAPE = PoolGeometry(
    "model", 1, (PageGroup(0, GroupKind.FULL, BLOCK, 0, 64), PageGroup(1, GroupKind.STATE, BLOCK, 0, 64))
)
LENGTH = 4096
PROMPT = Prompt(range(LENGTH), SHAPE)
FIGURES = {"store": {"epoch": 5, "used_bytes": 4096, "memory_pages": {"0": 3}}, "copies": {"lent_bytes": 7}}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return deployment_of(tmp_path, text=with_pools())


@pytest.fixture
def cluster_state(deployment: Deployment, clock: FakeClock) -> ClusterState:
    return cluster_state_of(deployment, clock)


@pytest.fixture
def holdings(cluster_state: ClusterState) -> PrefixKnowledge:
    index = GlobalIndex(seed=7, needs_states=True)
    return PrefixKnowledge(index, cluster_state)


class Told:
    """A pool's events, as its publisher makes them."""

    def __init__(self, holdings: PrefixKnowledge, name: str, seed: int | None = None) -> None:
        self.holdings, self.name = holdings, name
        self.pages = AnnouncedPages(SHAPE)
        self.digests = EventDigests(7 if seed is None else seed)
        holdings.apply(name, self.digests.of(self.pages.beginning()))

    def store(self, memory_tokens: int, ssd_tokens: int = 0, *, states: bool = True) -> None:
        for place, (page, identity) in enumerate(PROMPT.pages):
            end = (place // 2 + 1) * BLOCK
            if identity is not None or states:
                if end <= memory_tokens:
                    self.pages.stored(page, identity, "memory")
                if end <= ssd_tokens:
                    self.pages.stored(page, identity, "ssd")
        self.tell()

    def evict(self) -> None:
        for page, _ in reversed(PROMPT.pages):
            self.pages.removed(page, "memory")
        self.tell()

    def tell(self) -> None:
        for events in self.pages.take_events(100):
            self.holdings.apply(self.name, self.digests.of(events))


def test_both_depths_of_a_pool_are_known(holdings: PrefixKnowledge) -> None:
    pool = Told(holdings, "home-pool")
    chains = holdings.chains(range(LENGTH), "", "")
    assert not holdings.match(holdings.chains(PROMPT.token_ids, "", "")).pools
    pool.store(1024, 2048)
    chains = holdings.chains(PROMPT.token_ids, "", "")
    match = holdings.match(chains)
    hit = match.pools["home-pool"]
    assert (hit.every_tier, hit.in_memory) == (PrefixHit(2048, 2048), PrefixHit(1024, 1024))
    assert match.held == match.proven == {}
    assert (holdings.blocks("home-pool"), holdings.memory_blocks("home-pool")) == (256, 128)
    pool.evict()
    hit = holdings.match(chains).pools["home-pool"]
    assert (hit.every_tier, hit.in_memory) == (PrefixHit(2048, 2048), NOTHING)
    holdings.drop("home-pool", "disconnected")
    assert not holdings.match(chains).pools
    assert (holdings.blocks("home-pool"), holdings.memory_blocks("home-pool")) == (0, 0)


def test_every_instance_of_the_machine_holds_it(holdings: PrefixKnowledge) -> None:
    Told(holdings, "home-pool").store(2048)
    chains = holdings.chains(PROMPT.token_ids, "", "")
    request = holdings.request(holdings.match(chains), LENGTH, 3)
    assert request.ordinal == 3
    for name in ("home-p0", "home-p1", "home-d0", "home-d1"):
        assert request.held[name] == PrefixHit(2048, 2048)
        assert holdings.reusable_at(chains, name) == 2048
    assert holdings.reusable_at(chains, "far-0") == 0


def test_what_a_pool_holds_is_proven(holdings: PrefixKnowledge) -> None:
    """Its attention blocks spare bytes where no engine holds any; a copy between pools is bounded by no engine."""
    Told(holdings, "home-pool").store(2048, states=False)
    match = holdings.match(holdings.chains(PROMPT.token_ids, "", ""))
    moved = CacheTransfer("far-pool", 3072, 2048, 1024 * BYTES_PER_TOKEN, from_pool=True)
    what = decision("far-0", "home-d0", skip_tokens=2048, cache_transfer=moved)
    assert match.bound(what, LENGTH, lambda *_: kv_facts()) is what
    bounded = match.bound(decision("far-0", "home-d0", skip_tokens=3072), LENGTH, lambda *_: kv_facts())
    assert bounded.skip_tokens == 2048


class PoolPort(FakeSender):
    """A pool's KV port; `told` is what it says of itself."""

    def __init__(self, told: Any = FIGURES) -> None:
        super().__init__()
        self.told = told

    async def stats(self) -> dict[str, Any]:
        return await super().stats() | {"pool": self.told}


def test_figures_of_pools_are_taken_as_they_are(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    ports = {"far-pool": PoolPort(), "home-pool": PoolPort()}
    meters = {name: EngineMeter(60.0) for name in cluster_state.names}
    monitor = PoolMonitor(RunningDeployment(deployment), ports, cluster_state, meters)

    def asked(name: str) -> Any:
        asyncio.run(monitor.ask(name))
        return monitor.state(clock.now_s)["pools"][name]["daemon"]

    found = asked("home-pool")
    assert (found["epoch"], found["pages"]["memory"]) == (5, {"0": 3})
    assert found["refused_pages"] == found["evicted_pages"] == 0
    clock.now_s += 60.0
    for garbage in (None, [], {"store": 7}, {"store": {"epoch": "x", "used_bytes": float("nan")}}, 3):
        ports["home-pool"].told = garbage
        found = asked("home-pool")
        assert found["bytes"]["memory"] in (0, 4096)
        assert found["pages"]["memory"] in ({}, {"0": 3})
    ports["far-pool"].links = None
    assert asked("far-pool") is None
    assert monitor.failures >= 1


def test_the_bandwidth_that_engines_measure_is_believed(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    view = cluster_state.view.pools["home-pool"]
    monitor = PoolMonitor(RunningDeployment(deployment), {}, cluster_state, {})
    meter, instance = EngineMeter(60.0), deployment.instance("home-p0")

    def loaded(nbytes: float, seconds: float, at_s: float) -> float:
        text = f'vllm:prfaas_pool_bytes_loaded_total{{engine="0"}} {nbytes}\n'
        text += f'vllm:prfaas_pool_load_seconds_total{{engine="0"}} {seconds}\n'
        meter.add(read_exposition(text.encode()), at_s)
        monitor.learn(instance, meter)
        return view.memory_bits_per_s

    before = view.memory_bits_per_s
    assert loaded(0, 0, 0.0) == loaded(1000, 0.5, 1.0) == before
    assert loaded(2e9 + 1000, 1.5, 2.0) == pytest.approx(8 * 2e9 / 1.5, rel=1e-3)
    monitor.learn(deployment.instance("far-0"), EngineMeter(60.0))
    assert cluster_state.view.pools["far-pool"].memory_bits_per_s == before


def test_the_bandwidth_that_a_daemon_measures_of_its_ssd_is_believed(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    view = cluster_state.view.pools["home-pool"]
    port = PoolPort()
    monitor = PoolMonitor(RunningDeployment(deployment), {"home-pool": port}, cluster_state, {})

    def told(nbytes: float, seconds: float) -> float:
        port.told = {"store": {"ssd_promoted_bytes": nbytes, "ssd_promoting_s": seconds}}
        asyncio.run(monitor.ask("home-pool"))
        return view.ssd_bits_per_s

    before = view.ssd_bits_per_s
    # What was read before the gateway looked tells nothing, nor do a few pages.
    assert told(5e9, 2.0) == told(5e9 + 1e6, 2.5) == before
    assert told(5e9 + 2e9, 4.0) == pytest.approx(8 * 2e9 / 2.0)
    # The daemon was started again.
    assert told(0, 0.0) == pytest.approx(8e9)
    assert told(1e9, 0.5) == pytest.approx(16e9)


def test_the_plane_routes_by_pools_and_shows_them(
    deployment: Deployment, clock: FakeClock, tmp_path: Path
) -> None:
    registry = CollectorRegistry()
    ports = {"far-pool": PoolPort(), "home-pool": PoolPort()}

    async def main() -> str:
        plane = plane_of(
            deployment,
            registry,
            kv_model_of(deployment),
            clock=clock,
            http=FakeHttp(),
            sender_of=lambda *_: FakeSender(),
            pool_ports=ports,  # type: ignore[arg-type]
        )
        try:
            without = plane.router.route(LENGTH, plane.prefixes.chains(PROMPT.token_ids, "", ""))
            assert without.pools is None and without.hit is None
            Told(plane.prefixes, "home-pool", seed_of(plane.members.key)).store(2048)
            decided = plane.router.route(LENGTH, plane.prefixes.chains(PROMPT.token_ids, "", ""))
            assert decided.pools is not None and decided.pools.keys() == {"home-pool"}
            assert decided.uncached_tokens <= LENGTH - 2048 < without.uncached_tokens
            await plane.part(PoolMonitor).ask("home-pool")
            plane.part(GaugeWriter).write()
            state = json.loads(json.dumps(plane.state()))["pools"]
            assert state["home-pool"]["up"] and state["home-pool"]["blocks"] == 256
            assert state["home-pool"]["daemon"]["lent_bytes"] == 7
            assert not state["far-pool"]["up"] and state["far-pool"]["daemon"] is None
            clock.now_s += 60.0
            assert not plane.state()["pools"]["home-pool"]["up"]
            told = generate_latest(registry).decode()
            plane.members.running.move(AppliedDeployment(deployment_of(tmp_path), ""))
            plane.part(GaugeWriter).write()
            assert '"home-pool"' not in generate_latest(registry).decode()
            return told
        finally:
            await plane.close()

    told = asyncio.run(main())
    assert all(port.closed for port in ports.values())
    for line in (
        'prfaas_control_pool_up{pool="home-pool"} 1.0',
        'prfaas_control_pool_up{pool="far-pool"} 0.0',
        'prfaas_control_pool_pages{group="0",pool="home-pool",tier="memory"} 3.0',
        'prfaas_control_pool_moved_bytes{pool="home-pool",what="lent"} 7.0',
        'prfaas_control_pool_blocks{pool="home-pool",tier="memory"} 256.0',
    ):
        assert line in told
