"""Which changes of a checkpoint its identity sees."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.tiny.checkpoint import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("models"))


def identity(directory: Path) -> ModelIdentity:
    return ModelIdentity.of(str(directory), str(directory))


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "elsewhere"))


def test_the_path_and_the_time_do_not_matter(checkpoint: Path, copied: Path) -> None:
    assert identity(copied) == identity(checkpoint)
    link = copied.parent / "link"
    link.mkdir()
    for file in copied.iterdir():
        (link / file.name).symlink_to(file)
    assert identity(link) == identity(checkpoint)


def trained(directory: Path) -> None:
    """One tensor's values are others: the headers and sizes are the same."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name] = tensors[name] + torch.full_like(tensors[name], 0.125)
    save_file(tensors, file, metadata={"format": "pt"})


def renamed(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    first = min(tensors)
    tensors["x" * len(first)] = tensors.pop(first)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def split(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    first = min(tensors)
    save_file({first: tensors.pop(first)}, directory / "more.safetensors")
    save_file(tensors, directory / "model.safetensors")


def shortened(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def without_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 5000)


@pytest.mark.parametrize("change", [trained, renamed, split, shortened, without_header])
def test_other_weights_are_another_identity(
    checkpoint: Path, copied: Path, change: Callable[[Path], None]
) -> None:
    change(copied)
    ours, theirs = identity(checkpoint), identity(copied)
    assert ours.weights != theirs.weights
    assert ours.tokenizer == theirs.tokenizer


def test_another_tokenizer_is_another_identity(checkpoint: Path, copied: Path) -> None:
    tokenizer = json.loads((copied / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    ours, theirs = identity(checkpoint), identity(copied)
    assert ours.weights == theirs.weights
    assert ours.tokenizer != theirs.tokenizer


def test_weights_in_other_formats_are_sampled_too(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(bytes(1 << 20))
    empty = identity(tmp_path)
    file.write_bytes(b"\1" * (1 << 20))
    assert identity(tmp_path).weights != empty.weights
    file.unlink()
    assert identity(tmp_path).weights not in (empty.weights, "")


def test_a_model_that_is_no_directory_is_its_name_and_revision(tmp_path: Path) -> None:
    first = ModelIdentity.of("org/model", "org/model", "abc")
    assert first == ModelIdentity.of("org/model", "org/model", "abc")
    assert first.weights != ModelIdentity.of("org/model", "org/model", "abd").weights
    assert first.weights != ModelIdentity.of("org/other", "org/model", "abc").weights
