"""The traffic of studies: what is the same, and what is meant to differ."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies._runs import trace_lambda_max
from studies._traffic import (
    DAY_S,
    NIGHT_ANSWERS,
    NOON_ANSWERS,
    SharedPrefixes,
    bursts,
    day_plan,
    mixed,
    noon_share,
    stretched,
)
from studies._variants import cache_of
from tests.core.workload.laws import tail

from prfaas.core.workload.lengths import TruncatedLogNormal
from prfaas.lab.studies import StudyContext

LENGTHS = TruncatedLogNormal(9.9, 1.0, 128, 131072)


@given(st.floats(1.0, 5.0), st.floats(0.1, 100.0))
def test_bursts_keep_the_mean_rate(peak: float, rate_rps: float) -> None:
    assert bursts(rate_rps, peak).mean_per_s == pytest.approx(rate_rps)


@pytest.mark.parametrize("peak", [0.5, 5.5])
def test_bursts_that_cannot_be(peak: float) -> None:
    with pytest.raises(ValueError, match="peak"):
        bursts(1.0, peak)


@given(st.floats(0.3, 2.0))
def test_stretched_lengths_stay_within_limits(factor: float) -> None:
    found = stretched(LENGTHS, factor, 128, 131072)
    assert found.low >= 128 and found.high <= 131072
    assert found.mean() <= factor * LENGTHS.mean() * 1.001 or factor < 1
    assert tail(found, 30_000) == pytest.approx(tail(LENGTHS, 30_000 / factor), abs=2e-3)


@pytest.mark.slow("simulates the cases of a study")
@given(st.floats(0.0, 1.0))
def test_a_mix_is_between_its_parts(share: float) -> None:
    first, second = stretched(LENGTHS, 0.5, 128, 131072), stretched(LENGTHS, 1.0, 128, 131072)
    assert mixed(first, second, share).mean() == pytest.approx(
        first.mean() * (1 - share) + second.mean() * share
    )


def test_shares_change_nothing_but_what_is_shared(context: StudyContext) -> None:
    base = context.poisson(0.5)
    kinds = {
        share: next(SharedPrefixes(base, share, 4).chunks(np.random.default_rng(1))) for share in (0.0, 0.5)
    }
    none, half = kinds[0.0], kinds[0.5]
    for field in ("arrival_s", "input_tokens", "output_tokens", "block_starts"):
        assert np.array_equal(getattr(none, field), getattr(half, field))
    assert len(np.unique(none.block_ids)) == len(none.block_ids)
    seen: dict[int, int] = {}
    for request in islice(half.requests(), 500):
        shared = int(0.5 * request.input_tokens) // request.block_tokens
        for place, block in enumerate(request.block_ids):
            # A shared block is always the same place of its document, another one is seen once.
            assert seen.setdefault(block, place) == place
            assert place < shared or sum(block == other for other in request.block_ids) == 1
        assert len(set(request.block_ids)) == len(request.block_ids)
    unshared = [
        block
        for request in half.requests()
        for block in request.block_ids[int(0.5 * request.input_tokens) // request.block_tokens :]
    ]
    assert len(set(unshared)) == len(unshared)
    begun = {request.block_ids[0] for request in half.requests() if request.input_tokens > 4096}
    assert len(begun) == 4


def test_a_day_has_long_answers_at_night_and_long_prompts_at_noon(context: StudyContext) -> None:
    plan = day_plan(context, 0.9)
    chunks = list(islice(plan.traffic.chunks(np.random.default_rng(2)), 6))
    arrival_s, inputs, outputs = (
        np.concatenate([getattr(chunk, field) for chunk in chunks])
        for field in ("arrival_s", "input_tokens", "output_tokens")
    )
    assert arrival_s[-1] > DAY_S * 0.9
    hours = arrival_s / DAY_S * 24 % 24
    output = context.problem.workload.output_tokens
    night, noon = (hours < 2) | (hours > 22), (hours > 10) & (hours < 14)
    assert outputs[night].mean() > output * NIGHT_ANSWERS * 0.9
    assert outputs[noon].mean() < output * NOON_ANSWERS * 1.2
    assert inputs[noon].mean() > 1.4 * inputs[night].mean()
    assert len(arrival_s) / arrival_s[-1] == pytest.approx(plan.rate_rps, rel=0.05)
    assert plan.rate_rps == pytest.approx(0.9 * min(plan.hourly_rps))
    assert list(noon_share(np.array([0.0, 0.5, 1.0]))) == pytest.approx([0, 1, 0])


def test_the_trace_comes_at_the_rate_that_was_asked_for(context: StudyContext) -> None:
    traffic = context.replayed(5.0)
    assert traffic.mean_per_s == pytest.approx(5.0)
    chunk = next(traffic.chunks(np.random.default_rng(3)))
    assert chunk.input_tokens.max() <= context.range_tokens[1]
    assert trace_lambda_max(context) > context.lambda_max


def test_caches_hold_what_the_model_makes_of_their_bytes(context: StudyContext) -> None:
    model = context.planned.kv_model
    cache = cache_of(model, 1 << 30)
    assert cache is not None and cache.capacity_tokens == (1 << 30) // model.token_bytes
    assert (cache.checkpoint_tokens is not None) == model.is_hybrid
    assert cache_of(model, 0) is None
