"""Whatever an engine or a pool reports: it is in range or refused, and no loop of the control plane ends by it."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from prfaas.core.deployment import Deployment
from prfaas.core.link.samples import ArrivalSample, SenderSample
from prfaas.serving.console.history import StateHistory
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMonitor
from prfaas.serving.control.engine_reading import SERIES, read_exposition
from prfaas.serving.control.link_monitor import LinkMonitor
from prfaas.serving.control.part import Part
from prfaas.serving.control.plane import GaugeWriter, LivePlane
from prfaas.serving.control.pool_monitor import PoolMonitor
from prfaas.serving.running_deployment import RunningDeployment

from .world import LINK, FakeClock, FakeHttp, FakeSender, arrived, deployment_of, plane_of, report, with_pools

ABSURD: list[Any] = [math.nan, math.inf, 1e30, 10**400, 2**70, -1, "1", True, [1], None, {}]
values = st.one_of(
    st.sampled_from(ABSURD),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("field", sorted(report()))
def test_an_absurd_report_of_a_sender_is_refused(field: str, value: Any) -> None:
    if field == "pace_bits_per_s" and value in (None, [], {}):
        assert SenderSample.of_report(report(pace_bits_per_s=value), 1.0).pace_bits_per_s is None
        return
    if field not in SenderSample.__dataclass_fields__:
        return
    with pytest.raises(ValueError):
        SenderSample.of_report(report(**{field: value}), 1.0)


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("field", sorted(arrived()))
def test_an_absurd_report_of_a_receiver_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError):
        ArrivalSample.of_report(arrived() | {field: value}, 1.0)


class Whole:
    """A plane with a pool over fake engines that answer as a test wants, and its history."""

    def __init__(self, deployment: Deployment, clock: FakeClock) -> None:
        self.clock = clock
        self.senders: dict[str, FakeSender] = {}
        self.http = FakeHttp()
        self.pool = FakeSender()
        self.registry = CollectorRegistry()
        self.plane: LivePlane = plane_of(
            deployment,
            self.registry,
            None,
            clock=clock,
            http=self.http,
            sender_of=self.sender_of,
            pool_ports={node.name: self.pool for node in deployment.pools},
        )
        self.history = StateHistory(self.plane.state, wall_clock=clock)

    def sender_of(self, instance: Any, rank: int) -> FakeSender:
        return self.senders.setdefault(f"{instance.name}/{rank}", FakeSender())

    async def round(self) -> None:
        """All that is asked of engines and pools, once; then everything that is made of it."""
        plane = self.plane
        self.clock.now_s += 0.3
        links = plane.part(LinkMonitor)
        links.ask()
        for node in plane.members.running.current.pools:
            await plane.part(PoolMonitor).ask(node.name)
        for instance in plane.members.running.current.instances:
            await plane.part(EngineMonitor).ask(instance)
            await plane.rank_stats.ask(instance.name)
        for _ in range(5):
            await asyncio.sleep(0)
        links.conclude()
        self.history.take()
        plane.part(GaugeWriter).write()
        orjson.dumps(plane.state())
        generate_latest(self.registry)


def exposition(value: str) -> bytes:
    return "\n".join(f'{name}{{engine="0"}} {value}' for name in SERIES).encode()


@pytest.mark.slow("each example makes a whole plane")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    told=st.dictionaries(st.sampled_from(sorted(report())), values, max_size=4),
    come=st.dictionaries(st.sampled_from(sorted(arrived())), values, max_size=3),
    figures=st.dictionaries(
        st.sampled_from(["epoch", "used_bytes", "memory_pages", "ssd_promoted_bytes", "ssd_promoting_s"]),
        values,
    ),
    number=st.sampled_from(["1", "1e30", "NaN", "-5", "+Inf", "9" * 400, "1e-300", "x"]),
)
def test_whatever_is_reported_the_plane_can_tell_its_state(
    deployment: Deployment, told: dict[str, Any], come: dict[str, Any], figures: dict[str, Any], number: str
) -> None:
    async def main() -> None:
        whole = Whole(deployment, FakeClock())
        for sender in whole.senders.values():
            sender.links = {"far->home": report() | told}
            sender.arrivals = {"far-0/0": arrived() | come}
            sender.rejected = told
            sender.roster = come | {"digest": number, "told": True, "trouble": number}
        for round_ in range(3):
            for name in whole.plane.cluster_state.names:
                whole.http.texts[name] = exposition(number if round_ else "1")
            await whole.round()
        assert not whole.plane.loop_failures.counts
        await whole.plane.close()

    asyncio.run(main())


def answering(answer: dict[str, Any]) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
    async def answered() -> dict[str, Any]:
        return {"sender": {"links": {}}, "arrivals": {}} | answer

    return answered


def test_a_pool_may_report_anything(tmp_path: Any) -> None:
    deployment = deployment_of(tmp_path, text=with_pools())

    async def main() -> None:
        for value in ABSURD:
            whole = Whole(deployment, FakeClock())
            store = {
                "epoch": value,
                "ssd_promoted_bytes": 1e300,
                "ssd_promoting_s": 1e-300,
                "ssd_state": "x" * 9999,
            }
            store["memory_pages"] = {"0": value, "zero": 1, "1" * 99: 1}
            whole.pool.stats = answering({"pool": {"store": store}})  # type: ignore[method-assign]
            for _ in range(3):
                await whole.round()
            told = whole.plane.state()["pools"]["home-pool"]["daemon"]
            assert set(told["pages"]["memory"]) == {"0"}
            assert len(told["ssd_state"]) <= 64
            await whole.plane.close()

    asyncio.run(main())


def test_counters_that_jump_back_and_forth_stay_in_range(deployment: Deployment) -> None:
    async def main() -> None:
        whole = Whole(deployment, FakeClock())
        consumer = next(sender for name, sender in whole.senders.items() if name.startswith("home"))
        for round_ in range(3000):
            consumer.arrivals = {"far-0/0": arrived(bytes_total=(1 << 53) * (round_ % 2))}
            whole.clock.now_s += 0.3
            whole.plane.part(LinkMonitor).ask()
            for _ in range(4):
                await asyncio.sleep(0)
            whole.plane.part(LinkMonitor).conclude()
        whole.history.take()
        await whole.plane.close()

    asyncio.run(main())


@pytest.mark.parametrize("value", ["1e30", "NaN", "-5", "Inf", "9" * 400])
def test_absurd_metrics_count_as_absent(value: str) -> None:
    reading = read_exposition(exposition(value))
    assert (reading.running, reading.waiting, reading.kv_usage, reading.started_at_s) == (0, 0, 0.0, None)


def test_the_sum_of_many_samples_is_bounded() -> None:
    line = b'vllm:num_requests_running{engine="0"} 9007199254740992\n'
    assert read_exposition(line * 1000).running == 1 << 53


def test_a_link_for_which_a_round_fails_is_down_and_the_others_go_on(
    deployment: Deployment, cluster_state: ClusterState, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        sender = FakeSender()
        monitor = LinkMonitor(
            RunningDeployment(deployment), lambda _i, _r: sender, cluster_state, on_change=lambda _: None
        )
        sender.links = {"far->home": report()}

        async def round_() -> None:
            clock.now_s += 0.1
            monitor.ask()
            for _ in range(5):
                await asyncio.sleep(0)
            monitor.conclude()

        await round_()
        assert cluster_state.view.links[LINK].up
        before, meter = dict(monitor.loop_failures.counts), monitor.by_pair[LINK].meter
        with monkeypatch.context() as patched:
            patched.setattr(meter, "observe", lambda *_: 1 / 0)
            await round_()
        assert not cluster_state.view.links[LINK].up
        assert not monitor.samples(LINK)
        assert monitor.loop_failures.counts["LinkMonitor"] == before.get("LinkMonitor", 0) + 1
        await round_()
        assert cluster_state.view.links[LINK].up
        await monitor.close()

    asyncio.run(main())


def test_a_part_that_raises_ends_nothing_and_is_counted(deployment: Deployment, clock: FakeClock) -> None:
    class Broken(Part):
        rounds = 0

        async def run(self) -> None:
            self.rounds += 1
            raise ZeroDivisionError

        def write_gauges(self, _metrics: Any, _now_s: float) -> None:
            raise ZeroDivisionError

    async def main() -> None:
        whole, broken = Whole(deployment, clock), Broken()
        whole.plane.parts.insert(0, broken)
        running = asyncio.create_task(whole.plane.run())
        async with asyncio.timeout(30.0):
            while broken.rounds < 2:
                await asyncio.sleep(0.01)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for _ in range(2):
            whole.plane.part(GaugeWriter).write()
        failed = next(
            sample.value
            for family in whole.registry.collect()
            for sample in family.samples
            if sample.name == "prfaas_control_loop_failures_total" and sample.labels == {"loop": "Broken"}
        )
        assert failed == whole.plane.loop_failures.counts["Broken"] >= 2
        await whole.plane.close()

    asyncio.run(main())
