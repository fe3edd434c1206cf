"""Groups and regions as both kinds of engine compute them."""

import subprocess
import sys

import pytest

from prfaas.core.kv.groups import (
    GroupKind,
    KvGroup,
    Region,
    full_attention_first,
    region_bytes,
)

FULL = KvGroup(2, GroupKind.FULL, 16, 0)
STATE = KvGroup(0, GroupKind.STATE, 16, 0)
WINDOW = KvGroup(1, GroupKind.WINDOW, 8, 20)


@pytest.mark.parametrize(
    ("group", "num_tokens", "skip_tokens", "blocks"),
    [
        (FULL, 100, 0, range(7)),
        (FULL, 100, 40, range(2, 7)),
        (FULL, 96, 96, range(6, 6)),
        (STATE, 100, 40, range(6, 7)),
        (STATE, 96, 0, range(5, 6)),
        (WINDOW, 100, 0, range(10, 13)),
        (WINDOW, 7, 0, range(1)),
    ],
)
def test_moving_blocks(group: KvGroup, num_tokens: int, skip_tokens: int, blocks: range) -> None:
    assert group.moving_blocks(num_tokens, skip_tokens) == blocks


def test_regions_have_the_pages_of_their_moving_blocks() -> None:
    regions = [Region(FULL, 100), Region(STATE, 7), Region(WINDOW, 10)]
    assert region_bytes(regions, 100, 40) == [500, 7, 30]
    assert full_attention_first([STATE, WINDOW, FULL]) == [FULL, STATE, WINDOW]


@pytest.mark.parametrize(("num_tokens", "skip_tokens"), [(0, 0), (10, 11), (10, -1)])
def test_impossible_transfers(num_tokens: int, skip_tokens: int) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        region_bytes([Region(FULL, 100)], num_tokens, skip_tokens)


def test_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, prfaas.core.kv.groups; print({'torch', 'vllm'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
