"""What a link's bytes have cost, whenever its price changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.link.cost import LinkCost

STEPS = st.lists(st.tuples(st.integers(0, 10**12), st.floats(0.0, 10.0)), max_size=20)


@given(first=st.floats(0.0, 10.0), steps=STEPS)
def test_each_byte_has_the_price_of_its_time(first: float, steps: list[tuple[int, float]]) -> None:
    cost = LinkCost(first)
    price, carried, owed = first, 0, 0.0
    for more, next_price in steps:
        carried += more
        owed += more / 1e9 * price
        assert cost.total(carried) == pytest.approx(owed)
        cost.reprice(next_price, carried)
        # A new price is not for what was.
        assert cost.total(carried) == pytest.approx(owed)
        price = next_price
