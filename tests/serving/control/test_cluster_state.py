"""Counts, waits and measurements; with nothing open, nothing is counted."""

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.core.deployment import Deployment
from prfaas.core.scheduling.decision import CacheTransfer
from prfaas.serving.control.cluster_state import ClusterState

from .world import BYTES_PER_TOKEN, LINK, FakeClock, cluster_state_of, decision, deployment_of


def test_a_prefill_elsewhere_counts_until_it_is_over(cluster_state: ClusterState, clock: FakeClock) -> None:
    link = cluster_state.view.links[LINK]
    with cluster_state.prefilling(decision("far-0", "home-d0", prefill_tokens=2000)):
        assert cluster_state.instance("far-0").in_flight == 1
        assert cluster_state.instance("far-0").busy_until_s == clock.now_s + 2.0
        assert (cluster_state.instance("home-d0").decoding, cluster_state.instance("home-d0").in_flight) == (
            1,
            1,
        )
        assert link.drained_s == clock.now_s + 2000 * BYTES_PER_TOKEN * 8 / 1e9
        assert cluster_state.transfers_open(LINK) == 1
        clock.now_s += 1.5
    assert cluster_state.instance("far-0").in_flight == 0
    assert cluster_state.instance("far-0").busy_until_s == clock.now_s
    assert cluster_state.instance("home-d0").decoding == 0
    assert link.drained_s <= clock.now_s


def test_inside_a_cluster_no_link_is_used(cluster_state: ClusterState, clock: FakeClock) -> None:
    with cluster_state.prefilling(decision("home-p0", "home-d0")):
        assert cluster_state.view.links[LINK].drained_s == clock.now_s
        assert cluster_state.instance("home-p0").busy_until_s == clock.now_s + 1.0


def test_skipped_tokens_are_not_sent(cluster_state: ClusterState, clock: FakeClock) -> None:
    with cluster_state.prefilling(decision("far-0", "home-d0", skip_tokens=600)):
        assert cluster_state.residual_bytes(LINK) == 400 * BYTES_PER_TOKEN


def test_a_cache_transfer_keeps_no_other_bytes_waiting(tmp_path: Path, clock: FakeClock) -> None:
    back = "links: -> links:\n  - {source: home, target: far, bandwidth: 1 Gbit/s}"
    cluster_state = cluster_state_of(deployment_of(tmp_path, back=back), clock)
    transfer = CacheTransfer("home-p0", 500, 100, 400 * BYTES_PER_TOKEN)
    with cluster_state.prefilling(decision("far-0", "home-d0", cache_transfer=transfer)):
        # It gets what others leave.
        assert cluster_state.residual_bytes(("home", "far")) == 0
        assert cluster_state.residual_bytes(LINK) == 1000 * BYTES_PER_TOKEN
        assert cluster_state.instance("home-p0").in_flight == 1
    assert cluster_state.residual_bytes(("home", "far")) == cluster_state.residual_bytes(LINK) == 0
    assert cluster_state.instance("home-p0").in_flight == 0


def test_only_clean_ends_at_the_head_are_measured(deployment: Deployment, clock: FakeClock) -> None:
    measured: list[tuple[str, int, int, float]] = []
    cluster_state = cluster_state_of(deployment, clock, on_service=lambda *what: measured.append(what))
    with pytest.raises(OSError), cluster_state.prefilling(decision("far-0", "home-d0")) as work:
        clock.now_s += 5
        work.measured()
        raise OSError
    with cluster_state.prefilling(decision("far-0", "home-d0")):
        clock.now_s += 5
    assert measured == []
    first = cluster_state.prefilling(decision("far-0", "home-d0"))
    second = cluster_state.prefilling(decision("far-0", "home-d1", prefill_tokens=3000, num_tokens=5000))
    first.__enter__().measured()
    clock.now_s += 1
    second.__enter__().measured()
    clock.now_s += 1
    first.__exit__(None, None, None)
    clock.now_s += 4
    second.__exit__(None, None, None)
    assert measured == [("far", 1000, 0, 2.0), ("far", 3000, 2000, 4.0)]


