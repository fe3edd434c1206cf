"""From the senders' reports to the cluster_state's links, and from /metrics to its instances."""

import asyncio
from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMonitor, period_s
from prfaas.serving.control.link_monitor import LinkMonitor

from .world import LINK, FakeClock, FakeHttp, FakeSender, decision, report


class Links:
    """Telemetry over fake senders."""

    def __init__(self, deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> None:
        self.senders: dict[str, FakeSender] = {}
        self.changes: list[str] = []
        self.clock = clock
        self.telemetry = LinkMonitor(
            deployment, self.sender_of, cluster_state, clock=clock, on_change=self.changes.append
        )

    def sender_of(self, instance: Instance, rank: int) -> FakeSender:
        return self.senders.setdefault(f"{instance.name}/{rank}", FakeSender())

    async def round(self, seconds: float = 0.1) -> None:
        self.clock.now_s += seconds
        self.telemetry.ask()
        for _ in range(5):
            await asyncio.sleep(0)
        self.telemetry.conclude()


def test_only_clusters_with_a_link_are_asked(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    assert set(Links(deployment, cluster_state, clock).senders) == {"far-0/0", "far-1/0"}


def test_reports_are_summed_into_the_view(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for tick in range(30):
            for sender in links.senders.values():
                sender.links = {
                    "far->home": report(acked_bytes_total=tick * 1_000_000, open_bytes=3_000_000),
                    "elsewhere": report(),
                }
            await links.round()
        link = cluster_state.view.links[LINK]
        assert link.egress_bits_per_s == pytest.approx(2 * 8e7)
        assert link.drained_s == pytest.approx(clock.now_s + 6_000_000 * 8 / 1e9)
        assert (link.seen_s, link.rtt_s, link.up) == (clock.now_s, 0.001, True)
        await links.telemetry.close()
        assert all(sender.closed for sender in links.senders.values())

    asyncio.run(main())


def test_silence_ages_and_does_not_lie(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.senders.values():
            sender.links = {"far->home": report()}
        await links.round()
        seen_s = clock.now_s
        for sender in links.senders.values():
            sender.links = None
        for _ in range(100):
            await links.round()
        link = cluster_state.view.links[LINK]
        assert link.seen_s == seen_s
        assert link.up
        # Each rank is asked every two seconds while it is silent.
        assert 2 <= links.telemetry.failures <= 14
        links.senders["far-1/0"].links = {"far->home": report()}
        await links.round(3.0)
        assert link.seen_s == clock.now_s

    asyncio.run(main())


def test_garbage_is_no_report(deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        links.senders["far-0/0"].links = {"far->home": {"queued_bytes": "many"}}
        links.senders["far-1/0"].links = {"far->home": report()}
        await links.round()
        assert (links.telemetry.failures, cluster_state.view.links[LINK].seen_s) == (1, clock.now_s)

    asyncio.run(main())


def test_no_connection_takes_the_link_down_and_back(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.senders.values():
            sender.links = {"far->home": report(connections_up=0)}
        for _ in range(20):
            await links.round()
        assert not cluster_state.view.links[LINK].up
        assert links.changes == ["far->home"]
        links.senders["far-0/0"].links = {"far->home": report(connections_up=1)}
        await links.round()
        assert cluster_state.view.links[LINK].up
        assert links.changes == ["far->home"] * 2

    asyncio.run(main())


def test_failed_transfers_take_the_link_down(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.senders.values():
            sender.links = {"far->home": report()}
        for _ in range(3):
            links.telemetry.failed(LINK)
            links.telemetry.failed(("home", "home"))
        await links.round()
        assert not cluster_state.view.links[LINK].up
        await links.round(10.0)
        assert cluster_state.view.links[LINK].up

    asyncio.run(main())


def test_capacity_falls_and_the_change_is_told(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for tick in range(60):
            for sender in links.senders.values():
                sender.links = {
                    "far->home": report(
                        capacity_bits_per_s=5e8, queued_bytes=50_000_000, acked_bytes_total=tick * 1_250_000
                    )
                }
            await links.round()
        assert cluster_state.view.links[LINK].capacity_bits_per_s == pytest.approx(2e8, rel=0.05)
        assert links.changes == ["far->home"]

    asyncio.run(main())


def test_many_are_asked_more_rarely() -> None:
    assert period_s(0.1, 24, 250.0) == 0.1
    assert period_s(0.1, 100, 250.0) == 0.4


def test_metrics_reach_the_board(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    http, restarted = FakeHttp(), list[str]()
    telemetry = EngineMonitor(
        deployment,
        http,
        cluster_state,
        clock=clock,
        on_restart=restarted.append,
        on_reading=lambda *_: None,
    )
    instance = deployment.instance("far-0")

    def answer(running: int, started: int) -> bytes:
        return b"vllm:num_requests_running %d\nprocess_start_time_seconds %d\n" % (running, started)

    async def main() -> None:
        with cluster_state.prefilling(decision("far-0", "home-d0")):
            pass
        http.texts["far-0"] = answer(2, 5)
        for _ in range(2):
            clock.now_s += 1
            await telemetry.ask(instance)
        assert cluster_state.instance("far-0").seen_s == clock.now_s
        assert cluster_state.instance("far-0").busy_until_s > clock.now_s
        http.texts["far-0"] = answer(0, 9)
        await telemetry.ask(instance)
        http.texts["far-0"] = None
        clock.now_s += 1
        await telemetry.ask(instance)

    asyncio.run(main())
    assert restarted == ["far-0"]
    assert telemetry.failures == 1
    assert cluster_state.instance("far-0").seen_s == clock.now_s - 1


def test_a_deployment_without_links_is_not_watched(tmp_path: Path, clock: FakeClock) -> None:
    from .world import FILE, cluster_state_of, deployment_of

    far = FILE[FILE.index("  - name: far") : FILE.index("  - name: home")]
    link = FILE[FILE.index("links:") : FILE.index("routing:")]
    alone = deployment_of(tmp_path, text=FILE.replace(far, "").replace(link, ""))
    links = Links(alone, cluster_state_of(alone, clock), clock)
    asyncio.run(links.telemetry.run())
    assert links.senders == {}
