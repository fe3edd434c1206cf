"""The link against a fluid that is worked out transfer by transfer: who shares what, and who is first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import outages

from prfaas.core.link.budget import max_min
from prfaas.lab.simulator.capacity import CapacityProcess, Constant, Fluctuating, Piece, Steps
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.link import FluidLink
from prfaas.lab.simulator.send_queue import FluidTransfer, Route

MBIT = 1e6
ROUTE: Route = ("far-0", "home-0")
OTHER: Route = ("far-1", "home-0")


@dataclass
class Job:
    """`prefill_s` 0: everything at once. `held_s`: what comes last comes so much after the prefill's end.

    `early`: in such a part of the prefill's time it makes such a part of what it streams, each evenly.
    """

    start_s: float
    streamed_bytes: float
    last_bytes: float
    prefill_s: float
    cancel_s: float = math.inf
    background: bool = False
    route: Route = ROUTE
    held_s: float = 0.0
    ends_by_itself: bool = True
    early: tuple[float, float] = (0.5, 0.5)

    @property
    def total_bits(self) -> float:
        return 8 * (self.streamed_bytes + self.last_bytes)

    @property
    def produced_s(self) -> float:
        """When its prefill ends."""
        return self.start_s + self.prefill_s

    @property
    def changes_s(self) -> float:
        """When it goes on at another rate."""
        return self.start_s + self.early[0] * self.prefill_s

    @property
    def ended_s(self) -> float:
        """When all of it is there."""
        return self.produced_s + self.held_s

    def there_bits(self, now_s: float) -> float:
        if now_s >= self.ended_s:
            return self.total_bits
        times_s = self.start_s, self.changes_s, self.produced_s
        part = np.interp(now_s, times_s, (0.0, self.early[1], 1.0))
        return float(8 * self.streamed_bytes * part)

    @property
    def rates(self) -> tuple[float, float]:
        """Before and after it changes, bits per second."""
        (time, part), bits_per_s = self.early, 8 * self.streamed_bytes / self.prefill_s
        return bits_per_s * part / time, bits_per_s * (1 - part) / (1 - time)

    def production(self, now_s: float) -> float:
        return self.rates[now_s >= self.changes_s] if now_s < self.produced_s else 0.0


@dataclass
class Fluid:
    """The oracle's answer: when everything is sent, and what had been sent in all at the breakpoints."""

    ends_s: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    sent_bits: list[float] = field(default_factory=list)


def waiting_bits(job: Job, sent_bits: float, now_s: float) -> float:
    """There and not sent; less than a little is rounding."""
    left_bits = job.there_bits(now_s) - sent_bits
    return left_bits if left_bits > 1e-7 + 1e-9 * job.total_bits else 0.0


@dataclass
class Member:
    """A job that is under way."""

    number: int
    job: Job
    production: float
    waits_bits: float
    turn: tuple[int, float, int]


def rates_of(members: Sequence[Member], capacity: float, limit: float) -> dict[int, float]:
    """What each sends, by number: first what is not in the background."""
    found: dict[int, float] = {}
    for background in (False, True):
        here = [each for each in members if each.job.background is background]
        found |= shared(here, max(capacity - sum(found.values()), 0.0), limit)
    return found


def shared(members: Sequence[Member], bits_per_s: float, limit: float) -> dict[int, float]:
    """Senders share alike, then the queues of each; a queue goes by turns."""
    queues: dict[Route, list[Member]] = {}
    for each in members:
        queues.setdefault(each.job.route, []).append(each)
    wants = {
        route: limit
        if any(each.waits_bits for each in queue)
        else min(sum(each.production for each in queue), limit)
        for route, queue in queues.items()
    }
    senders = list(dict.fromkeys(sender for sender, _ in queues))
    of_sender = [sum(bits for route, bits in wants.items() if route[0] == sender) for sender in senders]
    found: dict[int, float] = {}
    for sender, part in zip(senders, max_min(bits_per_s, of_sender), strict=True):
        routes = [route for route in queues if route[0] == sender]
        for route, rate in zip(routes, max_min(part, [wants[route] for route in routes]), strict=True):
            left = rate
            for each in sorted(queues[route], key=lambda each: each.turn):
                found[each.number] = min(left, math.inf if each.waits_bits else each.production)
                left -= found[each.number]
    return found


