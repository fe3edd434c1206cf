"""What a tensor-parallel rank holds, against vLLM's own division."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.kv.published import published_model, published_models

RANKS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def calculator() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator


def sizes(shapes: Any, dtypes: tuple[int, ...]) -> list[int]:
    return [int(np.prod(shape)) * dtype for shape, dtype in zip(shapes, dtypes, strict=True)]


@pytest.mark.slow("imports vLLM or torch")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("groups", [1, 4, 8, 16])
def test_mamba2_is_divided_as_vllm_does(calculator: Any, ranks: int, groups: int) -> None:
    state = LinearState.mamba2(1, heads=64, head_size=64, groups=groups, state_size=128, conv_kernel=4)
    shapes = calculator.mamba2_state_shape(
        tp_world_size=ranks,
        intermediate_size=4096,
        n_groups=groups,
        num_heads=64,
        head_dim=64,
        state_size=128,
        conv_kernel=4,
    )
    rank = state.per_rank(ranks)
    assert [rank.conv_bytes, rank.recurrent_bytes] == sizes(shapes, (2, 4))


@pytest.mark.slow("imports vLLM or torch")
@pytest.mark.parametrize("ranks", RANKS)
def test_other_states_are_divided_as_vllm_does(calculator: Any, ranks: int) -> None:
    net = LinearState.gated_delta_net(
        1, key_heads=16, value_heads=64, key_head_size=128, value_head_size=128, conv_kernel=4
    ).per_rank(ranks)
    shapes = calculator.gated_delta_net_state_shape(ranks, 16, 64, 128, 128, 4)
    assert [net.conv_bytes, net.recurrent_bytes] == sizes(shapes, (2, 4))
    kda = LinearState.kimi_delta_attention(1, heads=32, head_size=128, conv_kernel=4).per_rank(ranks)
    assert [kda.conv_bytes, kda.recurrent_bytes] == sizes(calculator.kda_state_shape(ranks, 32, 128), (2, 4))
    mamba = LinearState.mamba1(1, channels=8192, state_size=16, conv_kernel=4).per_rank(ranks)
    shapes = calculator.mamba1_state_shape(ranks, 8192, 16, 4)
    assert [mamba.conv_bytes, mamba.recurrent_bytes] == sizes(shapes, (2, 4))
    conv = LinearState.short_conv(1, channels=2048, conv_kernel=3).per_rank(ranks)
    assert [conv.conv_bytes] == sizes(calculator.short_conv_state_shape(ranks, 2048, 3), (2,))
    assert conv.recurrent_bytes == 0
    lightning = LinearState.lightning(1, heads=64, head_size=128).per_rank(ranks)
    shapes = calculator.linear_attention_state_shape(64, ranks, 128)
    assert [lightning.recurrent_bytes] == sizes(shapes, (4,))


def test_heads_are_divided_or_repeated() -> None:
    group = FullAttention(1, 4, 128, 128)
    assert [group.per_rank(ranks).kv_heads for ranks in (1, 2, 4, 8)] == [4, 2, 1, 1]
    window = SlidingWindow(1, 8, 64, 64, 128)
    assert [window.per_rank(ranks).kv_heads for ranks in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]


def test_mla_is_in_every_rank() -> None:
    model = published_model("deepseek-v3").kv_model
    assert model.per_rank(8) == model


@pytest.mark.parametrize(
    ("group", "ranks"),
    [
        (FullAttention(1, 6, 64, 64), 4),
        (FullAttention(1, 4, 64, 64), 0),
        (LinearState(1, 10, 20), 2),
        (LinearState.lightning(1, heads=6, head_size=8), 4),
        (
            LinearState.gated_delta_net(
                1, key_heads=2, value_heads=8, key_head_size=8, value_head_size=8, conv_kernel=4
            ),
            4,
        ),
    ],
)
def test_impossible_divisions_are_refused(group: Any, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"ranks|tensor_parallel"):
        KvModel("any", (group,)).per_rank(ranks)


@settings(deadline=None)  # the first call imports NumPy or reads data files
@given(st.sampled_from(published_models()), st.sampled_from((1, 2, 4, 8)), st.integers(0, 200_000))
def test_ranks_together_hold_at_least_everything(model: Any, ranks: int, tokens: int) -> None:
    whole = model.kv_model.kv_bytes(tokens)
    rank = model.kv_model.per_rank(ranks).kv_bytes(tokens)
    assert whole <= ranks * rank
    assert rank <= whole


@settings(deadline=None)  # the first call imports NumPy or reads data files
@given(st.sampled_from(published_models()), st.lists(st.integers(0, 200_000), min_size=1, max_size=5))
def test_arrays_are_the_single_sizes(model: Any, tokens: list[int]) -> None:
    kv = model.kv_model
    assert kv.kv_bytes(np.array(tokens)).tolist() == [kv.kv_bytes(each) for each in tokens]
    assert kv.kv_bytes(float(tokens[0])) == kv.kv_bytes(tokens[0])
