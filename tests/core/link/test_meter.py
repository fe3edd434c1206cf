"""What a link can carry, from what arrives over it and from what its senders tell, by a link that is modelled."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.link.meter import LinkMeter
from prfaas.core.link.samples import ArrivalSample, SenderSample

MBIT = 1e6
RTT_S = 0.03


def arrival_of(at_s: float, nbytes: int, rtt_s: float = 0.0) -> ArrivalSample:
    return ArrivalSample(
        at_s=at_s, bytes_total=nbytes, segments_total=nbytes // 100, mss_bytes=100, rtt_s=rtt_s, connections=4
    )


class Path:
    """Producers and one consumer on a link of `carries` bit/s, looked at ten times a second.

    The network holds up to `queue_s` of it; words of senders come a round trip late, as the network's queue has it.
    """

    def __init__(
        self, configured: float, *, producers: int = 1, pace: float | None = None, queue_s: float = 0.0
    ) -> None:
        self.meter = LinkMeter(configured, 0.0, 2.5)
        self.carries = configured
        self.now_s = 0.0
        self.producers = producers
        self.pace = configured / producers if pace is None else pace
        self.queue_s = queue_s
        self.ready_bytes = 0.0
        self.in_network_bytes = 0.0
        self.arrived_bytes = 0.0
        self.sent_bytes = self.resent_bytes = 0.0
        self.cpu_share = 1.0
        """Of the time in which the kernel has something to send."""
        self.receiver_stops = False
        self.dark = False
        self.heard: dict[str, SenderSample] = {}
        self.words: list[tuple[float, dict[str, SenderSample]]] = []
        self.late_s = 0.0
        """More than the round trip."""
        self.consumer_sees_rtt = True
        self.fits_into_network = False
        """All that is ready is in flight or lost, and nothing waits in a sender's kernel."""
        self.waits_for_timers = False
        """Nothing is sent though the network would carry it, and words come."""
        self.busy_s = self.limited_s = 0.0
        self.filler_bytes = 0.0
        self.capacities: list[tuple[float, float]] = []

    def run(
        self, seconds: float, offered: float = 0.0, *, keep_bytes: float = 0.0, busy: int | None = None
    ) -> None:
        """`offered` bit/s of KV are made; or there is always `keep_bytes` of it ready, at `busy` producers."""
        busy = self.producers if busy is None else busy
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.ready_bytes += offered * 0.1 / 8
            waiting = math.inf if keep_bytes else self.ready_bytes + self.filler_bytes
            send = min(waiting, self.pace * busy * self.cpu_share * 0.1 / 8)
            room = max(self.queue_s * self.carries / 8 + self.carries * 0.1 / 8 - self.in_network_bytes, 0.0)
            if self.receiver_stops or self.dark or self.waits_for_timers:
                send = room = 0.0
            through = min(send, room)
            self.sent_bytes += send
            self.resent_bytes += send - through
            if not keep_bytes:
                of_work = min(through, self.ready_bytes)
                self.ready_bytes -= of_work
                self.filler_bytes = max(self.filler_bytes - (through - of_work), 0.0)
            self.in_network_bytes += through
            out = (
                0.0
                if self.receiver_stops or self.dark
                else min(self.in_network_bytes, self.carries * 0.1 / 8)
            )
            self.in_network_bytes -= out
            self.arrived_bytes += out
            self.busy_s += 0.4 if send else 0.0
            self.limited_s += 0.4 if self.receiver_stops else 0.0
            self.ready_bytes = max(self.ready_bytes, keep_bytes)
            is_filled = self.ready_bytes + self.filler_bytes > 1000 and self.cpu_share >= 1
            self._look(busy if is_filled and not self.fits_into_network else 0)

    def _look(self, filled: int) -> None:
        rtt_s = RTT_S + 8 * self.in_network_bytes / self.carries
        words = {
            f"p{number}/0": SenderSample(
                at_s=self.now_s,
                pace_bits_per_s=self.pace,
                queued_bytes=int((self.ready_bytes + self.in_network_bytes) / self.producers),
                waiting_bytes=0,
                open_bytes=int((self.ready_bytes + self.in_network_bytes) / self.producers),
                acked_bytes_total=0,
                unsent_bytes=100_000 if number < filled else 0,
                filled_connections=4 if number < filled else 0,
                delivery_bits_per_s=0.0,
                rtt_s=rtt_s,
                least_rtt_s=RTT_S,
                sent_bytes_total=int(self.sent_bytes / self.producers),
                resent_bytes_total=int(self.resent_bytes / self.producers),
                busy_s_total=self.busy_s,
                receiver_limited_s_total=self.limited_s,
                connections_up=4,
                connections=4,
            )
            for number in range(self.producers)
        }
        if not self.dark:
            self.words.append((self.now_s + rtt_s + self.late_s, words))
        while self.words and self.words[0][0] <= self.now_s:
            self.heard = self.words.pop(0)[1]
        arrival = arrival_of(self.now_s, int(self.arrived_bytes), rtt_s if self.consumer_sees_rtt else 0.0)
        heard = {name: each for name, each in self.heard.items() if each.at_s > self.now_s - 3}
        self.meter.observe(heard, {"c/0": arrival}, self.now_s)
        self.filler_bytes += self.meter.probe_bytes(self.now_s)
        self.capacities.append((self.now_s, self.meter.capacity_bits_per_s))

    def believed_s(self, low: float, high: float, since_s: float) -> float:
        """How long after `since_s` the capacity came to stay between these."""
        outside = [at_s for at_s, capacity in self.capacities if not low <= capacity <= high]
        return max([at_s for at_s in outside if at_s > since_s], default=since_s) + 0.1 - since_s


