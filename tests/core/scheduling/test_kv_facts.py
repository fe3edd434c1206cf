"""The bytes of a transfer are the model's, with whole blocks and without the last token where that is not sent."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.scheduling.views import NOW_S, board, decoder, link, prefiller

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.scheduling.decision import KvFacts, RoutingRequest
from prfaas.core.scheduling.policy import make_policy

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


@pytest.mark.parametrize("policy", ["paper", "tilted", "least_ttft", "offload_all", "round_robin"])
def test_a_decision_counts_what_its_link_carries(policy: str) -> None:
    """Half as much crosses one of two links, which are slow: that is the sooner way."""
    ways = [link("far", "pd", 1e9), link("far2", "pd", 1e9)]
    decode = decoder("decode", busy_until_s=NOW_S + 60)
    view = board(prefiller("near", "far"), prefiller("away", "far2"), decode, links=ways)
    whole = view.kv
    half = replace(whole, bytes_to_move=lambda tokens, skip: whole.bytes_to_move(tokens, skip) // 2)
    ways[1].kv = half
    # Of "round_robin" it is the third placement, behind that at home.
    decision = make_policy(policy).decide(RoutingRequest(20_000, {}, ordinal=2), view)
    assert (decision.prefill, decision.kv_bytes) == ("away", half.bytes_to_move(20_000, 0))
