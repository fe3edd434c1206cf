"""Every batch is applied once and in order, or the reader is told why not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix import Gap, SequenceGuard


def test_batches_in_their_order_are_applied() -> None:
    guard = SequenceGuard()
    assert [guard.offer(number, number * 1.0) for number in range(3)] == ["apply"] * 3


def test_a_gap_is_named_until_it_is_filled() -> None:
    guard = SequenceGuard()
    assert guard.offer(0, 1.0) == "apply"
    assert guard.offer(3, 4.0) == Gap(1, 2)
    assert guard.offer(3, 4.0) == Gap(1, 2)
    assert [guard.offer(number, number + 1.0) for number in (1, 2, 3)] == ["apply"] * 3
    assert guard.offer(2, 3.0) == "duplicate"


def test_a_late_reader_misses_the_beginning() -> None:
    guard = SequenceGuard()
    assert guard.offer(7, 1.0) == Gap(0, 6)
    guard.skip_to(7)
    assert guard.offer(7, 1.0) == "apply"
    assert guard.offer(8, 1.0) == "apply"


def test_what_was_skipped_is_not_taken_back() -> None:
    guard = SequenceGuard()
    assert guard.offer(9, 9.0) == Gap(0, 8)
    guard.skip_to(9)
    assert guard.offer(9, 9.0) == "apply"
    assert guard.offer(4, 4.0) == "duplicate"
    guard.skip_to(5)
    assert guard.offer(5, 5.0) == "duplicate"


def test_a_new_process_is_known_by_its_later_clock() -> None:
    guard = SequenceGuard()
    for number in range(10):
        guard.offer(number, number * 1.0)
    assert guard.offer(2, 30.0) == "restart"
    assert guard.offer(2, 30.0) == Gap(0, 1)
    assert guard.offer(0, 28.0) == "apply"


def test_a_first_batch_that_differs_is_a_new_process_even_if_its_clock_was_set_back() -> None:
    guard = SequenceGuard()
    for number in range(3):
        guard.offer(number, 100.0 + number)
    assert guard.offer(0, 100.0) == "duplicate"
    assert guard.offer(0, 50.0) == "restart"
    assert guard.offer(0, 50.0) == "apply"
    assert guard.offer(1, 51.0) == "apply"


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_whatever_arrives_each_process_is_applied_in_order_and_once(
    arrivals: list[tuple[bool, int]],
) -> None:
    """Batches of two processes, the second started later; a restart costs the first one's place."""
    guard = SequenceGuard()
    applied: list[tuple[bool, int]] = []
    for second, number in arrivals:
        at_s = (1000.0 if second else 0.0) + number
        offer = guard.offer(number, at_s)
        if offer == "restart":
            applied.clear()
            offer = guard.offer(number, at_s)
        if offer == "apply":
            applied.append((second, number))
        elif isinstance(offer, Gap):
            assert offer == Gap(len(applied), number - 1)
    assert [number for _, number in applied] == list(range(len(applied)))
