import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.traffic import prompt_ids

ids = st.integers(0, 2**63 - 1)


@given(
    st.lists(ids, min_size=1, max_size=6),
    st.lists(ids, max_size=4),
    st.lists(ids, max_size=4),
    st.integers(1, 600),
    st.integers(2, 200_000),
    st.integers(0, 500),
    st.data(),
)
def test_prompts_share_exactly_what_their_blocks_share(
    shared: list[int],
    one: list[int],
    other: list[int],
    size: int,
    vocabulary: int,
    first: int,
    data: st.DataObject,
) -> None:
    blocks, others = shared + one, shared + other
    count = data.draw(st.integers(0, len(blocks) * size))
    made = prompt_ids(blocks, size, count, vocabulary, first)
    assert len(made) == count and ((made >= first) & (made < first + vocabulary)).all()
    theirs = prompt_ids(others, size, len(others) * size, vocabulary, first)
    alike = min(count, len(shared) * size)
    assert np.array_equal(made[:alike], theirs[:alike])
    # A token knows its block and its place in it, nothing else.
    at = data.draw(st.integers(0, len(blocks) - 1))
    alone = prompt_ids([blocks[at]], size, size, vocabulary, first)
    assert np.array_equal(made[at * size : (at + 1) * size], alone[: max(0, min(size, count - at * size))])


def test_the_ids_are_the_same_in_every_process() -> None:
    assert prompt_ids([0, 1], 4, 8, 256).tolist() == [220, 231, 202, 162, 35, 24, 71, 108]


def test_different_blocks_have_nothing_in_common() -> None:
    """As good as random: over many neighbouring ids every value is as frequent, and equal tokens are by chance."""
    made = prompt_ids(np.arange(2000), 512, 2000 * 512, 256).reshape(2000, 512)
    counts = np.bincount(made.ravel(), minlength=256)
    expected = made.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 6 * np.sqrt(2 * 256)
    for places in (made[1:] == made[:-1], made[:, 1:] == made[:, :-1], made[:, 5:6] == made[:, :5]):
        assert places.mean() == pytest.approx(1 / 256, rel=0.1)
    assert len({row.tobytes() for row in made}) == 2000


@pytest.mark.parametrize(
    "arguments", [([1], 4, 5, 256), ([1], 4, 4, 1), ([1], 4, 4, 2**31, 1), ([1], 4, -1, 9)]
)
def test_what_no_prompt_can_be(arguments: tuple[object, ...]) -> None:
    with pytest.raises(WorkloadError):
        prompt_ids(*arguments)  # type: ignore[arg-type]
