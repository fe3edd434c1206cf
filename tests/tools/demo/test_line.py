"""The line is as wide for a model and machine as the paper's is for its own."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment import load_deployment
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.model import KvModel
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES, tiny_config
from prfaas.tools.demo.line import USED_SHARE, DemoLine, PrefillSpeed, with_room
from prfaas.tools.demo.prompts import LONGEST_TOKENS

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"
MODELS = {name: model_from_config(tiny_config(name), name=name) for name in TINY_MODEL_NAMES}


@given(st.sampled_from(list(MODELS.values())), st.integers(1, 5000), st.floats(0.001, 1000))
def test_the_longest_prompt_takes_its_share_of_the_line(model: KvModel, tokens: int, seconds: float) -> None:
    line = DemoLine.of(model, PrefillSpeed(tokens, seconds))
    share = line.used_share(model, LONGEST_TOKENS)
    # Rounded up to two digits, so at most a tenth wider.
    assert USED_SHARE / 1.1 <= share <= USED_SHARE * 1.001
    digits = f"{line.bandwidth_bits_per_s:.0f}".rstrip("0")
    assert len(digits) <= 2 or line.bandwidth_bits_per_s < 100


@given(st.sampled_from(list(MODELS.values())), st.floats(10, 100_000))
def test_a_faster_machine_gets_a_wider_line(model: KvModel, tokens_per_s: float) -> None:
    slow, fast = (
        DemoLine.of(model, PrefillSpeed(1000, 1000 / rate)) for rate in (tokens_per_s, 2 * tokens_per_s)
    )
    assert slow.bandwidth_bits_per_s < fast.bandwidth_bits_per_s


def test_all_links_get_it_and_nothing_else_changes(tmp_path: Path) -> None:
    deployment = load_deployment(EXAMPLE, state_dir=tmp_path)
    line = DemoLine.of(MODELS["qwen3-next"], PrefillSpeed(1000, 2.0))
    changed = line.put_in(deployment)
    assert {link.bandwidth_bits_per_s for link in changed.links} == {line.bandwidth_bits_per_s}
    assert changed.clusters == deployment.clusters
    assert [link.name for link in changed.links] == [link.name for link in deployment.links]


def test_it_says_why(tmp_path: Path) -> None:
    line = DemoLine.of(MODELS["qwen3-next"], PrefillSpeed(1000, 2.0))
    assert "500 tokens/s" in line.sentence() and "13%" in line.sentence()
    assert line.to_json()["prefill_tokens_per_s"] == 500


@pytest.mark.parametrize("name", TINY_MODEL_NAMES)
def test_staging_has_room_for_the_longest_prompt(tmp_path: Path, name: str) -> None:
    deployment = load_deployment(EXAMPLE, state_dir=tmp_path)
    model = MODELS[name]
    room = with_room(deployment, model).engine.staging_bytes
    assert room >= max(deployment.engine.staging_bytes, 1.2 * model.bytes_to_move(LONGEST_TOKENS))


def test_a_large_dense_cache_gets_more_staging(tmp_path: Path) -> None:
    deployment = load_deployment(EXAMPLE, state_dir=tmp_path)
    config = dict(tiny_config("qwen3")) | {"num_hidden_layers": 24, "layer_types": ["full_attention"] * 24}
    large = model_from_config(config, name="large")
    assert with_room(deployment, large).engine.staging_bytes > deployment.engine.staging_bytes
