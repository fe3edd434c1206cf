"""Families that people bring: one whose module wants libraries for images, and one that no reader knows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.model import KvModel
from prfaas.core.kv.told import read_told_layers
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.configs import BEGIN_ID, END_ID, PAD_ID, VOCAB_SIZE

from .shimmed import with_shims
from .stack import PATIENCE_S, Stack, prompt, running, wait_until, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"
CONTEXT_TOKENS = 4096
_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "hidden_size": 128,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN_3_5 = {
    **_COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "head_dim": 64,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
# Of layers alone, as its files have them: nobody has written a reader.
STABLE_LM = {
    **_COMMON,
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    "num_hidden_layers": 4,
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}


def serving(directory: Path, config: dict[str, Any]) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes."""
    folder = directory / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, CONTEXT_TOKENS)
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=CONTEXT_TOKENS)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["model"] |= {"path": str(folder)}
    del document["model"]["tiny"]
    document["engine"]["extra_args"] += ["--load-format", "seeded"]
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("with_seeded_weights", "with_torchvision"))


def told_by(stack: Stack) -> KvModel:
    return read_told_layers(stack.kv_stats(DECODE)["kv_layers"], "told", 1)


def check(stack: Stack, model: KvModel) -> None:
    """Exact answers, and the bytes that `model` says."""
    prompts = [prompt(910 + seed, tokens) for seed, tokens in enumerate((300, 1500))]
    stack.check_offloaded(prompts, prefill=PREFILL, decode=DECODE)
    ids = prompt(920, 1700)
    answer = stack.complete(ids)
    assert int(answer.route["bytes"]) == model.bytes_to_move(len(ids) - 1, 0, 1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from serving(tmp_path_factory.mktemp("prfaas-qwen3.5"), QWEN_3_5)


@pytest.mark.extended(
    "its layers are those of qwen3-next; a family that is read off the engine is in `make test`"
)
@pytest.mark.shows(model="qwen3.5")
def test_qwen_3_5_is_served(qwen: Stack) -> None:
    told, read = told_by(qwen), qwen.deployment.model.kv_model()
    assert (told.token_bytes, told.fixed_bytes) == (read.token_bytes, read.fixed_bytes)
    check(qwen, told)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from serving(tmp_path_factory.mktemp("prfaas-unknown"), STABLE_LM)


@pytest.mark.shows(model="stablelm")
def test_a_family_without_a_reader_is_served_and_told(unknown: Stack) -> None:
    assert unknown.deployment.model.known_kv_model() is None
    told = told_by(unknown)
    # Four layers of two heads of 32 keys and values, of two bytes each.
    assert told.token_bytes == 4 * 2 * 2 * 32 * 2
    log = unknown.path.parent / "gateway.log"
    wait_until(lambda: "tells what it keeps" in log.read_text(), PATIENCE_S, "the gateway counts in it")
    check(unknown, told)
