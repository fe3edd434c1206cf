"""Out at once, back by a good probe; frozen by silence or a stall, and never for what the gateway does itself."""

import asyncio
import errno
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.control import engine_liveness
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_liveness import EngineLiveness
from prfaas.serving.control.health import HealthWatch
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.own_process import LoopClock
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.protocol.handshake import HandshakeError

from .world import FakeClock, FakeHttp

SILENCE_S, STALL_S = 2.5, 60.0


class Port:
    """One KV port; `error`: what asking it ends with; "": it never answers."""

    def __init__(self) -> None:
        self.error: OSError | str | None = None
        self.asked = 0

    async def stats(self) -> dict[str, object]:
        self.asked += 1
        if self.error == "":
            raise TimeoutError
        if isinstance(self.error, OSError):
            raise self.error
        return {}

    async def close(self) -> None: ...


class Watched:
    """A watch with everything it told."""

    def __init__(self, deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> None:
        self.http, self.clock, self.cluster_state = FakeHttp(), clock, cluster_state
        self.loop_clock = FakeClock()
        self.ports = {instance.name: Port() for instance in deployment.instances}
        self.stuck_s = dict.fromkeys(self.ports, 0.0)
        self.lost: list[str] = []
        self.changes: list[tuple[str, bool]] = []
        self.frozen: list[tuple[str, str | None]] = []
        self.listeners = Listeners()
        self.watch = HealthWatch(
            SimpleNamespace(
                running=RunningDeployment(deployment),
                http=self.http,
                kv_ports={name: (port,) for name, port in self.ports.items()},
            ),
            cluster_state,
            self.listeners,
            loop_clock=self.loop_clock,
            stuck_s=lambda name: self.stuck_s[name],
        )
        self.listeners.lost_cache.append(self.lost.append)
        self.listeners.healthy.append(lambda name, healthy: self.changes.append((name, healthy)))
        self.listeners.frozen.append(lambda name, reason: self.frozen.append((name, reason)))

    def probe(self, seconds: float = 1.0, *, late: bool = False) -> None:
        """Time passes, in which the loop was late or not; then everybody is asked and judged."""
        self.clock.now_s += seconds
        self.loop_clock.now_s += 0.25 if late else seconds
        self.http.probed.clear()

        async def ask() -> None:
            await asyncio.gather(*self.watch.due())

        asyncio.run(ask())
        self.watch.judge()

    def healthy(self, name: str) -> bool:
        return self.cluster_state.instance(name).healthy


@pytest.fixture
def watched(deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> Watched:
    return Watched(deployment, cluster_state, clock)


def test_a_failed_request_takes_it_out_until_a_probe_is_good(watched: Watched) -> None:
    watched.watch.suspect("far-0", "http-500")
    assert not watched.healthy("far-0")
    assert watched.watch.reason("far-0") == "http-500"
    assert watched.watch.has_failed("far-0")
    watched.probe()
    # Its /health is good, but it is too early.
    assert "far-0" in watched.http.probed and not watched.healthy("far-0")
    watched.watch.suspect("far-0", "http-500 again")
    watched.probe(2.4)
    assert not watched.healthy("far-0")
    watched.probe(1.0)
    assert watched.healthy("far-0")
    assert watched.changes == [("far-0", False), ("far-0", True)]
    assert (watched.lost, watched.frozen, watched.watch.reason("far-0")) == ([], [], None)


def test_a_dead_engine_lost_its_cache(watched: Watched) -> None:
    watched.watch.suspect("far-0", "unreachable", lost_cache=True)
    watched.watch.suspect("far-0", "and again")
    assert watched.lost == ["far-0"]
    assert watched.watch.is_suspect("far-0") and not watched.watch.has_failed("far-0")
    watched.http.healthy["far-0"] = False
    for _ in range(10):
        watched.probe()
        assert not watched.healthy("far-0")
    watched.http.healthy["far-0"] = True
    watched.probe()
    assert watched.healthy("far-0")
    assert watched.frozen == [("far-0", "gone: and again"), ("far-0", None)]


def test_a_refused_probe_is_a_death(watched: Watched) -> None:
    watched.http.healthy["far-1"] = False
    for _ in range(5):
        watched.probe()
    assert watched.changes == [("far-1", False)]
    assert watched.lost == ["far-1"]


def test_what_hangs_at_an_engine_that_is_gone_is_ended(watched: Watched) -> None:
    watched.http.healthy["far-0"] = False
    watched.probe()
    watched.probe()
    assert watched.lost == ["far-0"] and watched.frozen == []
    for _ in range(4):
        watched.probe()
    # Once, and calls are let through again with the next process.
    assert [name for name, reason in watched.frozen if reason] == ["far-0"] and len(watched.frozen) == 1
    watched.http.healthy["far-0"] = True
    watched.probe()
    watched.probe()
    assert watched.frozen[1:] == [("far-0", None)] and watched.healthy("far-0")


def test_an_engine_that_lost_a_connection_and_answers_keeps_its_calls(watched: Watched) -> None:
    watched.watch.suspect("far-0", "reset", lost_cache=True)
    for _ in range(6):
        watched.probe()
    assert watched.frozen == [] and watched.healthy("far-0")


def test_who_is_heard_is_asked_for_its_health_now_and_then(watched: Watched) -> None:
    for _ in range(9):
        for name in watched.ports:
            watched.watch.liveness.heard_http(name)
            watched.watch.liveness.heard_kv(name, 0)
        watched.probe(0.5)
        assert watched.http.probed == []
    for name in watched.ports:
        watched.watch.liveness.heard_http(name)
        watched.watch.liveness.heard_kv(name, 0)
    watched.probe(0.5)
    assert len(watched.http.probed) == 6
    # What its links say is as good as an answer: it is asked once nothing is heard.
    assert {port.asked for port in watched.ports.values()} == {0}
    watched.probe(0.2)
    assert {port.asked for port in watched.ports.values()} == {1}


@pytest.mark.parametrize("way", ["HTTP server", "KV port"])
def test_silence_freezes_and_an_answer_thaws(watched: Watched, way: str) -> None:
    def silent(is_silent: bool) -> None:
        if way == "KV port":
            watched.ports["home-d0"].error = "" if is_silent else None
        else:
            watched.http.healthy["home-d0"] = None if is_silent else True

    watched.probe()
    silent(True)
    for _ in range(12):
        watched.probe(0.2)
        assert watched.healthy("home-d0")
    watched.probe(0.2)
    reason = f"frozen: its {way} has not answered for 2.5 s"
    assert watched.watch.reason("home-d0") == reason
    assert (watched.frozen, watched.changes) == ([("home-d0", reason)], [("home-d0", False)])
    # It keeps its cache, and nobody is told again.
    for _ in range(20):
        watched.probe()
        watched.watch.suspect("home-d0", "a request failed as well")
    assert (watched.lost, len(watched.frozen), watched.watch.reason("home-d0")) == ([], 1, reason)
    silent(False)
    watched.probe()
    assert watched.healthy("home-d0")
    assert watched.frozen[1:] == [("home-d0", None)]
    assert watched.changes[1:] == [("home-d0", True)]


def test_a_frozen_engine_that_dies_lost_its_cache(watched: Watched) -> None:
    watched.http.healthy["far-0"] = None
    for _ in range(5):
        watched.probe()
    assert str(watched.watch.reason("far-0")).startswith("frozen") and watched.lost == []
    watched.http.healthy["far-0"] = False
    watched.probe()
    assert (watched.lost, watched.watch.reason("far-0")) == (["far-0"], "its /health failed")
    # Calls to it are let through again: they are refused at once.
    assert watched.frozen[-1] == ("far-0", None)
    watched.http.healthy["far-0"] = True
    for _ in range(4):
        watched.probe()
    assert watched.healthy("far-0")


def test_time_in_which_the_loop_was_late_makes_nobody_silent(watched: Watched) -> None:
    for name in watched.ports:
        watched.http.healthy[name] = None
        watched.ports[name].error = ""
    for _ in range(9):
        watched.probe(3.0, late=True)
    assert watched.changes == [] and watched.lost == []
    for _ in range(3):
        watched.probe(1.0)
    assert len(watched.changes) == len(watched.ports)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("refused"),
        HandshakeError("another key"),
        OSError(errno.EMFILE, "too many open files"),
    ],
)
def test_who_refuses_is_not_frozen(watched: Watched, error: OSError) -> None:
    watched.ports["far-0"].error = error
    for _ in range(20):
        watched.probe()
    assert watched.changes == []


