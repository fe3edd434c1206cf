"""From the senders' reports to the cluster_state's links, and from /metrics to its instances."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.deployment import AppliedDeployment, Deployment, Instance
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMonitor, period_s
from prfaas.serving.control.link_monitor import LinkBreaker, LinkMonitor
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.running_deployment import RunningDeployment

from .world import LINK, FakeClock, FakeHttp, FakeSender, arrived, decision, report


class Links:
    """Telemetry over fake senders."""

    def __init__(self, deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> None:
        self.senders: dict[str, FakeSender] = {}
        self.changes: list[str] = []
        self.clock = clock
        self.telemetry = LinkMonitor(
            RunningDeployment(deployment), self.sender_of, cluster_state, on_change=self.changes.append
        )

    def sender_of(self, instance: Instance, rank: int) -> FakeSender:
        return self.senders.setdefault(f"{instance.name}/{rank}", FakeSender())

    @property
    def far(self) -> list[FakeSender]:
        """The producers; the others are consumers."""
        return [sender for name, sender in self.senders.items() if name.startswith("far")]

    def arrive(self, total_bytes: int) -> None:
        """So much has come at the first consumer, from both producers together."""
        self.senders["home-p0/0"].arrivals = {
            "far-0/0": arrived(bytes_total=total_bytes - total_bytes // 2),
            "far-1/0": arrived(bytes_total=total_bytes // 2),
            "home-p1/0": arrived(bytes_total=999 * total_bytes),
            "stranger": arrived(bytes_total=999 * total_bytes),
        }

    async def round(self, seconds: float = 0.1) -> None:
        self.clock.now_s += seconds
        self.telemetry.ask()
        for _ in range(5):
            await asyncio.sleep(0)
        self.telemetry.conclude()


def move(monitor: LinkMonitor, deployment: Deployment) -> None:
    """Take another file on."""
    before, now = monitor._running.applied, AppliedDeployment(deployment, "")
    monitor._running.move(now)
    monitor.follow(before, now)


def test_both_ends_of_a_link_are_asked(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    assert set(Links(deployment, cluster_state, clock).senders) == {
        f"{instance.name}/0" for instance in deployment.instances
    }


def test_reports_are_summed_into_the_view(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for tick in range(30):
            for sender in links.far:
                sender.links = {"far->home": report(open_bytes=3_000_000), "elsewhere": report()}
            links.arrive(tick * 2_000_000)
            await links.round()
        link = cluster_state.view.links[LINK]
        assert link.egress_bits_per_s == pytest.approx(2 * 8e7)
        assert link.drained_s == pytest.approx(clock.now_s + 6_000_000 * 8 / 1e9)
        assert (link.seen_s, link.rtt_s, link.up) == (clock.now_s, 0.001, True)
        assert (link.condition, link.congestion) == ("clear", 0.0)
        await links.telemetry.close()

    asyncio.run(main())


def test_an_unheard_link_is_down_and_up_when_it_is_heard(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.far:
            sender.links = {"far->home": report()}
        await links.round()
        seen_s = clock.now_s
        for sender in links.far:
            sender.links = None
        link = cluster_state.view.links[LINK]
        for _ in range(24):
            await links.round()
            assert link.up
        for _ in range(70):
            await links.round()
        assert link.seen_s == seen_s
        assert (link.up, link.condition) == (False, "unheard")
        assert links.changes == ["far->home"]
        # Each rank is asked every two seconds while it is silent.
        assert 2 <= links.telemetry.failures <= 14
        links.senders["far-1/0"].links = {"far->home": report()}
        await links.round(3.0)
        assert (link.seen_s, link.up) == (clock.now_s, True)

    asyncio.run(main())


def test_engines_that_may_be_silent_for_long_leave_their_link_up(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    """Engines on shared cores starve for seconds: `control.silence_s` says for how long that may be, of links too."""

    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.far:
            sender.links = {"far->home": report()}
        await links.round()
        move(links.telemetry, replace(deployment, control=replace(deployment.control, silence_s=20.0)))
        for sender in links.far:
            sender.links = None
        link = cluster_state.view.links[LINK]
        for _ in range(190):
            await links.round()
            assert (link.up, link.condition) == (True, "clear")
        for _ in range(20):
            await links.round()
        assert (link.up, link.condition) == (False, "unheard")

    asyncio.run(main())


def test_bytes_that_come_are_a_word_too(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.far:
            sender.links = None
        for tick in range(100):
            links.arrive(tick * 100_000)
            await links.round()
        link = cluster_state.view.links[LINK]
        assert link.up
        assert link.seen_s == clock.now_s
        assert link.capacity_bits_per_s == 1e9

    asyncio.run(main())


def test_a_late_answer_keeps_no_question_back(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        answers: list[asyncio.Future[dict[str, object]]] = []

        async def telemetry() -> dict[str, object]:
            answers.append(asyncio.get_running_loop().create_future())
            return await answers[-1]

        links.senders["far-0/0"].telemetry = telemetry  # type: ignore[method-assign]
        for _ in range(10):
            await links.round()
        assert len(answers) == 10
        asked_s = clock.now_s
        answers[-1].set_result({"sender": {"links": {"far->home": report(queued_bytes=5)}}, "arrivals": {}})
        await links.round(0.5)
        # It may have been taken at any time since it was asked for.
        assert cluster_state.view.links[LINK].seen_s == asked_s
        assert links.telemetry.by_pair[LINK].meter.queued_bytes == 5
        await links.telemetry.close()

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


def full(**changes: object) -> dict[str, object]:
    return report(
        pace_bits_per_s=5e8, queued_bytes=50_000_000, open_bytes=50_000_000, filled_connections=4, **changes
    )


def test_capacity_falls_and_the_change_is_told_once(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        for sender in links.far:
            sender.links = {"far->home": full()}
        for tick in range(60):
            links.arrive(tick * 2_500_000)
            await links.round()
        link = cluster_state.view.links[LINK]
        assert link.capacity_bits_per_s == pytest.approx(2e8, rel=0.05)
        assert link.condition == "slow"
        assert link.pace_bits_per_s == pytest.approx(1.15 * 2e8, rel=0.05)
        assert links.changes == ["far->home"]
        await links.telemetry.close()

    asyncio.run(main())


def test_a_slow_link_without_work_is_probed_and_believed_again(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links, total, owed = Links(deployment, cluster_state, clock), 0, 0.0
        for sender in links.far:
            sender.links = {"far->home": full()}
        for _ in range(30):
            total += 1_250_000
            links.arrive(total)
            await links.round()
        assert cluster_state.view.links[LINK].capacity_bits_per_s == pytest.approx(1e8, rel=0.05)
        # Now it carries all of 1 Gbit/s again, and nobody has anything to send.
        assert not any(sender.probes for sender in links.far)
        first_s, believed_s = 0.0, 0.0
        for _ in range(150):
            owed += sum(nbytes for sender in links.far for _, nbytes in sender.probes)
            if owed and not first_s:
                first_s = clock.now_s
            for sender in links.far:
                sender.probes.clear()
                sender.links = {"far->home": report(filled_connections=4 if owed > 6e6 else 0)}
            come = min(owed, 12_500_000)
            owed -= come
            total += int(come)
            links.arrive(total)
            await links.round()
            if not believed_s and cluster_state.view.links[LINK].capacity_bits_per_s > 0.75e9:
                believed_s = clock.now_s
        assert first_s
        assert believed_s - first_s <= 5.0
        assert links.changes[1:] in (["far->home"], ["far->home"] * 2)
        await links.telemetry.close()

    asyncio.run(main())


def test_many_are_asked_more_rarely() -> None:
    assert period_s(0.1, 24, 250.0) == 0.1
    assert period_s(0.1, 100, 250.0) == 0.4


def test_metrics_reach_the_board(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    http, restarted, listeners = FakeHttp(), list[str](), Listeners()
    listeners.restarted.append(restarted.append)
    telemetry = EngineMonitor(RunningDeployment(deployment), http, cluster_state, listeners)
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


def test_a_new_price_is_not_for_what_was_carried_before(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    def priced(egress_per_gb: float) -> Deployment:
        links = tuple(replace(link, egress_per_gb=egress_per_gb) for link in deployment.links)
        return replace(deployment, links=links)

    monitor = Links(priced(0.5), cluster_state, clock).telemetry
    meter, cost = monitor.by_pair[LINK].meter, monitor.by_pair[LINK].cost
    meter.carried_bytes = 4 * 10**9
    assert cost.total(meter.carried_bytes) == 2.0
    move(monitor, priced(0.0))
    meter.carried_bytes = 5 * 10**9
    assert cost.total(meter.carried_bytes) == 2.0
    move(monitor, priced(1.0))
    meter.carried_bytes = 6 * 10**9
    assert cost.total(meter.carried_bytes) == 3.0


def test_a_deployment_without_links_is_watched_once_it_has_one(tmp_path: Path, clock: FakeClock) -> None:
    from .world import FILE, cluster_state_of, deployment_of

    far = FILE[FILE.index("  - name: far") : FILE.index("  - name: home")]
    link = FILE[FILE.index("links:") : FILE.index("routing:")]
    alone = deployment_of(tmp_path, text=FILE.replace(far, "").replace(link, ""))
    whole = deployment_of(tmp_path)

    async def check() -> None:
        links = Links(alone, cluster_state_of(whole, clock), clock)
        running = asyncio.create_task(links.telemetry.run())
        await asyncio.sleep(0.3)
        assert links.senders == {}
        move(links.telemetry, whole)
        for sender in links.senders.values():
            sender.links = {"far->home": report()}
        async with asyncio.timeout(20):
            while not all(sender.asked for sender in links.senders.values()):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(links.senders) == len(whole.instances)

    asyncio.run(check())


def test_three_failures_close_a_link_and_one_success_opens_it() -> None:
    faults = LinkBreaker()
    for _ in range(2):
        faults.failed(100.0)
    faults.succeeded()
    for _ in range(3):
        assert faults.is_up(101.0)
        faults.failed(101.0)
    faults.failed(101.5)
    assert not faults.is_up(110.9)
    assert faults.is_up(111.0)
    faults.failed(112.0)
    assert not faults.is_up(131.9)
    assert faults.is_up(132.0)
    faults.succeeded()
    faults.failed(133.0)
    assert faults.is_up(133.0)


def test_what_a_producer_has_sent_again(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock
) -> None:
    async def main() -> None:
        links = Links(deployment, cluster_state, clock)
        assert links.telemetry.resent_bytes("far-0", "home-p0") is None
        links.senders["far-0/0"].links = {"far->home": report(resent_bytes_total=5000)}
        links.senders["far-1/0"].links = {"far->home": report(resent_bytes_total=70)}
        await links.round()
        assert links.telemetry.resent_bytes("far-0", "home-p0") == 5000
        assert links.telemetry.resent_bytes("far-1", "home-p1") == 70
        # Who has left the deployment is on no link, and inside of a cluster there is none.
        assert links.telemetry.resent_bytes("far-0", "gone") is None
        assert links.telemetry.resent_bytes("gone", "home-p0") is None
        assert links.telemetry.resent_bytes("home-p0", "home-p1") is None
        await links.telemetry.close()

    asyncio.run(main())