def fluid(jobs: Sequence[Job], pieces: Sequence[Piece], limit: float) -> Fluid:
    """From breakpoint to breakpoint; every job keeps its own account of what is there and what is sent."""
    answer = Fluid(ends_s=[math.inf] * len(jobs))
    sent = [0.0] * len(jobs)
    gone: set[int] = set()
    now = 0.0
    fixed = {0.0, *(time for time, _ in pieces)}
    for job in jobs:
        fixed |= {job.start_s, job.changes_s, job.produced_s, job.ended_s, job.cancel_s}
    # Transfers are counted as they begin.
    counted = {i: n for n, i in enumerate(sorted(range(len(jobs)), key=lambda i: jobs[i].start_s))}
    while True:
        members = []
        for i, job in enumerate(jobs):
            if job.cancel_s <= now:
                gone.add(i)
            if i in gone or job.start_s > now:
                continue
            waits_bits, has_ended = waiting_bits(job, sent[i], now), now >= job.ended_s
            if has_ended and not waits_bits:
                answer.ends_s[i] = now
                gone.add(i)
                continue
            turn = (0, job.ended_s, counted[i]) if has_ended else (1, job.start_s, counted[i])
            members.append(Member(i, job, job.production(now), waits_bits, turn))
        capacity = [bits for time, bits in pieces if time <= now][-1]
        rates = rates_of(members, capacity, limit)
        answer.times_s.append(now)
        answer.sent_bits.append(sum(sent))
        if len(gone) == len(jobs):
            return answer
        later = [time for time in fixed if time > now]
        for each in members:
            faster = rates[each.number] - each.production
            if each.waits_bits and faster > 1e-9 * each.production:
                later.append(now + each.waits_bits / faster)
        then = min(time for time in later if time > now)
        for number, rate in rates.items():
            sent[number] += rate * (then - now)
        now = then


class Recorder:
    """Runs jobs on a link and notes when they have arrived."""

    def __init__(self, capacity: CapacityProcess, rtt_s: float = 0.0, limit: float = math.inf, seed: int = 0):
        self.events = Events()
        rng = np.random.default_rng(seed)
        self.link = FluidLink(
            self.events, "wan", capacity, rng=rng, rtt_s=rtt_s, transfer_limit_bits_per_s=limit
        )
        self.arrived_s: dict[int, float] = {}

    def plan(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.transfers: dict[int, FluidTransfer] = {}
        for i, job in enumerate(jobs):
            self.events.at(job.start_s, self._start, i)
            if job.cancel_s < math.inf:
                self.events.at(job.cancel_s, self._cancel, i)

    def _start(self, i: int) -> None:
        job = self.jobs[i]
        if job.prefill_s:
            if job.held_s:
                self.events.at(job.produced_s, self._hold, i)
                self.events.at(job.ended_s, self._release, i)
            made = self.link.stream(
                job.route,
                job.streamed_bytes,
                job.last_bytes,
                job.prefill_s,
                self.arrived,
                i,
                job.ends_by_itself,
            )
            if job.early[0] != job.early[1]:
                before, after = job.rates
                self.link.produce_at(made, before)
                self.events.at(job.changes_s, self._change, (made, after))
            if not job.ends_by_itself:
                self.events.at(job.produced_s, self.link.end_production, made)
        else:
            nbytes = job.streamed_bytes + job.last_bytes
            made = self.link.send(job.route, nbytes, self.arrived, i, background=job.background)
        self.transfers[i] = made

    def _change(self, change: tuple[FluidTransfer, float]) -> None:
        self.link.produce_at(*change)

    def _hold(self, i: int) -> None:
        self.link.hold(self.transfers[i])

    def _release(self, i: int) -> None:
        self.link.release(self.transfers[i])

    def _cancel(self, i: int) -> None:
        self.link.cancel(self.transfers[i])

    def arrived(self, i: int) -> None:
        assert i not in self.arrived_s
        self.arrived_s[i] = self.events.now_s


times = st.integers(0, 40).map(lambda n: n / 4)
sizes = st.integers(1, 60).map(float)


@st.composite
def jobs_of(draw: st.DrawFn, may_cancel: bool = False) -> list[Job]:
    jobs = []
    for _ in range(draw(st.integers(1, 9))):
        start = draw(times)
        prefill_s = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.25]))
        cancel = start + draw(st.integers(1, 40)) / 7 if may_cancel and draw(st.booleans()) else math.inf
        streamed, last = draw(st.one_of(st.just(0.0), sizes)), draw(st.one_of(st.just(0.0), sizes))
        if not prefill_s and not streamed:
            last += 1.0
        background = not prefill_s and draw(st.booleans())
        route = (
            draw(st.sampled_from(["far-0", "far-1", "far-2"])),
            draw(st.sampled_from(["home-0", "home-1"])),
        )
        held_s = draw(st.sampled_from([0.0, 0.0, 0.4, 2.5])) if prefill_s else 0.0
        ends = draw(st.booleans())
        early = draw(
            st.sampled_from([(0.5, 0.5), (0.5, 0.5), (0.25, 0.6), (0.7, 0.1), (0.4, 0.0), (0.6, 1.0)])
        )
        jobs.append(Job(start, streamed, last, prefill_s, cancel, background, route, held_s, ends, early))
    return jobs


