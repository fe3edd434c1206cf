"""The profiles that come with prfaas, against the paper's tables (K = 1024)."""

import numpy as np
import pytest

from prfaas.core.kv.published import published_model
from prfaas.core.latency.files import load_profile, profile_names

LENGTHS = (1024, 8192, 32768, 131072)
# Table 3, Gbit/s.
TABLE_3 = {
    "kimi-linear": (1.19, 2.29, 3.87, 4.88),
    "mimo-v2-flash": (0.82, 2.85, 4.66, 4.71),
    "qwen3.5-397b": (4.13, 6.28, 8.25, 7.47),
    "ring-2.5-1t": (7.27, 4.47, 2.59, 1.46),
    "minimax-m2.5": (4.94, 32.87, 59.93, 47.82),
    "qwen3-235b": (4.12, 22.42, 33.35, 21.50),
}


def test_all_load_and_rise() -> None:
    assert len(profile_names()) == 9
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.model in name
        assert profile.hardware == name.rpartition("-")[2]
        assert profile.gpus_per_instance == 8
        assert profile.range_tokens == (128, 131072)
        assert len(profile.source) > 40
        published_model(profile.model)
        assert (np.diff(profile.prefill_s(np.geomspace(128, 131072, 999).clip(128, 131072))) > 0).all()


@pytest.mark.parametrize("model", TABLE_3)
def test_table_3_follows_from_the_implied_times(model: str) -> None:
    profile, kv = load_profile(f"{model}-h200"), published_model(model).kv_model
    for length, gbit_per_s in zip(LENGTHS, TABLE_3[model], strict=True):
        assert kv.kv_bytes(length) * 8 / profile.prefill_s(length) == pytest.approx(
            gbit_per_s * 1e9, rel=3e-4
        )


def test_h200_is_table_5() -> None:
    profile = load_profile("internal-1t-h200")
    assert [profile.prefill_s(length) for length in LENGTHS] == pytest.approx([0.44, 0.72, 1.84, 7.40])
    # Table 6: four instances at a mean of 45,046 tokens do 1.61 req/s; P90 of TTFT without a threshold is 3.51 s.
    assert 4 / profile.prefill_s(45_046) == pytest.approx(1.61, rel=0.01)
    assert profile.prefill_s(62_410) == pytest.approx(3.51, rel=0.03)
    assert profile.decode is not None
    assert profile.decode.evidence.origin == "estimated"
    # H20 decodes 20 at 25 ms; H200 reads memory 4.8 / 4.0 times as fast.
    assert profile.decode_step_s(20) == pytest.approx(0.025 * 4.0 / 4.8, rel=0.002)


def test_h20_is_table_6() -> None:
    profile = load_profile("internal-1t-h20")
    assert 3 / profile.prefill_s(10_224) == pytest.approx(1.64, rel=1e-4)
    assert 9 / profile.prefill_s(27_486) == pytest.approx(2.11, rel=1e-4)
    assert profile.prefill_s(62_410) == pytest.approx(9.73, rel=1e-4)
    batch = profile.max_batch(1 / 40)
    assert batch == 20
    for instances, theta in ((5, 3.91), (8, 6.25), (3, 2.34)):
        assert instances * batch / (profile.decode_step_s(batch) * 1024) == pytest.approx(theta, rel=0.002)


def test_every_profile_decodes_and_says_how_that_is_known() -> None:
    for name in profile_names():
        profile = load_profile(name)
        assert profile.decode is not None, name
        decode = profile.decode.evidence
        assert profile.evidence.origin in ("published", "estimated"), name
        assert decode.origin in ("published", "estimated"), name
        if decode.origin == "estimated":
            assert decode.source or profile.source.startswith("Assumed")
        low, high = profile.range_batch
        steps = [profile.decode_step_s(batch) for batch in range(int(low), int(high) + 1)]
        assert steps == sorted(steps)
        # The paper's SLO of 40 tokens/s is kept by some batch, so that a plan can use each of them.
        assert profile.max_batch(1 / 40) >= 4


def test_the_assumed_h20_of_the_dense_model() -> None:
    assumed, fast = load_profile("minimax-m2.5-h20"), load_profile("minimax-m2.5-h200")
    slow_1t, fast_1t = load_profile("internal-1t-h20"), load_profile("internal-1t-h200")
    for length in (128, *LENGTHS):
        ratio = slow_1t.prefill_s(length) / fast_1t.prefill_s(length)
        assert assumed.prefill_s(length) == pytest.approx(fast.prefill_s(length) * ratio, rel=2e-4)
    assert assumed.source.startswith("Assumed")
