"""The published models: their sizes, and what the paper says of them."""

import pytest

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.published import published_model, published_models

MIB = 1024 * 1024

# name: decoder layers, bytes per token, fixed state, full windows, MiB at 1K, 8K, 32K, 128K (K = 1024).
SIZES = {
    "kimi-linear": (27, 8_064, 43_417_600, 0, (49.28, 104.41, 293.41, 1049.41)),
    "mimo-v2-flash": (48, 23_040, 0, 25_559_040, (46.88, 204.38, 744.38, 2904.38)),
    "qwen3.5-397b": (60, 30_720, 192_061_440, 0, (213.16, 423.16, 1143.16, 4023.16)),
    "ring-2.5-1t": (80, 11_520, 293_601_280, 0, (291.25, 370.0, 640.0, 1720.0)),
    "minimax-m2.5": (62, 253_952, 0, 0, (248.0, 1984.0, 7936.0, 31744.0)),
    "qwen3-235b": (94, 192_512, 0, 0, (188.0, 1504.0, 6016.0, 24064.0)),
    "internal-1t": (57, 17_280, 182_353_920, 0, (190.78, 308.91, 713.91, 2333.91)),
    "gpt-oss-120b": (36, 36_864, 0, 4_718_592, (40.5, 292.5, 1156.5, 4612.5)),
    "nemotron-3-nano": (52, 6_144, 49_082_368, 0, (52.81, 94.81, 238.81, 814.81)),
    "step-3.5-flash": (45, 49_152, 0, 69_206_016, (114.0, 450.0, 1602.0, 6210.0)),
    "kimi-k2": (61, 70_272, 0, 0, (68.62, 549.0, 2196.0, 8784.0)),
    "deepseek-v3": (61, 70_272, 0, 0, (68.62, 549.0, 2196.0, 8784.0)),
    "kimi-k3": (93, 27_648, 449_372_160, 0, (455.55, 644.55, 1292.55, 3884.55)),
    "deepseek-v3.2": (61, 78_324, 0, 0, (76.49, 611.91, 2447.62, 9790.5)),
    "deepseek-v4-flash": (43, 3_851, 0, 15_420_416, (18.47, 44.79, 135.05, 496.08)),
    "deepseek-v4-pro": (61, 5_512, 0, 23_270_400, (27.58, 65.25, 194.44, 711.19)),
    "minimax-m3": (60, 137_472, 0, 0, (134.25, 1074.0, 4296.0, 17184.0)),
    "mimo-7b": (36, 147_456, 0, 0, (144.0, 1152.0, 4608.0, 18432.0)),
    "nemotron-super-49b": (80, 200_704, 0, 0, (196.0, 1568.0, 6272.0, 25088.0)),
    "qwen3.6-27b": (64, 65_536, 153_944_064, 0, (210.81, 658.81, 2194.81, 8338.81)),
}
# The paper's Table 1: linear layers per full-attention layer.
MIXES = {
    "kimi-linear": 20 / 7,
    "qwen3.5-397b": 3,
    "ring-2.5-1t": 7,
    "mimo-v2-flash": 39 / 9,
    "internal-1t": 42 / 15,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    layers, token_bytes, fixed_bytes, window_bytes, mib = SIZES[name]
    model = published_model(name)
    kv = model.kv_model
    assert model.layers == layers
    assert (kv.token_bytes, kv.fixed_bytes, kv.window_bytes) == (token_bytes, fixed_bytes, window_bytes)
    for length, expected in zip((1024, 8192, 32768, 131072), mib, strict=True):
        assert kv.kv_bytes(length) / MIB == pytest.approx(expected, abs=0.006)


def test_all_are_listed_the_papers_first() -> None:
    models = published_models()
    assert [model.name for model in models] == list(SIZES)
    assert [model.in_paper for model in models] == [True] * 7 + [False] * 13


@pytest.mark.parametrize("name", MIXES)
def test_attention_mix(name: str) -> None:
    full, other = published_model(name).kv_model.groups
    assert other.layers / full.layers == pytest.approx(MIXES[name])


def test_the_internal_model_is_table_5() -> None:
    kv = published_model("internal-1t").kv_model
    printed = {1024: 190.8, 8192: 308.9, 32000: 701.3, 130000: 2316.3}
    for tokens, mib in printed.items():
        assert kv.kv_bytes(tokens) / MIB == pytest.approx(mib, abs=0.15)


def test_every_number_has_a_source() -> None:
    for model in published_models():
        assert model.sources
        for source in model.sources:
            assert source.fields
            assert len(source.origin) > 10
    assumed = {model.name for model in published_models() if any(source.assumed for source in model.sources)}
    assert assumed == {"ring-2.5-1t", "internal-1t", "step-3.5-flash"}


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match='no published model "kimi-k4"; did you mean "kimi-k'):
        published_model("kimi-k4")
    with pytest.raises(ConfigError, match='no published model "x"; there are kimi-linear, '):
        published_model("x")