def test_what_the_link_explains_is_not_measured(deployment: Deployment, clock: FakeClock) -> None:
    measured: list[float] = []
    cluster_state = cluster_state_of(
        deployment, clock, on_service=lambda _cluster, _tokens, _reused, s: measured.append(s)
    )
    cluster_state.set_link(LINK, delivered_bytes=0, measured_bytes=0, capacity_bits_per_s=8e5)
    with cluster_state.prefilling(decision("far-0", "home-d0")) as work:
        clock.now_s += 10.0  # as long as the link needs for a million bytes
        work.measured()
    assert measured == []
    cluster_state.set_link(LINK, delivered_bytes=0, measured_bytes=0, capacity_bits_per_s=8e6)
    with cluster_state.prefilling(decision("far-0", "home-d0")) as work:
        clock.now_s += 1.5
        work.measured()
    assert measured == [1.5]


def test_overdue_work_is_never_in_the_past(cluster_state: ClusterState, clock: FakeClock) -> None:
    with cluster_state.prefilling(decision("far-0", "home-d0")):
        clock.now_s += 30
        assert cluster_state.at(clock.now_s).clusters["far"].instances[0].busy_until_s == clock.now_s


def test_decoding_and_its_own_prefill(cluster_state: ClusterState, clock: FakeClock) -> None:
    with cluster_state.decoding("home-d0", 500):
        view = cluster_state.instance("home-d0")
        assert (view.decoding, view.in_flight, view.busy_until_s) == (1, 1, clock.now_s + 0.5)
        clock.now_s += 10
        assert cluster_state.at(clock.now_s) and view.busy_until_s < clock.now_s
        assert cluster_state.prefill_busy_s("home-d0") == 0.5
    assert (view.decoding, view.in_flight) == (0, 0)
    assert cluster_state.decoding_s("home-d0") == 10.0


def test_requests_on_their_way_are_no_decode_work_yet(cluster_state: ClusterState, clock: FakeClock) -> None:
    with cluster_state.prefilling(decision("far-0", "home-d0")):
        clock.now_s += 7
        assert cluster_state.decoding_s("home-d0") == 0.0


def test_telemetry_corrects_the_link(cluster_state: ClusterState, clock: FakeClock) -> None:
    link = cluster_state.view.links[LINK]
    with cluster_state.prefilling(decision("far-0", "home-d0")):
        cluster_state.set_link(LINK, delivered_bytes=600_000, measured_bytes=300_000, capacity_bits_per_s=8e6)
        assert cluster_state.residual_bytes(LINK) == 400_000
        assert link.drained_s == pytest.approx(clock.now_s + 0.4)
        cluster_state.set_link(LINK, delivered_bytes=0, measured_bytes=900_000, capacity_bits_per_s=8e6)
        assert link.drained_s == pytest.approx(clock.now_s + 0.9)
        cluster_state.set_link(LINK, delivered_bytes=5_000_000, measured_bytes=0, capacity_bits_per_s=8e6)
        assert cluster_state.residual_bytes(LINK) == 0
        # Bytes of somebody else were delivered too: they are no credit for the next transfer.
        with cluster_state.prefilling(decision("far-0", "home-d0")):
            assert cluster_state.residual_bytes(LINK) == 1000 * BYTES_PER_TOKEN


def test_somebody_elses_requests_count_when_seen_twice(cluster_state: ClusterState, clock: FakeClock) -> None:
    with cluster_state.prefilling(decision("far-0", "home-d0")):
        pass
    cluster_state.set_engine_load("far-0", 3)
    assert cluster_state.instance("far-0").busy_until_s <= clock.now_s
    cluster_state.set_engine_load("far-0", 2)
    assert cluster_state.instance("far-0").busy_until_s == clock.now_s + 2.0
    cluster_state.set_engine_load("far-0", 0)
    assert cluster_state.instance("far-0").busy_until_s <= clock.now_s
    with cluster_state.decoding("home-d0", 0):
        for _ in range(2):
            cluster_state.set_engine_load("home-d0", 4)
        assert cluster_state.instance("home-d0").decoding == 4


