"""What a link carries, and what it can carry, from what its producers tell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.control.link_meter import LinkMeter, SenderSample
from prfaas.serving.control.link_monitor import LinkBreaker

from .world import report

MBIT = 1e6


class Line:
    """Producers that queue more than a line of `carries` bit/s takes away, looked at ten times a second."""

    def __init__(self, configured: float, *, producers: int = 1, pace: float | None = None) -> None:
        self.meter = LinkMeter(configured, 0.0)
        self.now_s = 0.0
        self.producers = producers
        self.pace = pace if pace is not None else configured / producers
        self.acked = [0.0] * producers

    def run(self, seconds: float, carries: float, *, queued_s: float = 1.0, busy: int | None = None) -> None:
        """`busy` of the producers have something to send; `queued_s`: how much waits, in seconds of the line."""
        busy = self.producers if busy is None else busy
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            samples = {}
            for number in range(self.producers):
                works = number < busy and queued_s > 0
                self.acked[number] += carries * 0.1 / 8 / busy if number < busy else 0.0
                samples[f"p{number}/0"] = SenderSample.of_report(
                    report(
                        capacity_bits_per_s=self.pace,
                        queued_bytes=int(queued_s * carries / 8 / busy) if works else 0,
                        acked_bytes_total=int(self.acked[number]),
                        rtt_s=0.01,
                    ),
                    self.now_s,
                )
            self.meter.observe(samples, self.now_s)


def test_egress_is_what_was_acknowledged_lately() -> None:
    line = Line(100 * MBIT)
    line.run(5, 40 * MBIT, queued_s=0.0)
    assert line.meter.egress_bits_per_s(line.now_s) == pytest.approx(40 * MBIT, rel=0.01)
    line.run(2.1, 0.0)
    assert line.meter.egress_bits_per_s(line.now_s) == 0.0
    line.run(1, 40 * MBIT)
    assert line.meter.egress_bits_per_s(line.now_s + 10) == 0.0


def test_a_full_line_that_carries_less_is_lowered_and_probed_up_again() -> None:
    line = Line(100 * MBIT)
    line.run(2.5, 30 * MBIT)
    assert line.meter.capacity_bits_per_s == 100 * MBIT
    line.run(3, 30 * MBIT)
    assert line.meter.capacity_bits_per_s == pytest.approx(30 * MBIT, rel=0.05)
    line.run(3, 1 * MBIT, queued_s=0.0)
    assert line.meter.capacity_bits_per_s == pytest.approx(30 * MBIT, rel=0.05)
    line.run(12, 1 * MBIT, queued_s=0.0)
    assert 35 * MBIT < line.meter.capacity_bits_per_s < 60 * MBIT
    line.run(60, 1 * MBIT, queued_s=0.0)
    assert line.meter.capacity_bits_per_s == 100 * MBIT


def test_a_line_that_carries_more_again_is_believed_at_once() -> None:
    line = Line(100 * MBIT)
    line.run(6, 20 * MBIT)
    line.run(2.2, 90 * MBIT)
    assert line.meter.capacity_bits_per_s == pytest.approx(90 * MBIT, rel=0.05)
    line.run(2.2, 130 * MBIT)
    assert line.meter.capacity_bits_per_s == 100 * MBIT


def test_a_line_that_is_not_full_says_nothing() -> None:
    line = Line(100 * MBIT)
    line.run(20, 30 * MBIT, queued_s=0.05)
    assert line.meter.capacity_bits_per_s == 100 * MBIT


def test_a_line_that_runs_dry_between_says_nothing() -> None:
    line = Line(100 * MBIT)
    for _ in range(20):
        line.run(0.6, 30 * MBIT)
        line.run(0.4, 0.0, queued_s=0.0)
    assert line.meter.capacity_bits_per_s == 100 * MBIT


def test_bytes_in_flight_are_no_queue() -> None:
    meter, acked = LinkMeter(100 * MBIT, 0.0), 0.0
    for tick in range(1, 200):
        acked += 60 * MBIT * 0.1 / 8
        sample = report(queued_bytes=int(60 * MBIT * 0.2 / 8), acked_bytes_total=int(acked), rtt_s=0.2)
        meter.observe({"p/0": SenderSample.of_report(sample, tick / 10)}, tick / 10)
    assert meter.capacity_bits_per_s == 100 * MBIT


def test_one_producer_at_its_own_pace_does_not_lower_the_line() -> None:
    line = Line(100 * MBIT, producers=4)
    line.run(20, 24 * MBIT, busy=1)
    assert line.meter.capacity_bits_per_s == 100 * MBIT


def test_a_share_of_the_pace_is_a_share_of_the_line() -> None:
    line = Line(100 * MBIT, producers=4)
    line.run(20, 10 * MBIT, busy=1)
    assert line.meter.capacity_bits_per_s == pytest.approx(40 * MBIT, rel=0.05)
    # With all of them it is known for certain; one alone then proves no more than it carries, and what time gives.
    line.run(6, 10 * MBIT)
    assert line.meter.capacity_bits_per_s == pytest.approx(10 * MBIT, rel=0.05)
    line.run(4, 10 * MBIT, busy=1)
    assert 10 * MBIT < line.meter.capacity_bits_per_s < 14 * MBIT


def test_bytes_that_wait_for_a_consumer_do_not_wait_for_the_link() -> None:
    meter = LinkMeter(100 * MBIT, 0.0)
    for tick in range(1, 200):
        sample = report(queued_bytes=10**9, waiting_bytes=10**9, acked_bytes_total=tick * 1000)
        meter.observe({"p/0": SenderSample.of_report(sample, tick / 10)}, tick / 10)
    assert meter.capacity_bits_per_s == 100 * MBIT
    assert meter.queued_bytes == 10**9


def test_a_restarted_producer_starts_again_from_nothing() -> None:
    meter = LinkMeter(100 * MBIT, 0.0)
    for now_s, total in ((1.0, 5000), (1.1, 6000), (1.2, 200)):
        meter.observe({"p/0": SenderSample.of_report(report(acked_bytes_total=total), now_s)}, now_s)
    assert meter.acked_bytes == 1000 + 200


def test_retransmissions_are_a_share_of_the_segments() -> None:
    meter = LinkMeter(100 * MBIT, 0.0)
    for now_s, acked, again in ((1.0, 0, 0), (1.5, 144_800, 25)):
        sample = report(acked_bytes_total=acked, retransmits_total=again)
        meter.observe({"p/0": SenderSample.of_report(sample, now_s)}, now_s)
    assert meter.retransmit_ratio == pytest.approx(25 / 125)


def test_up_needs_a_connection_where_there_should_be_one() -> None:
    meter = LinkMeter(100 * MBIT, 0.0)

    def tell(now_s: float, **changes: int) -> None:
        meter.observe({"p/0": SenderSample.of_report(report(**changes), now_s)}, now_s)

    tell(1.0)
    tell(2.0, connections_up=0)
    assert meter.is_connected(2.0)
    tell(3.0, connections_up=0)
    assert not meter.is_connected(3.0)
    tell(4.0, connections_up=1)
    assert meter.is_connected(4.0)
    tell(9.0, connections_up=0, connections=0)
    assert meter.is_connected(9.0)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.integers(0, 10**9), st.integers(0, 10**9), st.booleans(), st.integers(0, 4)
        ),
        max_size=60,
    )
)
def test_capacity_stays_between_its_limits(looks: list[tuple[float, int, int, bool, int]]) -> None:
    meter, now_s = LinkMeter(100 * MBIT, 0.0), 0.0
    for wait_s, queued, acked, there, up in looks:
        now_s += wait_s
        sample = report(queued_bytes=queued, acked_bytes_total=acked, connections_up=up)
        samples = {"p/0": SenderSample.of_report(sample, now_s)} if there else {}
        assert meter.observe(samples, now_s) >= 0
        assert 1 * MBIT <= meter.capacity_bits_per_s <= 100 * MBIT
        assert meter.egress_bits_per_s(now_s) >= 0
        assert 0 <= meter.retransmit_ratio <= 1


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
