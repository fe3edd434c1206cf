"""The pool of prefills that wait for an instance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.prefill_pool import PrefillPool


def test_the_most_urgent_is_next_and_equals_go_in_the_order_of_coming() -> None:
    pool: PrefillPool[str] = PrefillPool()
    for item, urgency_s in (("late", 9.0), ("first", 1.0), ("second", 1.0)):
        pool.offer(item, urgency_s, 2.0, now_s=0.0)
    assert pool.waiting_s == 6.0
    assert [pool.take("a", now_s=0.0) for _ in range(4)] == ["first", "second", "late", None]
    assert pool.waiting_s == 0.0


def test_what_is_bound_waits_for_its_instance() -> None:
    pool: PrefillPool[str] = PrefillPool()
    pool.offer("bound", 1.0, 3.0, only="a", now_s=0.0)
    pool.offer("free", 2.0, 1.0, now_s=0.0)
    assert pool.waiting_s == 1.0
    assert pool.take("b", now_s=0.0) == "free"
    assert pool.take("b", now_s=0.0) is None
    assert pool.take("a", now_s=0.0) == "bound"


def test_what_was_bound_to_an_instance_that_left_goes_anywhere() -> None:
    pool: PrefillPool[str] = PrefillPool()
    pool.offer("bound", 1.0, 3.0, only="a", now_s=0.0)
    pool.release("a")
    assert pool.waiting_s == 3.0
    assert pool.take("b", now_s=0.0) == "bound"


def test_it_knows_what_those_waited_that_were_taken() -> None:
    pool: PrefillPool[str] = PrefillPool()
    pool.offer("at once", 0.0, 9.0, now_s=5.0)
    pool.take("a", now_s=5.0)
    pool.offer("bound", 1.0, 3.0, only="a", now_s=5.0)
    pool.offer("free", 2.0, 1.0, now_s=6.0)
    pool.offer("gone", 0.0, 50.0, now_s=6.0)
    pool.withdraw("gone")
    pool.release("a")
    assert pool.take("b", now_s=8.0) == "bound"
    assert pool.take("b", now_s=11.0) == "free"
    assert pool.waits.mean_prefill_s == 2.0
    assert pool.waits.mean_wait_s == (3.0 * 3.0 + 5.0 * 1.0) / 4.0


Step = tuple[str, int, float, int]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offer", "take", "withdraw", "release"]),
            st.integers(0, 3),
            st.floats(0, 100),
            st.integers(0, 1000),
        ),
        max_size=60,
    )
)
def test_as_a_list_that_is_sorted_each_time(steps: list[Step]) -> None:
    pool: PrefillPool[int] = PrefillPool()
    plain: list[tuple[float, int, str | None, float]] = []
    names = (None, "a", "b", "c")
    for number, (what, which, urgency_s, pick) in enumerate(steps):
        name = names[which]
        if what == "offer":
            pool.offer(number, urgency_s, urgency_s + 1, name, now_s=0.0)
            plain.append((urgency_s, number, name, urgency_s + 1))
        elif what == "take":
            able = [entry for entry in plain if entry[2] in (None, name or "a")]
            expected = min(able, default=None)
            assert pool.take(name or "a", now_s=0.0) == (None if expected is None else expected[1])
            plain = [entry for entry in plain if entry is not expected]
        elif what == "withdraw":
            gone = plain[pick % len(plain)][1] if plain else -1
            assert pool.withdraw(gone) == bool(plain)
            plain = [entry for entry in plain if entry[1] != gone]
        else:
            pool.release(name or "a")
            plain = [(u, n, None if only == (name or "a") else only, w) for u, n, only, w in plain]
        assert len(pool) == len(plain)
        assert pool.waiting_s == pytest.approx(sum(w for _, _, only, w in plain if only is None), abs=1e-6)