def test_roles(cluster_state: ClusterState) -> None:
    cluster_state.set_roles("home-d0", ["prefill"])
    view = cluster_state.instance("home-d0")
    assert (view.prefills, view.decodes) == (True, False)


NAMES = ["far-0", "far-1", "home-p0", "home-p1"]
DECODERS = ["home-d0", "home-d1"]


class Accounting(RuleBasedStateMachine):
    """Any interleaving of requests, telemetry and time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.cluster_state = cluster_state_of(
            deployment_of(Path(self.folder.name)),
            self.clock,
            on_service=lambda _c, _t, _r, s: self.measured(s),
        )
        self.open: list[AbstractContextManager[None]] = []

    def teardown(self) -> None:
        for request in self.open:
            request.__exit__(None, None, None)
        for name in (*NAMES, *DECODERS):
            view = self.cluster_state.instance(name)
            assert (view.in_flight, view.decoding) == (0, 0)
            assert self.cluster_state.open_prefills(name) == 0
            assert view.busy_until_s <= self.clock.now_s
        assert self.cluster_state.transfers_open(LINK) == 0
        self.cluster_state.set_link(LINK, delivered_bytes=0, measured_bytes=0, capacity_bits_per_s=1e6)
        assert self.cluster_state.residual_bytes(LINK) == 0
        assert self.cluster_state.view.links[LINK].drained_s <= self.clock.now_s
        self.folder.cleanup()

    def measured(self, seconds: float) -> None:
        assert 0 < seconds < float("inf")

    @rule(
        prefill=st.sampled_from(NAMES),
        decode=st.sampled_from(DECODERS),
        tokens=st.integers(1, 20_000),
        skip=st.integers(0, 20_000),
        cached=st.booleans(),
    )
    def prefill(self, prefill: str, decode: str, tokens: int, skip: int, cached: bool) -> None:
        transfer = CacheTransfer("far-0", tokens, 0, tokens * BYTES_PER_TOKEN) if cached else None
        what = decision(prefill, decode, prefill_tokens=tokens, skip_tokens=min(skip, tokens - 1))
        if transfer is not None:
            what = decision(prefill, decode, prefill_tokens=tokens, cache_transfer=transfer)
        self.enter(self.cluster_state.prefilling(what))

    @rule(name=st.sampled_from(DECODERS), tokens=st.integers(0, 20_000))
    def decode(self, name: str, tokens: int) -> None:
        self.enter(self.cluster_state.decoding(name, tokens))

    def enter(self, request: AbstractContextManager[None]) -> None:
        request.__enter__()
        self.open.append(request)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1000), clean=st.booleans())
    def end(self, which: int, clean: bool) -> None:
        request = self.open.pop(which % len(self.open))
        if clean:
            request.__exit__(None, None, None)
        else:
            error = OSError()
            assert not request.__exit__(OSError, error, None)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(delivered=st.integers(0, 10**8), left=st.integers(0, 10**7), capacity=st.floats(1e6, 1e9))
    def telemetry(self, delivered: int, left: int, capacity: float) -> None:
        self.cluster_state.set_link(
            LINK, delivered_bytes=delivered, measured_bytes=left, capacity_bits_per_s=capacity
        )

    @invariant()
    def nothing_is_negative_or_in_the_past(self) -> None:
        view = self.cluster_state.at(self.clock.now_s)
        for cluster in view.clusters.values():
            for instance in cluster.instances:
                assert instance.in_flight >= 0
                assert instance.decoding >= 0
                waiting = self.cluster_state.open_prefills(instance.name)
                assert waiting == 0 or instance.busy_until_s >= self.clock.now_s
                assert instance.busy_until_s <= self.clock.now_s + 20.0 * waiting + 1e-6 or waiting == 0
                assert self.cluster_state.prefill_busy_s(instance.name) >= 0
                assert self.cluster_state.decoding_s(instance.name) >= 0
        assert self.cluster_state.residual_bytes(LINK) >= 0
        assert sum(i.in_flight for c in view.clusters.values() for i in c.instances) >= len(self.open)


Accounting.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAccounting = Accounting.TestCase
