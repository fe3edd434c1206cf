"""What an engine tells of its layers, and what routing makes of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import REQUEST_TOKENS, GroupKind, KvGroup, Region, region_bytes
from prfaas.core.kv.told import read_told_layers, told_layers

FULL = KvGroup(0, GroupKind.FULL, 128, 0)
WINDOW = KvGroup(1, GroupKind.WINDOW, 64, 512)
STATE = KvGroup(2, GroupKind.STATE, 128, 0)
RING = KvGroup(3, GroupKind.STATE, REQUEST_TOKENS, 0)


def told(*regions: tuple[KvGroup, int, int]) -> Any:
    """As it comes over a wire."""
    return json.loads(json.dumps(told_layers(regions)))


def test_equal_layers_are_told_once() -> None:
    layers = told((FULL, 4096, 1), (STATE, 777, 1), (FULL, 4096, 1), (FULL, 512, 2))
    assert layers == [
        ["full_attention", 128, 0, 4096, 1, 2],
        ["linear_state", 128, 0, 777, 1, 1],
        ["full_attention", 128, 0, 512, 2, 1],
    ]


def test_what_ranks_keep_alike_counts_once() -> None:
    layers = told((FULL, 1280, 2), (FULL, 1280, 1), (RING, 99, 1))
    model = read_told_layers(layers, "m", 2)
    assert model.token_bytes == 10 + 2 * 10
    assert model.fixed_bytes == 2 * 99
    assert model.is_hybrid and model.has_linear_state and not model.has_window


regions = st.lists(
    st.tuples(
        st.sampled_from([FULL, WINDOW, STATE, RING]), st.integers(1, 300).map(lambda n: 64 * n), st.just(1)
    ),
    min_size=1,
    max_size=8,
)


@given(regions, st.integers(1, 5000), st.integers(0, 5000))
def test_bytes_are_those_of_the_engine_s_own_transfers(
    layers: list[tuple[KvGroup, int, int]], tokens: int, skip: int
) -> None:
    model = read_told_layers(told(*layers), "m", 1)
    skip = min(skip, tokens - 1)
    own = region_bytes([Region(group, nbytes) for group, nbytes, _ in layers], tokens, skip)
    assert model.bytes_to_move(tokens, skip) == sum(own)


@pytest.mark.parametrize(
    "layers",
    [
        None,
        [],
        {},
        ["full_attention"],
        [["full_attention", 128, 0, 4096, 1]],
        [["other", 128, 0, 4096, 1, 2]],
        [[["full_attention"], 128, 0, 4096, 1, 2]],
        [["full_attention", 0, 0, 4096, 1, 2]],
        [["full_attention", 128, 0, 0, 1, 2]],
        [["full_attention", 128, 0, 4096, 0, 2]],
        [["full_attention", 128, 0, 4096, 1, 0]],
        [["full_attention", 128, -1, 4096, 1, 2]],
        [["full_attention", True, 0, 4096, 1, 2]],
        [["full_attention", 128, 0, 4096.5, 1, 2]],
        [["full_attention", 128, 0, 1 << 50, 1, 2]],
        [["full_attention", 128, 0, 4096, 1, 2]] * 2000,
    ],
)
def test_what_is_no_such_list_is_refused(layers: object) -> None:
    with pytest.raises(ValueError, match=r"list of layers|a kind of layers"):
        read_told_layers(layers, "m", 1)
