"""The bytes of a transfer are the model's, with whole blocks and without the last token where that is not sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv import FullAttention, KvModel, LinearState, SlidingWindow
from prfaas.core.scheduling import KvFacts

FULL = FullAttention(layers=3, kv_heads=2, head_size_k=64, head_size_v=64)
LINEAR = LinearState(layers=9, conv_bytes=1000, recurrent_bytes=64_000)
WINDOW = SlidingWindow(layers=5, kv_heads=2, head_size_k=64, head_size_v=64, window_tokens=128)
MODELS = [KvModel("dense", (FULL,)), KvModel("hybrid", (FULL, LINEAR)), KvModel("windows", (FULL, WINDOW))]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@given(num=st.integers(0, 5000), skip=st.integers(0, 6000), block=st.sampled_from([1, 16, 256]))
def test_they_are_the_models_bytes(model: KvModel, num: int, skip: int, block: int) -> None:
    facts = KvFacts.of_model(model, block_tokens=block)
    expected = model.bytes_to_move(num, min(skip, num), block)
    assert facts.prefix_bytes_to_move(num, skip) == facts.bytes_to_move(num, skip) == expected


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_last_token_can_stay(model: KvModel) -> None:
    facts = KvFacts.of_model(model, block_tokens=256, sends_last_token=False)
    assert facts.bytes_to_move(1001, 300) == model.bytes_to_move(1000, 300, 256)
    assert facts.bytes_to_move(1001, 1001) == model.bytes_to_move(1000, 1000, 256)
    assert facts.prefix_bytes_to_move(1001, 300) == model.bytes_to_move(1001, 300, 256)
    assert facts.bytes_to_move(0, 0) == 0
