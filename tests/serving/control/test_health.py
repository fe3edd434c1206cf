"""Out at once, back by a good probe, never out for being slow."""

import asyncio

import pytest

from prfaas.core.deployment import Deployment
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.health import HealthWatch

from .world import FakeClock, FakeHttp


class Watched:
    """A watch with everything it told."""

    def __init__(self, deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> None:
        self.http, self.clock, self.cluster_state = FakeHttp(), clock, cluster_state
        self.lost: list[str] = []
        self.changes: list[tuple[str, bool]] = []
        self.watch = HealthWatch(
            deployment,
            self.http,
            cluster_state,
            clock=clock,
            on_lost_cache=self.lost.append,
            on_change=lambda name, healthy: self.changes.append((name, healthy)),
        )

    def probe(self, seconds: float = 1.0) -> None:
        self.clock.now_s += seconds
        self.http.probed.clear()
        asyncio.run(self.watch.probe_due())


@pytest.fixture
def watched(deployment: Deployment, cluster_state: ClusterState, clock: FakeClock) -> Watched:
    return Watched(deployment, cluster_state, clock)


def test_a_failed_request_takes_it_out_until_a_probe_is_good(watched: Watched) -> None:
    watched.watch.suspect("far-0", "http-500")
    view = watched.cluster_state.instance("far-0")
    assert not view.healthy
    assert watched.watch.reason("far-0") == "http-500"
    assert not watched.watch.is_dead("far-0")
    watched.probe()
    # Its /health is good, but it is too early.
    assert (watched.http.probed, view.healthy) == (["far-0"], False)
    watched.watch.suspect("far-0", "http-500 again")
    watched.probe(2.5)
    assert not view.healthy
    watched.probe(1.0)
    assert view.healthy
    assert watched.changes == [("far-0", False), ("far-0", True)]
    assert (watched.lost, watched.watch.reason("far-0")) == ([], None)


def test_a_dead_engine_lost_its_cache(watched: Watched) -> None:
    watched.watch.suspect("far-0", "unreachable", lost_cache=True)
    watched.watch.suspect("far-0", "and again")
    assert watched.lost == ["far-0"]
    assert watched.watch.is_dead("far-0")
    watched.http.healthy["far-0"] = False
    watched.probe(10)
    assert not watched.cluster_state.instance("far-0").healthy
    watched.http.healthy["far-0"] = None
    watched.probe()
    assert not watched.cluster_state.instance("far-0").healthy
    watched.http.healthy["far-0"] = True
    watched.probe()
    assert watched.cluster_state.instance("far-0").healthy


def test_everybody_is_probed_now_and_then(watched: Watched) -> None:
    watched.probe(4.0)
    assert watched.http.probed == []
    watched.http.healthy |= {"far-1": False, "home-d0": None}
    watched.probe(1.0)
    assert len(watched.http.probed) == 6
    assert watched.changes == [("far-1", False)]
    assert watched.lost == ["far-1"]
    assert watched.cluster_state.instance("home-d0").healthy
