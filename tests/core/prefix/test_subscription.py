"""Whatever is lost on the way, between two drops every batch of one process is applied once and in order."""

import itertools
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix.events import REPLAY_TIMEOUT_S, Apply, Drop, EventBatch, Step, Subscription


def batch(sequence: int, process: int = 0) -> EventBatch:
    return EventBatch(1000.0 * process + sequence, [], None)


class Reader:
    """Carries steps out: `applied` since the last drop, and what is asked for."""

    def __init__(self) -> None:
        self.subscription = Subscription()
        self.applied: list[float] = []
        self.asked: int | None = None
        self.drops: list[str] = []

    def take(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Apply):
                self.applied.append(step.batch.at_s)
            elif isinstance(step, Drop):
                self.drops.append(step.reason)
                self.applied.clear()
            else:
                self.asked = step.sequence

    def live(self, *sequences: int, process: int = 0, now_s: float = 0.0) -> None:
        for sequence in sequences:
            self.take(self.subscription.live(sequence, batch(sequence, process), now_s))

    def replay(self, *sequences: int, process: int = 0, now_s: float = 0.0) -> None:
        for sequence in sequences:
            self.take(self.subscription.replayed(sequence, batch(sequence, process), now_s))
        self.take(self.subscription.replay_ended(now_s))


def started() -> Reader:
    reader = Reader()
    reader.take(reader.subscription.start(0.0))
    assert reader.asked == 0
    return reader


def test_late_start_begins_with_a_replay() -> None:
    reader = started()
    reader.live(3)
    assert reader.applied == []
    reader.replay(0, 1, 2, 3)
    reader.live(4)
    assert (reader.applied, reader.drops) == ([0, 1, 2, 3, 4], [])


def test_a_gap_is_asked_for() -> None:
    reader = started()
    reader.replay()
    reader.live(0, 1, 4)
    assert (reader.applied, reader.asked) == ([0, 1], 2)
    reader.live(5)
    reader.replay(2, 3, 4)
    assert (reader.applied, reader.drops) == ([0, 1, 2, 3, 4, 5], [])
    assert (reader.subscription.gaps, reader.subscription.sequence) == (1, 5)


def test_a_replay_without_its_beginning_drops() -> None:
    reader = started()
    reader.replay(0, 1)
    reader.live(9)
    reader.replay(7, 8, 9)
    assert (reader.applied, reader.drops) == ([7, 8, 9], ["gap"])


def test_a_replay_that_was_cut_is_asked_for_again() -> None:
    reader = started()
    reader.replay(0, 1, 4, 5)
    assert (reader.applied, reader.asked) == ([0, 1], 2)
    reader.replay(2, 3, 4, 5)
    assert (reader.applied, reader.drops) == ([0, 1, 2, 3, 4, 5], [])


def test_no_answer_in_time_goes_on_without() -> None:
    reader = started()
    reader.take(reader.subscription.tick(REPLAY_TIMEOUT_S))
    reader.live(0, 1, now_s=3.0)
    assert (reader.applied, reader.drops) == ([0, 1], [])
    reader.live(5, 6, now_s=4.0)
    reader.take(reader.subscription.tick(5.0))
    assert reader.applied == [0, 1]
    reader.take(reader.subscription.tick(4.0 + REPLAY_TIMEOUT_S))
    assert (reader.applied, reader.drops) == ([5, 6], ["unanswered"])


def test_a_replay_is_waited_for_while_it_says_something() -> None:
    reader = started()
    for sequence in range(4):
        reader.take(reader.subscription.tick(1.5 * sequence + 1.4))
        reader.take(reader.subscription.replayed(sequence, batch(sequence), 1.5 * sequence + 1.5))
    assert reader.applied == [0, 1, 2, 3]
    reader.take(reader.subscription.tick(6.0 + REPLAY_TIMEOUT_S))
    assert not reader.subscription.is_replaying


def test_a_gap_the_replay_cannot_fill_drops() -> None:
    reader = started()
    reader.replay(0)
    reader.live(3)
    reader.replay()
    assert (reader.applied, reader.drops) == ([3], ["unanswered"])


def test_being_told_of_a_restart() -> None:
    reader = started()
    reader.replay(0, 1)
    reader.take(reader.subscription.restarted(1.0, "died"))
    assert (reader.applied, reader.drops, reader.asked) == ([], ["died"], 0)
    reader.replay(0, process=1)
    reader.live(1, process=1)
    assert reader.applied == [1000, 1001]


def test_late_answers_are_ignored() -> None:
    reader = started()
    reader.replay(0)
    reader.replay(1, 2)
    assert reader.applied == [0]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.6), kept=st.integers(1, 30), restarts=st.booleans())
def test_between_drops_nothing_is_missed_or_doubled(
    seed: int, loss: float, kept: int, restarts: bool
) -> None:
    """An engine that keeps `kept` batches for replays, on a line that loses live and replayed ones."""
    chance = random.Random(seed)
    reader, now_s, process = started(), 0.0, 0
    published: list[int] = []
    for _ in range(chance.randrange(1, 80)):
        now_s += chance.choice((0.0, 0.1, 1.0))
        reader.take(reader.subscription.tick(now_s))
        if restarts and chance.random() < 0.05:
            process, published = process + 1, []
            # Numbers alone can't tell a restart that lost more batches than there were before: somebody says so.
            reader.take(reader.subscription.restarted(now_s, "new-process"))
        elif reader.asked is not None and chance.random() < 0.5:
            asked, reader.asked = reader.asked, None
            there = [sequence for sequence in published[-kept:] if sequence >= asked]
            if chance.random() >= loss:
                lossless = chance.random() < 0.5
                told = [sequence for sequence in there if lossless or chance.random() >= loss]
                reader.replay(*told, process=process, now_s=now_s)
        else:
            published.append(len(published))
            if chance.random() >= loss:
                reader.live(published[-1], process=process, now_s=now_s)
        times = reader.applied
        assert all(after == before + 1 for before, after in itertools.pairwise(times))
        assert not times or times[-1] // 1000 == process
        if not reader.drops and times:
            assert times[0] == 0
    # Once nothing is lost any more, all that the engine still keeps is applied.
    for _ in range(3):
        published.append(len(published))
        reader.live(published[-1], process=process, now_s=now_s)
        while reader.asked is not None:
            asked, reader.asked = reader.asked, None
            there = [sequence for sequence in published[-kept:] if sequence >= asked]
            reader.replay(*there, process=process, now_s=now_s)
        now_s += REPLAY_TIMEOUT_S
        reader.take(reader.subscription.tick(now_s))
    assert reader.applied[-1] == 1000 * process + published[-1]