def test_a_lost_connection_is_no_answer(watched: Watched) -> None:
    watched.ports["far-0"].error = ConnectionError("connection lost")
    for _ in range(4):
        watched.probe()
    assert str(watched.watch.reason("far-0")).startswith("frozen")


def test_without_descriptors_nobody_is_silent_or_dead(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_instance: Instance, _timeout_s: float) -> bool | None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(watched.http, "is_healthy", fails)
    for _ in range(20):
        watched.probe()
    assert (watched.changes, watched.lost) == ([], [])


def test_running_requests_without_progress_are_a_stall(watched: Watched) -> None:
    watched.stuck_s["home-d1"] = STALL_S
    watched.probe()
    assert watched.changes == []
    watched.stuck_s["home-d1"] = STALL_S + 1
    watched.probe()
    reason = "stalled: its running requests have made no progress for 60 s"
    assert watched.frozen == [("home-d1", reason)]
    for _ in range(10):
        watched.probe()
    assert (watched.watch.reason("home-d1"), watched.lost) == (reason, [])
    watched.stuck_s["home-d1"] = 0.0
    watched.probe()
    assert watched.healthy("home-d1")


@given(st.lists(st.floats(0.01, 30.0), max_size=50))
def test_the_loops_clock_counts_no_late_time(ticks: list[float]) -> None:
    clock = FakeClock()
    loop_clock = LoopClock(clock)
    for passed_s in ticks:
        clock.now_s += passed_s
        loop_clock.tick()
    assert loop_clock() == pytest.approx(sum(min(passed_s, 0.25) for passed_s in ticks))
    assert loop_clock.lag_s == pytest.approx(max([*ticks, 0.05]) - 0.05)


def test_a_way_that_never_answers_is_asked_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question ends by its timeout, over HTTP and at a KV port alike."""
    monkeypatch.setattr(engine_liveness, "_ANSWER_S", 0.01)
    instance, now_s = deployment.instance("far-0"), 0.0

    class Hanging:
        async def stats(self) -> None:
            await asyncio.Event().wait()

        async def is_healthy(self, _instance: Instance, _timeout_s: float) -> None:
            await asyncio.Event().wait()

    async def body() -> None:
        nonlocal now_s
        liveness = EngineLiveness(
            Hanging(),  # type: ignore[arg-type]
            ask_s=lambda: 1.0,
            clock=lambda: now_s + time.monotonic(),
            on_health=lambda _name, _good: None,
        )
        liveness.join(instance, [Hanging()])  # type: ignore[list-item]
        for _ in range(3):
            now_s += 10.0
            questions = liveness.due(["far-0"], lambda _name: True)
            assert len(questions) == 2
            await asyncio.wait_for(asyncio.gather(*questions), 10)
        assert liveness.silence("far-0", 5.0) == "HTTP server"

    asyncio.run(body())
