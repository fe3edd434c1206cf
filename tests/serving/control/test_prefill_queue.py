"""First in, first out: predictions, measurements, and what can't be measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.control.cluster_state import PrefillQueue


def test_work_waits_for_what_is_before_it() -> None:
    queue = PrefillQueue()
    first = queue.add(10.0, 2.0)
    second = queue.add(11.0, 3.0)
    assert queue.busy_until_s(11.0) == 15.0
    assert queue.remove(12.5, first) == 2.5
    assert queue.busy_until_s(12.5) == 15.5
    assert queue.remove(15.0, second) == 2.5
    assert (len(queue), queue.busy_until_s(20.0)) == (0, 15.0)


def test_service_starts_at_acceptance_when_idle() -> None:
    queue = PrefillQueue()
    queue.remove(5.0, queue.add(1.0, 9.0))
    assert queue.remove(13.0, queue.add(10.0, 1.0)) == 3.0


def test_overdue_work_ends_now_and_the_rest_still_waits() -> None:
    queue = PrefillQueue()
    queue.add(0.0, 1.0)
    queue.add(0.0, 5.0)
    assert queue.busy_until_s(3.0) == 8.0


def test_work_out_of_turn_is_no_measurement() -> None:
    queue = PrefillQueue()
    first, second = queue.add(0.0, 2.0), queue.add(0.0, 2.0)
    assert queue.remove(1.0, second) is None
    assert queue.busy_until_s(1.0) == 2.0
    assert queue.remove(2.0, first) == 2.0
    assert queue.remove(2.0, first) is None


def test_timed_work_leaves_by_itself() -> None:
    queue = PrefillQueue()
    queue.add(0.0, 2.0, timed=True)
    work = queue.add(1.0, 3.0)
    assert queue.busy_until_s(1.0) == 5.0
    assert len(queue) == 2
    assert queue.busy_until_s(4.0) == 5.0
    assert len(queue) == 1
    # It had the instance from the end of the work before it, not from its acceptance.
    assert queue.remove(5.5, work) == 3.5


def test_busy_seconds_count_each_second_once() -> None:
    queue = PrefillQueue()
    first, second = queue.add(1.0, 2.0), queue.add(2.0, 2.0)
    assert queue.busy_s(3.0) == 2.0
    queue.remove(3.0, second)
    queue.remove(4.0, first)
    assert queue.busy_s(9.0) == 3.0
    queue.add(10.0, 1.0, timed=True)
    assert queue.busy_s(99.0) == 4.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), st.sampled_from(["add", "timed", "remove"]), st.floats(0, 3), st.integers(0, 5)
        ),
        max_size=40,
    )
)
def test_accounting(moves: list[tuple[float, str, float, int]]) -> None:
    queue, now_s, ids, naive = PrefillQueue(), 0.0, list[int](), Naive()
    for wait_s, move, predicted_s, which in moves:
        now_s += wait_s
        if move == "remove":
            if ids:
                work = ids.pop(which % len(ids))
                assert queue.remove(now_s, work) == pytest.approx(naive.remove(now_s, work))
        else:
            work = queue.add(now_s, predicted_s, timed=move == "timed")
            naive.add(now_s, work, predicted_s, timed=move == "timed")
            ids.append(work)
        until_s = queue.busy_until_s(now_s)
        assert until_s == pytest.approx(naive.busy_until_s(now_s))
        assert until_s >= now_s or not len(queue)
        assert 0 <= queue.busy_s(now_s) <= now_s + 1e-6
    for work in ids:
        queue.remove(now_s, work)
    assert len(queue) == 0
    assert queue.busy_until_s(now_s) <= now_s
    assert queue.busy_s(now_s + 100) == pytest.approx(queue.busy_s(now_s))


class Naive:
    """The same queue without any sum that is carried on."""

    def __init__(self) -> None:
        self.open: list[tuple[int, float, bool]] = []
        self.head_start_s = 0.0

    def add(self, now_s: float, work: int, predicted_s: float, *, timed: bool) -> None:
        self.expire(now_s)
        if not self.open:
            self.head_start_s = now_s
        self.open.append((work, predicted_s, timed))

    def remove(self, now_s: float, work: int) -> float | None:
        self.expire(now_s)
        place = next((place for place, each in enumerate(self.open) if each[0] == work), None)
        if place is None:
            return None
        self.open.pop(place)
        if place > 0:
            return None
        start_s, self.head_start_s = self.head_start_s, now_s
        return now_s - start_s

    def busy_until_s(self, now_s: float) -> float:
        self.expire(now_s)
        if not self.open:
            return self.head_start_s
        rest_s = sum(predicted_s for _, predicted_s, _ in self.open[1:])
        return max(now_s, self.head_start_s + self.open[0][1]) + rest_s

    def expire(self, now_s: float) -> None:
        while self.open and self.open[0][2] and self.head_start_s + self.open[0][1] <= now_s:
            self.head_start_s += self.open.pop(0)[1]
