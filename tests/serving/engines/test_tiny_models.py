"""The tiny checkpoints on disk: whole, repeatable, and shaped as loaders of their families expect."""

import json
import multiprocessing
from pathlib import Path

import pytest
from safetensors import safe_open

from prfaas.core.deployment.model import TINY_MODELS
from prfaas.core.kv.hf_config import model_from_directory
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES, checkpoint, tiny_config, tiny_model
from prfaas.serving.engines.tiny.checkpoint import byte_symbols
from prfaas.serving.engines.tiny.configs import END_ID, PRINTABLE_IDS, SPECIAL_TOKENS, TURN_END_ID


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: tiny_model(name, directory) for name in TINY_MODEL_NAMES}


@pytest.mark.slow("imports vLLM or torch")
def test_files_may_name_exactly_the_models_that_are_made() -> None:
    assert TINY_MODELS == TINY_MODEL_NAMES


@pytest.mark.parametrize("name", TINY_MODEL_NAMES)
def test_checkpoint_is_the_same_every_time(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    again = tiny_model(name, tmp_path)
    assert again == tmp_path / name
    for file in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (again / file).read_bytes() == (models[name] / file).read_bytes(), file


def test_models_differ_in_their_weights(models: dict[str, Path]) -> None:
    heads = {(path / "model.safetensors").read_bytes() for path in models.values()}
    assert len(heads) == len(TINY_MODEL_NAMES)


def test_a_complete_checkpoint_is_left_alone(tmp_path: Path) -> None:
    weights = tiny_model("qwen3", tmp_path) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    tiny_model("qwen3", tmp_path)
    assert weights.stat().st_mtime_ns == before


@pytest.mark.slow("imports vLLM or torch")
def test_a_damaged_checkpoint_is_made_anew(tmp_path: Path) -> None:
    weights = tiny_model("qwen3", tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    tiny_model("qwen3", tmp_path)
    assert weights.read_bytes() == whole


def test_a_changed_recipe_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("qwen3", tmp_path)
    inode = path.stat().st_ino
    monkeypatch.setattr(checkpoint, "_recipe_digest", lambda name: "another recipe")
    tiny_model("qwen3", tmp_path)
    assert path.stat().st_ino != inode
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".qwen3.lock", "qwen3"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("qwen3", tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_recipe_digest", lambda name: "another recipe")
    monkeypatch.setattr(checkpoint, "_write_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_model("qwen3", tmp_path)
    assert (path / "model.safetensors").is_file()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".qwen3.lock", "qwen3"]


def test_what_a_killed_maker_left_is_removed_but_not_another_models(tmp_path: Path) -> None:
    (tmp_path / ".qwen3.draft-killed").mkdir()
    (tmp_path / ".qwen3-next.draft-busy").mkdir()
    tiny_model("qwen3", tmp_path)
    assert not (tmp_path / ".qwen3.draft-killed").exists()
    assert (tmp_path / ".qwen3-next.draft-busy").exists()


@pytest.mark.slow("imports vLLM or torch")
def test_makers_at_the_same_time_agree(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.starmap(tiny_model, [("qwen3", tmp_path)] * 2)
    assert paths == [tmp_path / "qwen3"] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".qwen3.lock", "qwen3"]


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose one of qwen3-next, gpt-oss"):
        tiny_model("gpt-5", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TINY_MODEL_NAMES)
def test_only_printable_text_can_be_answered(name: str, models: dict[str, Path]) -> None:
    with safe_open(models[name] / "model.safetensors", "pt") as tensors:
        rows = tensors.get_tensor("lm_head.weight").float().abs().sum(dim=1)
    alive = {index for index, size in enumerate(rows.tolist()) if size > 0}
    assert alive == set(PRINTABLE_IDS)


@pytest.mark.slow("imports vLLM or torch")
@pytest.mark.parametrize("name", TINY_MODEL_NAMES)
def test_tensors_are_bf16_and_numbers(name: str, models: dict[str, Path]) -> None:
    import torch

    with safe_open(models[name] / "model.safetensors", "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            tensor = tensors.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert bool(tensor.isfinite().all()), key


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3", "mimo-v2-flash", "gpt-oss"])
@pytest.mark.slow("imports vLLM or torch")
def test_tensor_names_and_shapes_are_those_of_the_family(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """transformers writes a checkpoint of the same configuration: same tensors, other numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(models[name])
    if name == "mimo-v2-flash":
        pytest.skip(
            "transformers has other head counts for its sliding-window layers than the configuration says"
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert _shapes(models[name]) == _shapes(tmp_path)


def _shapes(directory: Path) -> dict[str, list[int]]:
    with safe_open(directory / "model.safetensors", "pt") as tensors:
        return {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", TINY_MODEL_NAMES)
def test_context_is_long_enough(name: str) -> None:
    assert tiny_config(name)["max_position_embeddings"] >= 32768


def test_dense_model_needs_several_times_the_hybrids_bytes(models: dict[str, Path]) -> None:
    hybrid, dense = model_from_directory(models["qwen3-next"]), model_from_directory(models["qwen3"])
    assert hybrid.token_bytes == 1024
    assert hybrid.is_hybrid and not dense.is_hybrid
    assert dense.kv_bytes(16_000) > 4 * hybrid.kv_bytes(16_000)


class TestTokenizer:
    def test_a_byte_is_a_token_and_back(self, models: dict[str, Path]) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(models["qwen3"] / "tokenizer.json"))
        for text in ("Hello, world", "héllo\n\twörld 数字 🙂", "".join(map(chr, range(256)))):
            ids = tokenizer.encode(text).ids
            assert ids == list(text.encode())
            assert tokenizer.decode(ids) == text

    def test_byte_symbols_are_those_of_the_library(self) -> None:
        from tokenizers import pre_tokenizers

        assert set(byte_symbols()) == set(pre_tokenizers.ByteLevel.alphabet())
        assert len(set(byte_symbols())) == 256

    @pytest.mark.slow("imports vLLM or torch")
    def test_as_transformers_loads_it(self, models: dict[str, Path]) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models["qwen3"])
        assert tokenizer.eos_token_id == END_ID
        assert tokenizer("plain").input_ids == list(b"plain")
        assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(256, 261))
        text = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": None},
                {"role": "tool", "content": "42"},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_generation_ends_at_a_turns_end(self, models: dict[str, Path]) -> None:
        generation = json.loads((models["qwen3"] / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [END_ID, TURN_END_ID]