@given(st.data())
def test_who_ends_a_stream_changes_no_bit(data: st.DataObject) -> None:
    jobs = data.draw(jobs_of(may_cancel=True))
    ended = [data.draw(st.booleans()) for _ in jobs]
    found = []
    for some in ([True] * len(jobs), ended):
        recorder = Recorder(Constant(20.0), rtt_s=0.3)
        recorder.plan([replace(job, ends_by_itself=own) for job, own in zip(jobs, some, strict=True)])
        recorder.events.run(math.inf)
        found.append((recorder.arrived_s, recorder.link.sent_bits, recorder.link.open_transfers))
    assert found[0] == found[1]


def test_a_stream_that_came_all_at_once_has_no_end_of_its_own() -> None:
    recorder = Recorder(Constant(8.0))
    made = recorder.link.stream(ROUTE, 3.0, 2.0, 0.0, recorder.arrived, 0, ends_by_itself=False)
    recorder.link.end_production(made)
    recorder.events.run(math.inf)
    recorder.link.end_production(made)
    assert recorder.arrived_s == {0: pytest.approx(5.0)}


@st.composite
def steps_of(draw: st.DrawFn) -> tuple[Piece, ...]:
    bits = st.one_of(st.just(0.0), st.integers(1, 900).map(float))
    middle = [(time, draw(bits)) for time in sorted(draw(st.sets(times, max_size=5)) - {0.0})]
    return ((0.0, draw(bits)), *middle, (30.0, float(draw(st.integers(20, 500)))))


limits = st.one_of(st.just(math.inf), st.integers(5, 300).map(float))


