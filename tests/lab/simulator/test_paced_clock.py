"""A batch whose pace changes: nothing of what is done is lost, and nothing is done twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.paced_clock import PacedClock


class Steps:
    """A clock of `slots` slots, and when each of its requests ended."""

    def __init__(self, step_s: float = 1.0, slots: int = 4) -> None:
        self.events = Events()
        self.ended_s: dict[str, float] = {}
        self.clock = PacedClock(self.events, lambda _batch: step_s, slots, lambda _: None, self._done)

    def _done(self, name: str) -> None:
        self.ended_s[name] = self.events.now_s


def test_a_pace_counts_from_now_on() -> None:
    steps = Steps()
    steps.clock.join(10, "a")
    steps.events.run(4.0)
    steps.clock.set_pace(lambda _batch: 3.0)
    steps.events.run(7.0)
    assert steps.clock.lacking_tokens == pytest.approx(5.0)
    steps.clock.set_pace(lambda _batch: 0.5)
    steps.events.run(100.0)
    assert steps.ended_s == {"a": pytest.approx(9.5)}


def test_who_leaves_tells_what_it_lacks() -> None:
    steps = Steps(slots=1)
    first = steps.clock.join(10, "a")
    steps.clock.join(7, "b")
    steps.events.run(4.0)
    assert list(steps.clock.members) == ["a"]
    assert steps.clock.leave(first) == pytest.approx(6.0)
    assert list(steps.clock.members) == ["b"]
    steps.events.run(100.0)
    assert steps.ended_s == {"b": pytest.approx(11.0)}
    assert steps.clock.batch == 0 and steps.clock.lacking_tokens == 0


def test_who_has_left_is_no_member() -> None:
    steps = Steps()
    steps.clock.join(3, "a")
    number = steps.clock.join(10, "b")
    steps.events.run(1.0)
    steps.clock.leave(number)
    assert list(steps.clock.members) == ["a"] and steps.clock.lacking_tokens == pytest.approx(2.0)


@given(
    st.lists(st.tuples(st.floats(0.01, 5.0), st.floats(0.1, 4.0)), max_size=6),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_all_tokens_are_made_at_the_pace_of_their_time(
    changes: list[tuple[float, float]], tokens: list[int]
) -> None:
    steps = Steps(slots=8)
    for number, count in enumerate(tokens):
        steps.clock.join(count, str(number))
    pace_s, made, at_s = 1.0, 0.0, 0.0
    due_s: dict[str, float] = {}

    def pass_to(until_s: float) -> None:
        nonlocal made, at_s
        for number, count in enumerate(tokens):
            end_s = at_s + (count - made) * pace_s
            if str(number) not in due_s and end_s <= until_s:
                due_s[str(number)] = end_s
        made += (until_s - at_s) / pace_s
        at_s = until_s

    for passed_s, next_pace_s in changes:
        pass_to(at_s + passed_s)
        steps.events.run(at_s)
        pace_s = next_pace_s
        steps.clock.set_pace(lambda _batch, step_s=pace_s: step_s)  # type: ignore[misc]
    pass_to(at_s + 31 * pace_s + 1)
    steps.events.run(at_s)
    assert steps.ended_s.keys() == due_s.keys()
    for name, end_s in due_s.items():
        assert steps.ended_s[name] == pytest.approx(end_s, abs=1e-6)
