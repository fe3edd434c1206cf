"""What the ranks of a tensor-parallel instance hold together."""

import pytest

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel

# https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json: 12 full-attention layers of 2 KV heads of 256,
# 36 gated delta nets of 16 key and 32 value heads of 128, convolutions of 4.
QWEN3_NEXT = KvModel(
    "qwen3-next",
    (
        FullAttention(12, 2, 256, 256),
        LinearState.gated_delta_net(
            36, key_heads=16, value_heads=32, key_head_size=128, value_head_size=128, conv_kernel=4
        ),
    ),
)
# DeepSeek-V3: 61 layers of one latent of 512 + 64.
MLA = KvModel("mla", (FullAttention(61, 1, 576, 0),))


def test_two_heads_on_four_ranks_are_there_twice() -> None:
    sent = QWEN3_NEXT.on_all_ranks(4)
    assert sent.token_bytes == 2 * QWEN3_NEXT.token_bytes
    # Its states' heads are divided: no byte more.
    assert sent.fixed_bytes == QWEN3_NEXT.fixed_bytes
    assert sent.kv_bytes(32_768) == QWEN3_NEXT.kv_bytes(32_768) + 32_768 * QWEN3_NEXT.token_bytes


def test_every_rank_keeps_the_latent() -> None:
    assert MLA.on_all_ranks(8).kv_bytes(1_000) == 8 * MLA.kv_bytes(1_000)
    assert MLA.on_all_ranks(8).bytes_to_move(100, 64, 16) == 8 * MLA.bytes_to_move(100, 64, 16)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_can_be_divided_is_not_copied(ranks: int) -> None:
    assert QWEN3_NEXT.on_all_ranks(ranks) == QWEN3_NEXT


def test_windows_are_copied_too() -> None:
    model = KvModel("any", (SlidingWindow(3, 2, 64, 64, 128),))
    assert model.on_all_ranks(8).window_bytes == 4 * model.window_bytes


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="3 KV heads can't be divided among 2 ranks"):
        KvModel("any", (FullAttention(1, 3, 64, 64),)).on_all_ranks(2)