@pytest.mark.slow("a property over many random systems")
@settings(max_examples=400)
@given(jobs_of(), steps_of(), limits, st.sampled_from([0.0, 0.125]))
def test_arrivals_and_bits_are_those_of_the_fluid(
    jobs: list[Job], pieces: tuple[Piece, ...], limit: float, rtt_s: float
) -> None:
    expected = fluid(jobs, pieces, limit)
    run = Recorder(Steps(pieces), rtt_s, limit)
    run.plan(jobs)
    accepted_bits = 0.0
    last_s, last_sent = 0.0, 0.0
    for probe in range(60):
        now_s = probe * 0.77
        run.events.run(now_s)
        sent = run.link.sent_bits
        assert sent == pytest.approx(
            np.interp(now_s, expected.times_s, expected.sent_bits), abs=1e-4, rel=1e-6
        )
        accepted_bits = sum(8 * (job.streamed_bytes + job.last_bytes) for job in jobs if job.start_s <= now_s)
        assert run.link.residual_bytes == pytest.approx((accepted_bits - sent) / 8, abs=1e-4)
        capacity = [bits for time, bits in pieces if time <= now_s][-1]
        assert run.link.capacity_bits_per_s == capacity
        assert 0 <= run.link.rate_bits_per_s <= capacity * (1 + 1e-9) + 1e-9
        passed = max(bits for _, bits in pieces) * (now_s - last_s)
        assert -1e-6 <= sent - last_sent <= passed + 1e-4
        last_s, last_sent = now_s, sent
    run.events.run(math.inf)
    assert [run.arrived_s[i] - rtt_s for i in range(len(jobs))] == pytest.approx(expected.ends_s, abs=1e-5)
    assert run.link.open_transfers == 0
    assert run.link.residual_bytes == 0
    for i, job in enumerate(jobs):
        assert run.arrived_s[i] >= job.ended_s + rtt_s - 1e-9


@pytest.mark.slow("a property over many random systems")
@settings(max_examples=300)
@given(jobs_of(may_cancel=True), steps_of(), limits)
def test_who_is_cancelled_leaves_its_share_to_the_others(
    jobs: list[Job], pieces: tuple[Piece, ...], limit: float
) -> None:
    expected = fluid(jobs, pieces, limit)
    run = Recorder(Steps(pieces), 0.0, limit)
    run.plan(jobs)
    run.events.run(math.inf)
    for i, job in enumerate(jobs):
        if abs(expected.ends_s[i] - job.cancel_s) > 1e-5:
            assert run.arrived_s.get(i, math.inf) == pytest.approx(expected.ends_s[i], abs=1e-5)
    assert run.link.open_transfers == 0
    assert run.link.residual_bytes == pytest.approx(0, abs=1e-6)
    assert run.link.sent_bits == pytest.approx(expected.sent_bits[-1], abs=1e-3)


@pytest.mark.parametrize("capacity", [Fluctuating(60 * MBIT, 0.4, 5.0), outages(60 * MBIT, 8.0, 2.0)])
def test_random_capacities_are_followed(capacity: CapacityProcess) -> None:
    """Rates of a real link and a longer run: the oracle gets the same draws."""
    rng = np.random.default_rng(3)
    starts = np.cumsum(rng.exponential(0.5, 150)).tolist()
    jobs = [
        Job(
            start,
            float(rng.integers(1, 4_000_000)),
            float(rng.integers(0, 900_000)),
            float(rng.exponential(1.0)),
        )
        for start in starts
    ]
    drawn = capacity.changes(np.random.default_rng(9))
    pieces = [next(drawn) for _ in range(400)]
    run = Recorder(capacity, seed=9)
    run.plan(jobs)
    run.events.run(math.inf)
    expected = fluid(jobs, pieces, math.inf)
    assert [run.arrived_s[i] for i in range(len(jobs))] == pytest.approx(expected.ends_s, abs=1e-5)


