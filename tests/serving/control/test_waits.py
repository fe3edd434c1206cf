"""Predicted waits: the queue, the link, and the seats of a decode engine."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.scheduling.decision import Decision, KvFacts, Route
from prfaas.core.scheduling.view import UNKNOWN_SLOT_S, ClusterView, InstanceView, LinkView, View
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.engine_reading import EngineReading, read_exposition
from prfaas.serving.control.waits import PredictedWaits

SEATS = 2
DECISION = Decision(
    route=Route.OFFLOAD,
    prefill="far",
    decode="decode",
    uncached_tokens=500,
    prefill_tokens=500,
    skip_tokens=0,
    kv_bytes=1000,
    reason="long",
    threshold_tokens=100.0,
    predicted_ttft_s=4.0,
)


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        far = InstanceView("far", "east", prefills=True, decodes=False)
        near = InstanceView("near", "home", prefills=True, decodes=False)
        decode = InstanceView("decode", "home", prefills=False, decodes=True)
        view = View(
            {
                "east": ClusterView("east", "prfaas", [far], lambda tokens: tokens / 100),
                "home": ClusterView("home", "pd", [near, decode], lambda tokens: tokens / 100),
            },
            {("east", "home"): LinkView("east", "home", 8000.0)},
            KvFacts(False, True, lambda *_: 0, lambda *_: 0),
            5.0,
            now_s=self.now_s,
        )
        self.state = ClusterState(view, clock=lambda: self.now_s, on_service=lambda *_: None)
        self.waits = PredictedWaits(self.state, {}, seats=SEATS)


def test_the_longest_of_queue_and_link_counts() -> None:
    world = World()
    assert (world.waits.of(DECISION), world.waits.least()) == (0.0, 0.0)
    with world.state.prefilling(DECISION):
        assert world.waits.of(DECISION) == pytest.approx(5.0)
        # Another prefill instance is idle.
        assert world.waits.least() == 0.0
        with world.state.prefilling(
            structs.replace(DECISION, prefill="near", prefill_tokens=300, kv_bytes=0)
        ):
            assert world.waits.least() == pytest.approx(3.0)
    with world.state.prefilling(structs.replace(DECISION, kv_bytes=20_000)):
        assert world.waits.of(DECISION) == pytest.approx(20.0)
    assert world.waits.of(DECISION) == 0.0


def test_checkpoints_follow_kills_link_and_state() -> None:
    """2,000 bytes at 8,000 bit/s take 2 s; at a kill per 100 s that is worth 20 s of work."""
    world, long = World(), structs.replace(DECISION, prefill_tokens=10_000, kv_bytes=10_000)
    view = world.state.view
    assert world.waits.checkpoint_tokens(long) == 0
    view.clusters["east"].kills_per_s = 0.01
    assert world.waits.checkpoint_tokens(long) == 0  # no layer has a state
    view.kv = replace(view.kv, checkpoint_bytes=2000)
    assert world.waits.checkpoint_tokens(long) == 2000
    # The link takes twice as long as the prefill.
    assert world.waits.checkpoint_tokens(structs.replace(long, kv_bytes=200_000)) == 1000
    assert world.waits.checkpoint_tokens(structs.replace(long, prefill_tokens=2900)) == 0
    # Inside of a cluster, whose network is no link.
    near = structs.replace(long, prefill="near")
    assert world.waits.checkpoint_tokens(near) == 0
    # What is to be kept has no first token with it, nor has what a decode instance reads by NIXL.
    short = structs.replace(long, prefill_tokens=2900)
    assert [world.waits.may_sample(each) for each in (long, short, near)] == [False, True, True]
    view.clusters[world.state.instance("near").cluster].reads_kv = True
    assert not world.waits.may_sample(near)


@settings(deadline=None)
@given(st.floats(0.01, 5), st.integers(3, 30))
def test_requests_beyond_the_seats_wait_as_long_as_answers_take_to_end(gap_s: float, beyond: int) -> None:
    world = World()
    open_ = []
    for _ in range(SEATS + beyond):
        each = ExitStack()
        each.enter_context(world.waits.decoding("decode", 0))
        open_.append(each)
    # Nothing has ended, so nothing is known.
    assert world.waits.seat_wait_s("decode") == 0.0
    for _ in range(3):
        world.now_s += gap_s
        open_.pop().close()
    assert world.waits.seat_wait_s("decode") == pytest.approx((beyond - 3 + 1) * gap_s)
    assert world.waits.least() == world.waits.of(DECISION) == world.waits.seat_wait_s("decode")
    for each in open_:
        each.close()
    assert world.waits.seat_wait_s("decode") == 0.0


def test_gaps_without_a_queue_say_nothing() -> None:
    world = World()
    for _ in range(5):
        with world.waits.decoding("decode", 0):
            world.now_s += 60.0
    with ExitStack() as full:
        for _ in range(SEATS + 1):
            full.enter_context(world.waits.decoding("decode", 0))
        assert world.waits.seat_wait_s("decode") == 0.0


def reading(outputs: float, output_tokens: float, token_gaps: float) -> EngineReading:
    return replace(
        read_exposition(b""),
        outputs=outputs,
        output_tokens=output_tokens,
        token_gaps=token_gaps,
        token_gaps_s=0.02 * token_gaps,
    )


def test_slots_are_kept_for_as_long_as_engines_say() -> None:
    world = World()
    home, meter = world.state.view.clusters["home"], EngineMeter(60.0)
    world.waits.learn("decode", meter)
    for number, outputs in enumerate((1_000, 1_000, 1_100)):
        # What ended before the first look says nothing of now.
        assert home.slot_s == UNKNOWN_SLOT_S
        meter.add(reading(outputs, 300 * outputs, 1e6 + 500 * number), world.now_s + number)
        world.waits.learn("decode", meter)
    # A hundred answers of 300 tokens and 20 ms each weigh as much as what was taken before.
    assert home.slot_s == pytest.approx((UNKNOWN_SLOT_S + 300 * 0.02) / 2)
    learnt_s = home.slot_s
    meter.add(reading(7, 2_100, 100.0), world.now_s + 10)
    world.waits.learn("decode", meter)
    assert home.slot_s == learnt_s, "the process is another one"


def test_an_instance_that_only_prefills_tells_nothing_of_slots() -> None:
    world = World()
    meter = EngineMeter(60.0)
    for number in range(3):
        meter.add(reading(100 * number, 100 * number, 10.0 * number), world.now_s + number)
        world.waits.learn("near", meter)
    assert world.state.view.clusters["home"].slot_s == UNKNOWN_SLOT_S
