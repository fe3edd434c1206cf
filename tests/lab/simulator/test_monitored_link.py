"""What policies are told of a simulated link: what the live meter makes of it."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from prfaas.core.kv.model import KvModel
from prfaas.core.scheduling.view import LinkView
from prfaas.lab.simulator.capacity import CapacityProcess, Constant, Interrupted, Steps
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.link import FluidLink
from prfaas.lab.simulator.monitored_link import LOOK_S, MonitoredLink
from prfaas.lab.simulator.transfer import KvMoves

MBIT = 1e6
CONFIGURED = 200 * MBIT
NO_KV = KvMoves(KvModel("none", ()))


@dataclass
class Line:
    """A monitored link that is looked at as a world does, and what its view said at each look."""

    capacity: CapacityProcess
    events: Events = field(default_factory=Events)
    seen: list[tuple[float, float, bool, str]] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        fluid = FluidLink(self.events, "far->home", self.capacity, rng=rng, rtt_s=0.03)
        view = LinkView("far", "home", CONFIGURED, rtt_s=0.03, seen_s=float("inf"))
        self.link = MonitoredLink(view, fluid, NO_KV, self.events, 2.5)
        self.link.on_change = lambda: self.changes.append(self.events.now_s)
        self._look(None)

    def _look(self, _: object) -> None:
        self.link.look(self.events.now_s)
        view = self.link.view
        self.seen.append((self.events.now_s, view.capacity_bits_per_s, view.up, view.condition))
        self.events.at(self.events.now_s + LOOK_S, self._look)

    def keep_full(self, until_s: float) -> None:
        def send(_: object) -> None:
            if self.events.now_s < until_s:
                self.link.fluid.send(("far-0", "home-0"), 2_000_000, send)

        for _ in range(10):
            send(None)

    def capacity_at(self, at_s: float) -> float:
        return next(capacity for seen_s, capacity, _, _ in reversed(self.seen) if seen_s <= at_s)


def drop_and_recovery() -> Line:
    return Line(Steps(((0.0, CONFIGURED), (10.0, CONFIGURED / 10), (30.0, CONFIGURED))))


def test_a_drop_under_load_is_believed_within_three_seconds_and_the_recovery_too() -> None:
    line = drop_and_recovery()
    line.keep_full(50.0)
    line.events.run(50.0)
    assert line.capacity_at(9.9) == CONFIGURED
    for at_s in range(14, 30):
        assert line.capacity_at(at_s) == pytest.approx(CONFIGURED / 10, rel=0.25)
    assert line.capacity_at(36.0) >= 0.75 * CONFIGURED
    assert len([at_s for at_s in line.changes if at_s < 30]) <= 2
    assert 10 < line.changes[0] <= 13
    assert "congested" in {condition for at_s, _, _, condition in line.seen if 10 < at_s < 14}


def test_without_load_a_recovery_is_found_by_filler() -> None:
    line = drop_and_recovery()
    line.keep_full(20.0)
    line.events.run(29.9)
    assert line.capacity_at(29.9) == pytest.approx(CONFIGURED / 10, rel=0.25)
    # Senders have seen what comes through, so probes fill no queue.
    assert {condition for at_s, _, _, condition in line.seen if 24 < at_s < 30} == {"slow"}
    line.events.run(40.0)
    assert line.capacity_at(40.0) >= 0.75 * CONFIGURED


def test_a_cut_link_is_down_after_three_seconds_and_does_not_grow() -> None:
    line = Line(Interrupted(Constant(CONFIGURED), [(10.0, 20.0)]))
    line.keep_full(40.0)
    line.events.run(40.0)
    down = [at_s for at_s, _, up, _ in line.seen if not up]
    assert 12.5 <= down[0] <= 14.0
    assert 19.5 <= down[-1] <= 20.5
    assert {capacity for at_s, capacity, _, _ in line.seen if at_s < 20} == {CONFIGURED}


def test_nothing_is_computed_while_the_link_is_as_it_is_believed() -> None:
    line = Line(Constant(CONFIGURED))
    line.keep_full(100.0)
    line.events.run(100.0)
    assert line.link.meter.carried_bytes == 0
    assert line.link.view.egress_bits_per_s == pytest.approx(CONFIGURED, rel=0.05)
    assert line.changes == []


def test_the_same_link_gives_the_same_view() -> None:
    first, second = drop_and_recovery(), drop_and_recovery()
    for line in (first, second):
        line.keep_full(25.0)
        line.events.run(60.0)
    assert first.seen == second.seen