@pytest.mark.slow("a mean needs thousands of transfers")
@pytest.mark.parametrize("senders", [1, 64])
@pytest.mark.parametrize(("load", "is_varied", "tolerance"), [(0.5, True, 0.045), (0.8, False, 0.08)])
def test_mean_sojourn_in_turn_and_in_parallel(
    load: float, is_varied: bool, tolerance: float, senders: int
) -> None:
    """One sender is M/G/1: E[T] = E[S] + load E[S²] / 2 E[S] (1 - load) (Pollaczek and Khinchine). Many of which each
    has one transfer are M/G/1-PS: E[T] = E[S] / (1 - load) whatever the sizes. Tolerances are three standard
    deviations of this run."""
    rng = np.random.default_rng(11)
    count, mean_bytes, capacity = 60_000, 1e6, 1e9
    starts = np.cumsum(rng.exponential(mean_bytes * 8 / capacity / load, count)).tolist()
    if is_varied:
        sizes_bytes = np.where(rng.random(count) < 0.9, 0.5, 5.5) * rng.exponential(mean_bytes, count)
    else:
        sizes_bytes = rng.uniform(1, 2 * mean_bytes, count)
    run = Recorder(Constant(capacity))
    run.plan(
        [
            Job(start, size, 0.0, 0.0, route=(f"far-{i % senders}", "home-0"))
            for i, (start, size) in enumerate(zip(starts, sizes_bytes.tolist(), strict=True))
        ]
    )
    run.events.run(math.inf)
    service_s = sizes_bytes * 8 / capacity
    if senders == 1:
        expected_s = service_s.mean() + load * (service_s**2).mean() / (2 * service_s.mean() * (1 - load))
    else:
        expected_s = service_s.mean() / (1 - load)
    sojourn_s = np.mean([run.arrived_s[i] - starts[i] for i in range(count)])
    assert sojourn_s == pytest.approx(expected_s, rel=tolerance)
    assert run.link.sent_bits == pytest.approx(sizes_bytes.sum() * 8, rel=1e-12)


def test_an_uncontended_stream_arrives_with_its_prefill() -> None:
    run = Recorder(Constant(100 * MBIT), rtt_s=0.03)
    run.plan([Job(0.0, 1e6, 0.0, 2.0), Job(0.0, 1e6, 5e5, 4.0)])
    run.events.run(1.0)
    assert run.link.rate_bits_per_s == pytest.approx(4e6 + 2e6)
    assert run.link.sent_bits == pytest.approx(6e6)
    assert run.link.residual_bytes == pytest.approx(2.5e6 - 6e6 / 8)
    assert run.link.open_transfers == 2
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({0: 2.03, 1: 4.0 + 4e6 / 100e6 + 0.03})


def test_a_transfer_gets_no_more_than_its_connections_carry() -> None:
    run = Recorder(Constant(100 * MBIT), limit=10 * MBIT)
    run.plan(
        [
            Job(0.0, 10e6 / 8, 0.0, 0.0),
            Job(0.0, 40e6 / 8, 0.0, 1.0, route=OTHER),
            Job(5.0, 5e6 / 8, 0.0, 1.0),
        ]
    )
    run.events.run(0.5)
    assert run.link.rate_bits_per_s == pytest.approx(20 * MBIT)
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({0: 1.0, 1: 4.0, 2: 6.0})


def test_what_a_slow_production_leaves_is_for_the_others() -> None:
    """2 Mbit/s are produced; the one that has everything gets the other 8 of 10."""
    run = Recorder(Constant(10 * MBIT))
    run.plan([Job(0.0, 20e6 / 8, 0.0, 10.0), Job(0.0, 16e6 / 8, 0.0, 0.0, route=OTHER)])
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({0: 10.0, 1: 2.0})


def test_an_outage_stalls_and_nothing_is_lost() -> None:
    run = Recorder(Steps(((0.0, 10 * MBIT), (1.0, 0.0), (4.0, 10 * MBIT))))
    run.plan([Job(0.0, 20e6 / 8, 0.0, 0.0)])
    run.events.run(2.0)
    assert run.link.capacity_bits_per_s == 0
    assert run.link.rate_bits_per_s == 0
    assert run.link.sent_bits == pytest.approx(10e6)
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({0: 5.0})


def test_nothing_is_scheduled_between_transfers() -> None:
    run = Recorder(Fluctuating(10 * MBIT, 0.3, 10.0))
    run.events.run(math.inf)
    assert run.events.now_s == 0
    run.events.run(1000.5)
    drawn = Fluctuating(10 * MBIT, 0.3, 10.0).changes(np.random.default_rng(0))
    pieces = [next(drawn) for _ in range(1002)]
    assert run.link.capacity_bits_per_s == pieces[1000][1]
    run.link.send(ROUTE, 1e6, run.arrived, 0)
    run.events.run(math.inf)
    assert run.arrived_s[0] < 1010
    assert not run.events.heap


