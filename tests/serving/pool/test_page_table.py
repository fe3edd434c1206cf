"""The states of many pages at once are those of each."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.pool.page_table import PageState, PageTable, are_readable, row_bytes
from prfaas.serving.pool.processes import Owner

ROWS, RANKS = 9, 3
OWNER = Owner(1, 2, bytes(8))


def table_with(states: list[int]) -> tuple[PageTable, list[int]]:
    """A table whose first rows have these states, and their slots."""
    table = PageTable(memoryview(bytearray(ROWS * row_bytes(RANKS))), RANKS)
    slots = []
    for row, state in enumerate(states):
        slots.append(table.begin(row, PageState.WRITING, bytes(17), OWNER, bytes(8), 0))
        table.set_state(row, state)  # type: ignore[arg-type]  # also what no daemon of today writes
    return table, slots


@given(
    st.lists(st.integers(0, 9), max_size=ROWS),
    st.lists(st.tuples(st.integers(0, ROWS + 3), st.integers(0, 2)), max_size=12),
)
def test_states_of_many_are_the_state_of_each(states: list[int], asked: list[tuple[int, int]]) -> None:
    table, _ = table_with(states)
    slots = [row | use << 32 for row, use in asked]
    assert table.states(slots).tolist() == [table.state(slot) for slot in slots]
    assert table.are_readable(slots) == all(table.state(slot).is_readable for slot in slots)


@given(st.lists(st.booleans(), max_size=ROWS))
def test_one_page_to_verify_is_found_among_others(flags: list[bool]) -> None:
    table, slots = table_with([PageState.READY] * len(flags))
    for row, flag in enumerate(flags):
        table.set_must_verify(row, flag)
    to_verify = table.checksums_to_verify(slots, 1)
    assert [slot in to_verify for slot in slots] == flags


def test_what_is_readable() -> None:
    numbers = np.array(list(PageState), np.uint8)
    assert are_readable(numbers).tolist() == [state.is_readable for state in PageState]
