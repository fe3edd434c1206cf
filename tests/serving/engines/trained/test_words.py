"""What is shipped as `trained: words`: files that loaders read, of the size and shape that its README states."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

import prfaas
from prfaas.core.kv.hf_config import model_from_directory
from prfaas.core.kv.layers import FullAttention, LinearState
from prfaas.serving.engines.tiny.configs import CHAT_TEMPLATE, SPECIAL_TOKENS
from prfaas.tools.demo.prompts import corpus, demo_prompts

FOLDER = Path(prfaas.__file__).parent / "serving" / "engines" / "trained" / "words"
README = (FOLDER / "README.md").read_text()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return content


def stated(pattern: str) -> str:
    """The one thing in the README that stands for the group of `pattern`."""
    (found,) = re.findall(pattern, README)
    return str(found)


def test_folder_has_what_loaders_read_and_fits_in_a_wheel() -> None:
    sizes = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) <= 10_000_000
    assert stated(r"([\d.]+) MB") == f"{sum(sizes.values()) / 1e6:.1f}"


def test_kv_cache_is_a_hybrids() -> None:
    model = model_from_directory(FOLDER)
    assert {type(group): group.layers for group in model.groups} == {FullAttention: 2, LinearState: 6}
    assert stated(r"([\d,]+) bytes a token") == f"{model.token_bytes:,}"
    assert stated(r"([\d,]+) bytes whatever the length") == f"{model.fixed_bytes:,}"


def test_weights_are_those_that_the_configuration_needs() -> None:
    config = read_json("config.json")
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        shapes = {name: weights.get_slice(name).get_shape() for name in names}
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"BF16"}
    for number, kind in enumerate(config["layer_types"]):
        mixer = "linear_attn.in_proj_qkvz" if kind == "linear_attention" else "self_attn.q_proj"
        assert f"model.layers.{number}.{mixer}.weight" in names
        experts = {name for name in names if f"model.layers.{number}.mlp.experts." in name}
        assert len(experts) == 3 * config["num_experts"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert shapes[name] == [config["vocab_size"], config["hidden_size"]]
    parameters = sum(_product(shape) for shape in shapes.values())
    assert stated(r"([\d.]+) million parameters") == f"{parameters / 1e6:.2f}"


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def test_special_tokens_have_the_ids_that_the_configuration_names() -> None:
    config, names = read_json("config.json"), read_json("tokenizer_config.json")
    assert tokenizer().get_vocab_size() == config["vocab_size"]
    ids = [tokenizer().token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(len(SPECIAL_TOKENS)))
    for field, role in (("pad", "pad"), ("bos", "bos"), ("eos", "eos")):
        assert tokenizer().token_to_id(names[f"{role}_token"]) == config[f"{field}_token_id"]
    ends = {config["eos_token_id"], tokenizer().token_to_id("<|im_end|>")}
    assert set(read_json("generation_config.json")["eos_token_id"]) == ends
    assert names["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(0x20, 0x7F))),
        "a\n\n   b\t  c \r\n",
        'The "with" statement\n********************\n',
        "<|im_start|>user\nWhat is a class?<|im_end|>\n<|im_start|>assistant\n",
        "Grüße, 世界 🎉",
        "",
    ],
)
def test_tokenizer_gives_every_text_back(text: str) -> None:
    ids = tokenizer().encode(text).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text
    assert all(0 <= id_ < tokenizer().get_vocab_size() for id_ in ids)


def test_special_tokens_are_one_token_each_and_none_is_added() -> None:
    for number, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer().encode(token).ids == [number]
    assert tokenizer().encode("a").ids == tokenizer().encode("a", add_special_tokens=False).ids
    assert len(tokenizer().encode("a").ids) == 1


def test_characters_per_token_are_those_that_the_readme_states() -> None:
    text = corpus()
    assert stated(r"([\d.]+) characters a token of the demo's text") == (
        f"{len(text) / len(tokenizer().encode(text).ids):.2f}"
    )


def test_demo_prompts_keep_their_order_of_length() -> None:
    chars_per_token = float(stated(r"([\d.]+) characters a token of the demo's text"))
    lengths = [len(tokenizer().encode(prompt.text).ids) for prompt in demo_prompts(chars_per_token)]
    assert sorted(lengths)[0] == lengths[0]
    assert lengths[-1] == max(lengths) > 3000


def test_loss_in_bits_is_the_loss_in_nats() -> None:
    rows = re.findall(r"\| (topics|whole text|held out) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", README)
    assert [row[0] for row in rows] == ["topics", "whole text", "held out"]
    for _, nats, bytes_per_token, bits in rows:
        assert float(bits) == pytest.approx(float(nats) / float(bytes_per_token) / 0.693147, abs=0.01)
