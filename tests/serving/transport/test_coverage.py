from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.transport.protocol.coverage import Coverage

ranges = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(ranges, max_size=30), ranges)
def test_same_as_a_set_of_bytes(added: list[tuple[int, int]], probe: tuple[int, int]) -> None:
    """Invariant: a byte that came twice counts once."""
    coverage, model = Coverage(), set[int]()
    for start, end in added:
        new = coverage.add(start, end)
        assert new == len(set(range(start, end)) - model)
        model |= set(range(start, end))
        intervals = list(zip(coverage._starts, coverage._ends, strict=True))
        assert sum(end - start for start, end in intervals) == len(model)
        assert {byte for low, high in intervals for byte in range(low, high)} == model
        flat = [edge for interval in intervals for edge in interval]
        assert all(low < high for low, high in pairwise(flat))
    assert coverage.overlap_bytes(*probe) == len(model & set(range(*probe)))
    end = probe[0]
    while end in model:
        end += 1
    assert coverage.end_from(probe[0]) == end
