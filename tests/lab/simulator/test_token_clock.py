"""The decode instance against one that goes from change to change and counts every request's tokens."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.token_clock import StepGrowth, TokenClock

Plan = Sequence[tuple[float, float]]


def counted(
    plan: Plan, step_s: Callable[[int], float], slots: int
) -> tuple[dict[int, float], dict[int, float]]:
    """When each request of (arrival, tokens) gets its slot and is done; each counts its own tokens."""
    started: dict[int, float] = {}
    done: dict[int, float] = {}
    waiting: list[int] = []
    left: dict[int, float] = {}
    arrivals = sorted(range(len(plan)), key=lambda i: plan[i][0])
    now = 0.0
    while arrivals or left or waiting:
        rate = 1 / step_s(len(left)) if left else 0.0
        ends = [now + tokens / rate for tokens in left.values()]
        then = min([*ends, *(plan[i][0] for i in arrivals[:1])])
        for i in left:
            left[i] -= rate * (then - now)
        now = then
        for i in [i for i, tokens in left.items() if tokens < 1e-9]:
            del left[i]
            done[i] = now
        while arrivals and plan[arrivals[0]][0] <= now:
            waiting.append(arrivals.pop(0))
        while waiting and len(left) < slots:
            i = waiting.pop(0)
            started[i] = now
            if plan[i][1]:
                left[i] = plan[i][1]
            else:
                done[i] = now
    return started, done


def stepped(plan: Plan, step_s: Callable[[int], float], slots: int) -> dict[int, float]:
    """A real engine: whole steps, whoever has come by their beginning takes part."""
    done: dict[int, float] = {}
    waiting = sorted(range(len(plan)), key=lambda i: plan[i][0])
    left: dict[int, float] = {}
    now = 0.0
    while waiting or left:
        if not left:
            now = max(now, plan[waiting[0]][0])
        while waiting and len(left) < slots and plan[waiting[0]][0] <= now:
            i = waiting.pop(0)
            left[i] = plan[i][1]
        now += step_s(len(left))
        for i in list(left):
            left[i] -= 1
            if left[i] <= 0:
                del left[i]
                done[i] = now
    return done


class Recorder:
    """Runs a plan on a clock."""

    def __init__(self, step_s: Callable[[int], float], slots: int) -> None:
        self.events = Events()
        self.started_s: dict[int, float] = {}
        self.done_s: dict[int, float] = {}
        self._prompts: Sequence[int] = ()
        self.clock = TokenClock(self.events, step_s, slots, self._started, self._done)

    def let_steps_grow(self, context_s: float, prompts: Sequence[int], measured_tokens: float) -> None:
        """From now on steps take longer by the tokens in the batch, prompts and answers."""
        growth = StepGrowth(context_s, measured_tokens)
        self._prompts = prompts
        self.clock = TokenClock(self.events, growing, self.clock._slots, self._started, self._done, growth)

    def plan(self, plan: Plan) -> None:
        for i, (arrival_s, tokens) in enumerate(plan):
            self.events.at(arrival_s, self._join, (i, tokens))

    def _join(self, request: tuple[int, float]) -> None:
        self.clock.join(request[1], request[0], self._prompts[request[0]] if self._prompts else 0.0)

    def _started(self, i: int) -> None:
        assert i not in self.started_s
        self.started_s[i] = self.events.now_s

    def _done(self, i: int) -> None:
        assert i in self.started_s
        assert i not in self.done_s
        self.done_s[i] = self.events.now_s


def growing(batch: int) -> float:
    return 0.02 + 0.003 * batch


plans = st.lists(
    st.tuples(st.integers(0, 200).map(lambda n: n / 16), st.integers(0, 60)), min_size=1, max_size=14
)


@settings(max_examples=300)
@given(plans, st.integers(1, 6))
def test_starts_and_ends_are_those_of_the_fluid(plan: Plan, slots: int) -> None:
    started, done = counted(plan, growing, slots)
    run = Recorder(growing, slots)
    run.plan(plan)
    run.events.run(math.inf)
    assert run.started_s == pytest.approx(started, abs=1e-6)
    assert run.done_s == pytest.approx(done, abs=1e-6)
    slot_s = sum(done[i] - started[i] for i in done)
    assert run.clock.busy_slot_s == pytest.approx(slot_s, abs=1e-6)
    assert (run.clock.batch, run.clock.waiting) == (0, 0)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 200).map(lambda n: n / 16), st.integers(1, 60)), min_size=1, max_size=8)
)
def test_whole_steps_differ_by_little_more_than_a_step(plan: Plan) -> None:
    """Without a queue: a request waits for the step under way, and so does everyone's view of the batch.

    Each join or leave moves a boundary by at most one step's worth of difference in step time.
    """
    slots = len(plan)
    run = Recorder(growing, slots)
    run.plan(plan)
    run.events.run(math.inf)
    engine = stepped(plan, growing, slots)
    allowed_s = growing(slots) + 2 * slots * (growing(slots) - growing(1))
    for i in engine:
        assert run.done_s[i] == pytest.approx(engine[i], abs=allowed_s)


@given(plans)
def test_a_constant_step_and_enough_slots_are_exact(plan: Plan) -> None:
    run = Recorder(lambda _: 0.03, len(plan))
    run.plan(plan)
    run.events.run(math.inf)
    assert run.done_s == pytest.approx(
        {i: at + tokens * 0.03 for i, (at, tokens) in enumerate(plan)}, abs=1e-6
    )


def test_light_load_of_a_busy_instance() -> None:
    """M/M/infinity: exponential answers in ample slots keep load = rate × mean in the batch."""
    rng = np.random.default_rng(5)
    count = 40_000
    starts = np.cumsum(rng.exponential(0.1, count)).tolist()
    tokens = rng.exponential(100.0, count).tolist()
    run = Recorder(lambda _: 0.02, 200)
    run.plan(list(zip(starts, tokens, strict=True)))
    run.events.run(starts[-1])
    assert run.clock.busy_slot_s / starts[-1] == pytest.approx(0.02 * 100 / 0.1, rel=0.03)


def test_busy_time_and_queue_are_exact_at_any_time() -> None:
    run = Recorder(lambda batch: float(batch), 2)
    run.plan([(0.0, 3), (1.0, 2), (2.0, 5)])
    run.events.run(2.5)
    assert (run.clock.batch, run.clock.waiting) == (2, 1)
    assert run.clock.busy_slot_s == pytest.approx(1.0 + 2 * 1.5)
    run.events.run(math.inf)
    # 1 token alone, then half a token a second each: both end at 5; the third goes on alone.
    assert run.done_s == pytest.approx({0: 5.0, 1: 5.0, 2: 10.0})


def test_everybody_goes_when_the_instance_fails() -> None:
    run = Recorder(growing, 2)
    run.plan([(0.0, 30), (0.0, 0), (0.0, 10), (0.0, 20), (0.1, 40)])
    run.events.run(0.15)
    left = run.clock.drop_all()
    assert [i for i, _ in left] == [0, 2, 3, 4]
    got = 0.15 / growing(2)
    assert [tokens for _, tokens in left] == pytest.approx([30 - got, 10 - got, 20, 40])
    assert (run.clock.batch, run.clock.waiting) == (0, 0)
    assert run.clock.drop_all() == []
    busy = run.clock.busy_slot_s
    assert busy == pytest.approx(0.3)
    run.events.run(1.0)
    assert run.done_s == {1: 0.0}
    assert run.clock.busy_slot_s == busy
    run.clock.join(10, 9)
    run.events.run(math.inf)
    assert run.done_s[9] == pytest.approx(1.0 + 10 * growing(1))


def test_done_may_join_again() -> None:
    events = Events()
    ends: list[tuple[float, str]] = []

    def done(who: str) -> None:
        ends.append((events.now_s, who))
        if len(ends) < 4:
            clock.join(1, who)

    clock = TokenClock(events, lambda _: 1.0, 1, lambda _: None, done)
    clock.join(1, "a")
    clock.join(1, "b")
    events.run(math.inf)
    assert [who for _, who in ends] == ["a", "b", "a", "b", "a"]
    assert [end_s for end_s, _ in ends] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])


PROMPTS = (0, 1000, 20, 5000, 300, 40)
CONTEXT_S = 2e-6
_SLICE = 1 / 16


def sliced(plan: Plan, slots: int, measured_tokens: float) -> dict[int, float]:
    """When requests are done whose steps grow with their contexts, a sixteenth of a token after the other."""
    arrivals = sorted(range(len(plan)), key=lambda i: plan[i][0])
    waiting: list[int] = []
    left: dict[int, float] = {}
    contexts: dict[int, float] = {}
    done: dict[int, float] = {}
    now_s = 0.0
    while arrivals or waiting or left:
        while arrivals and plan[arrivals[0]][0] <= now_s + 1e-12:
            waiting.append(arrivals.pop(0))
        while waiting and len(left) < slots:
            i = waiting.pop(0)
            left[i], contexts[i] = plan[i][1], PROMPTS[i]
        if not left:
            now_s = plan[arrivals[0]][0]
            continue
        tokens = min(_SLICE, *left.values())
        over = sum(contexts.values()) + len(left) * (tokens / 2 - measured_tokens)
        passed_s = tokens * (growing(len(left)) + CONTEXT_S * over)
        if arrivals and plan[arrivals[0]][0] < now_s + passed_s:
            share = (plan[arrivals[0]][0] - now_s) / passed_s
            tokens, passed_s = share * tokens, share * passed_s
        now_s += passed_s
        for i in list(left):
            left[i] -= tokens
            contexts[i] += tokens
            if left[i] < 1e-9:
                del left[i], contexts[i]
                done[i] = now_s
    return done


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.integers(0, 200).map(lambda n: n / 16), st.integers(1, 60)), min_size=1, max_size=6
    ),
    st.integers(1, 4),
    st.sampled_from([0.0, 700.0]),
)
def test_steps_that_grow_with_contexts_are_those_of_small_slices(
    plan: Plan, slots: int, measured_tokens: float
) -> None:
    run = Recorder(growing, slots)
    run.let_steps_grow(CONTEXT_S, PROMPTS, measured_tokens)
    run.plan(plan)
    run.events.run(math.inf)
    assert run.done_s == pytest.approx(sliced(plan, slots, measured_tokens), abs=1e-4)
    assert (run.clock.batch, run.clock.waiting) == (0, 0)


@settings(max_examples=50)
@given(plans, st.integers(1, 6))
def test_a_step_that_does_not_grow_is_that_of_the_plain_clock(plan: Plan, slots: int) -> None:
    plain, run = Recorder(growing, slots), Recorder(growing, slots)
    run.let_steps_grow(0.0, [100] * len(plan), 0.0)
    for each in (plain, run):
        each.plan(plan)
        each.events.run(math.inf)
    assert run.done_s == pytest.approx(plain.done_s, abs=1e-6)
    assert run.clock.busy_slot_s == pytest.approx(plain.clock.busy_slot_s, abs=1e-6)


def test_contexts_can_not_take_longer_than_the_whole_step() -> None:
    run = Recorder(growing, 2)
    with pytest.raises(ValueError, match="contexts of 1000 tokens"):
        run.let_steps_grow(1e-4, [0], 1000.0)


def test_impossible_instances() -> None:
    def nothing(_: object) -> None: ...

    with pytest.raises(ValueError, match="at least one slot, not 0"):
        TokenClock(Events(), growing, 0, nothing, nothing)
    with pytest.raises(ValueError, match="0 s at 1"):
        TokenClock(Events(), lambda _: 0.0, 1, nothing, nothing)