def changes(path: Path, since_s: float) -> int:
    """How often a threshold would be searched: each change by more than 30 %."""
    announced, count = path.meter.configured_bits_per_s, 0
    for at_s, capacity in path.capacities:
        if abs(capacity - announced) > 0.3 * announced:
            announced, count = capacity, count + (at_s > since_s)
    return count


@pytest.mark.parametrize("queue_s", [0.0, 0.3])
@pytest.mark.parametrize("ready_mb", [2, 5, 10, 15, 20, 40])
def test_a_tenfold_drop_is_believed_within_three_seconds(ready_mb: int, queue_s: float) -> None:
    path = Path(200 * MBIT, queue_s=queue_s)
    path.run(5, keep_bytes=ready_mb * 1e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    path.carries = 20 * MBIT
    path.run(35, keep_bytes=ready_mb * 1e6)
    assert path.believed_s(15 * MBIT, 25 * MBIT, 5.0) <= 3.0
    assert changes(path, 5.0) <= 2
    assert path.meter.congestion > 0


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_drop_below_what_is_made_is_believed_though_the_queue_was_empty(share: float) -> None:
    path = Path(200 * MBIT, queue_s=0.3)
    path.run(5, share * 200 * MBIT)
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    path.carries = 20 * MBIT
    path.run(20, share * 200 * MBIT)
    assert path.believed_s(15 * MBIT, 25 * MBIT, 5.0) <= 3.0


def test_a_drop_is_believed_while_words_of_senders_are_late() -> None:
    path = Path(200 * MBIT, queue_s=0.3)
    path.run(5, keep_bytes=20e6)
    path.carries, path.late_s = 20 * MBIT, 6.0
    path.run(6, keep_bytes=20e6)
    assert path.believed_s(15 * MBIT, 25 * MBIT, 5.0) <= 3.0
    path.late_s = 0.0
    path.run(20, keep_bytes=20e6)
    assert path.believed_s(15 * MBIT, 25 * MBIT, 5.0) <= 3.0


def test_what_a_late_word_spoke_of_fills_the_link_until_it_has_come() -> None:
    path = Path(200 * MBIT, queue_s=0.3)
    path.consumer_sees_rtt = False
    path.run(5, keep_bytes=60e6)
    # Neither end sees a queue grow, so the proof takes longer.
    path.carries, path.late_s = 100 * MBIT, 6.0
    path.run(3, keep_bytes=60e6)
    assert path.meter.capacity_bits_per_s == pytest.approx(100 * MBIT, rel=0.25)


def test_a_network_that_holds_all_that_is_ready_is_full() -> None:
    path = Path(200 * MBIT, queue_s=0.3)
    path.fits_into_network = True
    path.run(5, keep_bytes=2e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    path.carries = 20 * MBIT
    path.run(10, keep_bytes=2e6)
    assert path.believed_s(15 * MBIT, 25 * MBIT, 5.0) <= 3.0


def test_connections_that_wait_for_their_timers_are_no_slow_link() -> None:
    path = Path(200 * MBIT)
    path.run(5, keep_bytes=20e6)
    path.waits_for_timers = True
    path.run(5, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT


@pytest.mark.parametrize("follows", [False, True], ids=["pace as configured", "pace as the meter says"])
def test_a_recovery_under_load_is_believed_within_five_seconds(follows: bool) -> None:
    path = Path(200 * MBIT)
    path.carries = 20 * MBIT
    path.run(10, keep_bytes=20e6)
    path.carries = 200 * MBIT
    for _ in range(50):
        if follows:
            path.pace = min(path.meter.pace_bits_per_s, 200 * MBIT)
        path.run(0.1, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s >= 150 * MBIT


def test_a_recovery_without_work_is_found_by_probes() -> None:
    path = Path(200 * MBIT)
    path.carries = 20 * MBIT
    path.run(10, keep_bytes=20e6)
    path.ready_bytes = 0.0
    path.run(5)
    assert path.meter.capacity_bits_per_s == pytest.approx(20 * MBIT, rel=0.25)
    path.carries = 200 * MBIT
    path.run(8)
    assert path.meter.capacity_bits_per_s >= 150 * MBIT
    probed = path.arrived_bytes
    path.run(20)
    assert path.arrived_bytes == probed  # a link that is not slow is left alone


def test_probes_of_a_link_that_stays_slow_take_a_bounded_part_of_it() -> None:
    path = Path(200 * MBIT)
    path.carries = 20 * MBIT
    path.run(10, keep_bytes=20e6)
    path.ready_bytes = path.in_network_bytes = 0.0
    before = path.arrived_bytes
    path.run(60)
    assert path.meter.capacity_bits_per_s == pytest.approx(20 * MBIT, rel=0.25)
    assert 8 * (path.arrived_bytes - before) / 60 <= 0.5 * 20 * MBIT


def test_what_is_not_full_says_nothing() -> None:
    path = Path(100 * MBIT)
    path.run(60, 30 * MBIT)
    assert path.meter.capacity_bits_per_s == 100 * MBIT
    assert path.meter.condition(path.now_s) == "clear"


def test_one_producer_at_its_own_pace_does_not_lower_the_link() -> None:
    path = Path(100 * MBIT, producers=4)
    path.run(20, keep_bytes=20e6, busy=1)
    assert path.meter.egress_bits_per_s(path.now_s) == pytest.approx(25 * MBIT, rel=0.05)
    assert path.meter.capacity_bits_per_s == 100 * MBIT
    assert path.meter.condition(path.now_s) == "busy"


def test_a_pace_that_was_told_is_no_slow_link() -> None:
    path = Path(100 * MBIT)
    path.run(5, keep_bytes=20e6)
    path.pace = 30 * MBIT
    path.run(20, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s == 100 * MBIT


def test_a_sender_without_cpu_is_no_slow_link() -> None:
    path = Path(200 * MBIT)
    path.run(5, keep_bytes=20e6)
    path.cpu_share = 0.6
    path.run(20, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    assert path.meter.condition(path.now_s) == "slow-sender"
    path.cpu_share = 1.0
    path.run(3, keep_bytes=20e6)
    assert path.meter.condition(path.now_s) == "busy"


def test_a_stalled_receiver_is_no_slow_link() -> None:
    path = Path(200 * MBIT)
    path.run(5, keep_bytes=20e6)
    path.receiver_stops = True
    path.run(5, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    path.receiver_stops = False
    path.run(5, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT


def test_a_receiver_that_reads_slowly_is_no_slow_link() -> None:
    path = Path(200 * MBIT)
    path.run(5, keep_bytes=20e6)
    path.cpu_share, path.carries = 1.0, 100 * MBIT
    for _ in range(50):
        path.limited_s += 0.2
        path.run(0.1, keep_bytes=20e6)
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    assert path.meter.condition(path.now_s) == "slow-receiver"


@pytest.mark.parametrize("frozen_s", [5, 20])
def test_a_frozen_link_is_not_up_and_keeps_its_capacity(frozen_s: int) -> None:
    path = Path(200 * MBIT, queue_s=0.1)
    path.run(5, keep_bytes=20e6)
    path.dark = True
    path.run(frozen_s, keep_bytes=20e6)
    assert not path.meter.is_up(path.now_s)
    assert path.meter.condition(path.now_s) == "unheard"
    assert path.meter.capacity_bits_per_s == 200 * MBIT
    assert path.meter.probe_bytes(path.now_s) == 0
    path.dark = False
    path.run(1, keep_bytes=20e6)
    assert path.meter.is_up(path.now_s)
    assert path.meter.capacity_bits_per_s == 200 * MBIT


def test_a_slow_link_does_not_grow_while_it_is_dark() -> None:
    path = Path(200 * MBIT)
    path.carries = 20 * MBIT
    path.run(10, keep_bytes=20e6)
    path.ready_bytes, path.dark = 0.0, True
    before = path.meter.capacity_bits_per_s
    path.run(60)
    assert path.meter.capacity_bits_per_s == before


def test_random_loss_is_no_congestion_and_a_hundredth_lost_is() -> None:
    path = Path(100 * MBIT)
    for share, congested in ((0.001, False), (0.05, True), (0.001, False)):
        for _ in range(50):
            path.resent_bytes += share * 100 * MBIT * 0.1 / 8
            path.run(0.1, 90 * MBIT)
        assert (path.meter.congestion > 0) is congested
    assert path.meter.network.retransmit_ratio == pytest.approx(0.001, rel=0.2)


def test_a_restarted_consumer_starts_again_from_nothing() -> None:
    meter = LinkMeter(100 * MBIT, 0.0, 2.5)
    for now_s, total in ((1.0, 5000), (1.1, 6000), (1.2, 200)):
        meter.observe({}, {"c/0": arrival_of(now_s, total)}, now_s)
    assert meter.carried_bytes == 1000 + 200


def test_up_needs_a_connection_where_there_should_be_one() -> None:
    path = Path(100 * MBIT)
    path.run(1, 10 * MBIT)
    (word,) = path.heard.values()

    def tell(now_s: float, up: int, wanted: int = 4) -> bool:
        from dataclasses import replace

        path.meter.observe({"p": replace(word, at_s=now_s, connections_up=up, connections=wanted)}, {}, now_s)
        return path.meter.is_up(now_s)

    assert [tell(2.0, 4), tell(3.0, 0), tell(4.0, 0), tell(5.0, 1), tell(9.0, 0, 0)] == [True] * 2 + [
        False
    ] + [True] * 2


_LOOK = st.tuples(
    st.floats(0.01, 3),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.sampled_from(["both", "sender", "consumer", "none"]),
    st.integers(0, 4),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
)


@given(st.lists(_LOOK, max_size=60))
def test_whatever_is_told_the_meter_keeps_its_bounds(
    looks: list[tuple[float, int, int, str, int, float, float]],
) -> None:
    meter, now_s = LinkMeter(100 * MBIT, 0.0, 2.5), 0.0
    for wait_s, queued, total, who, up, rtt_s, resent in looks:
        now_s += wait_s
        word = SenderSample(
            at_s=now_s,
            pace_bits_per_s=50 * MBIT,
            queued_bytes=queued,
            waiting_bytes=0,
            open_bytes=queued,
            acked_bytes_total=total,
            unsent_bytes=queued,
            filled_connections=up,
            delivery_bits_per_s=0.0,
            rtt_s=rtt_s,
            least_rtt_s=rtt_s / 2,
            sent_bytes_total=total,
            resent_bytes_total=int(resent * total),
            busy_s_total=rtt_s,
            receiver_limited_s_total=0.0,
            connections_up=up,
            connections=4,
        )
        senders = {"p/0": word} if who in ("both", "sender") else {}
        arrivals = {"c/0": arrival_of(now_s, total, rtt_s)} if who in ("both", "consumer") else {}
        before = meter.capacity_bits_per_s
        assert meter.observe(senders, arrivals, now_s) >= 0
        assert 1 * MBIT <= meter.capacity_bits_per_s <= 100 * MBIT
        if who == "none":
            assert meter.capacity_bits_per_s == before
        assert meter.egress_bits_per_s(now_s) >= 0
        assert 0 <= meter.network.retransmit_ratio <= 1
        assert 0 <= meter.congestion <= 1
        assert meter.probe_bytes(now_s) <= 100 * MBIT / 8
        assert meter.pace_bits_per_s == math.inf or meter.pace_bits_per_s <= 2 * 0.9 * 100 * MBIT
        assert not (meter.is_up(now_s) and meter.condition(now_s) in ("down", "unheard"))


@given(st.floats(0.02, 0.8), st.floats(0.0, 0.4), st.floats(0.5, 40), st.integers(0, 9))
def test_the_estimate_of_any_drop_is_within_a_quarter(
    share: float, queue_s: float, ready_mb: float, phase: int
) -> None:
    path = Path(200 * MBIT, queue_s=queue_s)
    path.run(3 + phase / 10, keep_bytes=ready_mb * 1e6)
    since_s = path.now_s
    path.carries = share * 200 * MBIT
    path.run(10, keep_bytes=ready_mb * 1e6)
    assert path.believed_s(0.75 * path.carries, 1.25 * path.carries, since_s) <= 3.0
    assert changes(path, since_s) <= 2
