import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.layers import ChunkedWindow, FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import Group, KvModel

LENGTHS = st.integers(0, 5000)
BLOCKS = st.sampled_from([1, 16, 128, 256])
SMALL = st.integers(1, 8)

full = st.builds(FullAttention, layers=SMALL, kv_heads=SMALL, head_size_k=SMALL, head_size_v=SMALL)
window = st.builds(
    SlidingWindow,
    layers=SMALL,
    kv_heads=SMALL,
    head_size_k=SMALL,
    head_size_v=SMALL,
    window_tokens=st.integers(1, 600),
)
chunk = st.builds(
    ChunkedWindow,
    layers=SMALL,
    kv_heads=SMALL,
    head_size_k=SMALL,
    head_size_v=SMALL,
    window_tokens=st.integers(1, 600),
)
linear = st.builds(LinearState, layers=SMALL, conv_bytes=SMALL, recurrent_bytes=SMALL)
groups: st.SearchStrategy[Group] = st.one_of(full, window, chunk, linear)
models = st.builds(KvModel, name=st.just("any"), groups=st.lists(groups, min_size=1, max_size=4).map(tuple))


@given(models, LENGTHS, LENGTHS, BLOCKS)
def test_what_is_held_never_costs_more(model: KvModel, one: int, other: int, block: int) -> None:
    skip, num = sorted((one, other))
    assert 0 <= model.bytes_to_move(num, skip, block) <= model.bytes_to_move(num, 0, block)


@given(full, LENGTHS, LENGTHS, LENGTHS)
def test_full_attention_adds_up(group: FullAttention, a: int, b: int, c: int) -> None:
    a, b, c = sorted((a, b, c))
    assert group.bytes_to_move(b, a) + group.bytes_to_move(c, b) == group.bytes_to_move(c, a)
    assert group.bytes_to_move(c, 0) == group.bytes_at(c)


@given(models, LENGTHS, LENGTHS, BLOCKS)
def test_whole_blocks_cost_less_than_one_more_at_each_end(
    model: KvModel, one: int, other: int, block: int
) -> None:
    skip, num = sorted((one, other))
    exact = model.bytes_to_move(num, skip)
    rounded = model.bytes_to_move(num, skip, block)
    ends = sum(2 * (block - 1) * g.token_bytes for g in model.groups if not isinstance(g, LinearState))
    assert exact <= rounded <= exact + ends


@given(window, LENGTHS)
def test_a_window_moves_what_the_next_token_sees(group: SlidingWindow, num: int) -> None:
    # The token to be computed takes one place of the window itself.
    assert group.bytes_to_move(num, 0) == min(num, group.window_tokens - 1) * group.token_bytes
    assert group.bytes_to_move(num, num) == group.bytes_to_move(num, 0)


@given(chunk, LENGTHS)
def test_a_chunk_moves_what_the_next_token_sees(group: ChunkedWindow, num: int) -> None:
    assert group.bytes_to_move(num, 0) == num % group.window_tokens * group.token_bytes
    assert group.bytes_to_move(num, num) == group.bytes_to_move(num, 0)
    # Once the next token is there, its chunk holds it too.
    assert group.bytes_at(num + 1) == group.bytes_to_move(num, 0) + group.token_bytes


def test_a_chunk_empties_at_its_end() -> None:
    group = ChunkedWindow(1, 1, 1, 1, 8, 1)
    assert [group.bytes_at(tokens) // 2 for tokens in (0, 1, 7, 8, 9, 16, 17)] == [0, 1, 7, 8, 1, 8, 1]
    # A block of 3 that begins before the chunk's first token moves whole; at a chunk's end there is nothing to move.
    assert [group.bytes_to_move(tokens, 0, 3) // 2 for tokens in (7, 8, 9, 10, 15)] == [9, 0, 3, 6, 9]
    assert group.describe() == "1 chunks of 8 (1 heads of 1+1), 2 B per token in it"
    assert isinstance(ChunkedWindow(1, 8, 1, 1, 8).per_rank(4), ChunkedWindow)


@given(models, st.lists(LENGTHS, min_size=1, max_size=5))
def test_arrays_are_the_single_sizes_of_any_model(model: KvModel, tokens: list[int]) -> None:
    assert model.kv_bytes(np.array(tokens)).tolist() == [model.kv_bytes(each) for each in tokens]
    assert [model.kv_bytes(float(each)) for each in tokens] == [model.kv_bytes(each) for each in tokens]


@given(linear, st.integers(1, 5000), st.data())
def test_state_moves_once_and_whole(group: LinearState, num: int, data: st.DataObject) -> None:
    skip = data.draw(st.integers(0, num))
    assert group.bytes_to_move(num, skip, 256) == group.layers * group.state_bytes == group.bytes_at(num)


def test_nothing_moves_for_no_token() -> None:
    for group in (FullAttention(2, 2, 64, 64), SlidingWindow(2, 2, 64, 64, 128), LinearState(2, 10, 20)):
        assert group.bytes_to_move(0, 0) == group.bytes_at(0) == 0


def test_blocks_held_in_part_move_again() -> None:
    group = FullAttention(layers=1, kv_heads=1, head_size_k=1, head_size_v=1, dtype_bytes=1)
    assert group.bytes_to_move(300, 255, 128) == 2 * 2 * 128
    assert group.bytes_to_move(300, 256, 128) == 1 * 2 * 128


@pytest.mark.parametrize(("num", "skip", "block"), [(5, 6, 1), (5, -1, 1), (5, 0, 0), (-1, 0, 1)])
def test_impossible_spans_are_refused(num: int, skip: int, block: int) -> None:
    for group in (FullAttention(1, 1, 1, 1), SlidingWindow(1, 1, 1, 1, 8), LinearState(1, 1, 1)):
        with pytest.raises(ValueError):
            group.bytes_to_move(num, skip, block)