def test_nothing_to_send_arrives_after_the_way() -> None:
    run = Recorder(Steps(((0.0, 0.0),)), rtt_s=0.1)
    run.plan([Job(1.0, 0.0, 0.0, 0.0), Job(1.0, 0.0, 0.0, 2.0)])
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({0: 1.1, 1: 3.1})


def test_done_may_cancel_and_start_others() -> None:
    run = Recorder(Constant(8.0))
    link = run.link

    def first_done(_: int) -> None:
        link.cancel(second)
        link.cancel(second)
        link.send(ROUTE, 1.0, run.arrived, 7)

    link.send(ROUTE, 2.0, first_done, 0)
    second = link.send(OTHER, 2.0, run.arrived, 1)
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({7: 5.0})
    link.cancel(second)
    assert link.open_transfers == 0


def test_on_its_way_a_transfer_can_still_be_cancelled() -> None:
    run = Recorder(Constant(8.0), rtt_s=1.0)
    transfer = run.link.send(ROUTE, 1.0, run.arrived, 0)
    run.events.run(1.5)
    assert run.link.open_transfers == 1
    assert run.link.residual_bytes == 0
    run.link.cancel(transfer)
    run.events.run(math.inf)
    assert run.arrived_s == {}
    assert run.link.sent_bits == 8


@pytest.mark.parametrize(
    ("options", "words"), [({"rtt_s": -1.0}, "round trip"), ({"limit": 0.0}, "One transfer")]
)
def test_impossible_links(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recorder(Constant(1.0), **options)


def test_what_is_in_the_background_gets_what_is_left() -> None:
    run = Recorder(Constant(10.0))
    run.plan(
        [
            Job(0.0, 7.5, 0.0, 10.0),  # 6 bit/s for 10 s
            Job(0.0, 0.0, 10.0, 0.0, background=True),  # 80 bits: 4 bit/s, none from 5 s to 10 s
            Job(5.0, 0.0, 2.0, 0.0, route=OTHER),  # 16 bits at 5 bit/s
        ]
    )
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({2: 8.2, 0: 10.0, 1: 15.6})
    assert run.link.residual_bytes == 0


def test_of_one_sender_those_whose_prefill_has_ended_go_first_and_short_ones_overtake() -> None:
    """At 8 bit/s. The stream of 2 bit/s waits from 1 s on. The short one is due at 2 + 1 s, the long one at 1 + 4 s."""
    run = Recorder(Constant(8.0))
    run.link.paced_bits_per_s = 8.0
    run.plan([Job(0.0, 2.0, 0.0, 8.0), Job(1.0, 0.0, 4.0, 0.0), Job(2.0, 0.0, 1.0, 0.0)])
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({2: 3.0, 1: 6.0, 0: 8.0})


def test_what_is_held_back_keeps_its_turn_until_it_is_released() -> None:
    """At 8 bit/s: its stream is behind when it stops, and the other one follows it until the rest comes."""
    run = Recorder(Constant(8.0))
    run.plan([Job(0.0, 2.0, 1.0, 1.0, held_s=2.0), Job(0.5, 40.0, 0.0, 10.0)])
    run.events.run(2.5)
    assert run.link.open_transfers == 2
    run.events.run(math.inf)
    assert run.arrived_s[0] == pytest.approx(4.0)
    run.link.release(run.transfers[0])
    assert run.link.open_transfers == 0


def test_a_transfer_ends_filler() -> None:
    run = Recorder(Constant(8.0))
    run.link.fill(100.0)
    run.events.run(1.0)
    assert run.link.is_full
    run.link.send(ROUTE, 2.0, run.arrived, 0)
    run.link.fill(100.0)
    run.events.run(math.inf)
    assert run.arrived_s == pytest.approx({0: 3.0})
    assert run.link.sent_bits == pytest.approx(8.0 + 16.0)
    assert run.link.open_transfers == 0
    run.link.fill(1.0)
    run.events.run(math.inf)
    assert run.link.sent_bits == pytest.approx(8.0 + 16.0 + 8.0)
