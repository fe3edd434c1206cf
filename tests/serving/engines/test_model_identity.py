"""Which changes of a checkpoint its identity sees."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.serving.engines import model_identity
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
    import torch
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name] = tensors[name] + torch.full_like(tensors[name], 0.125)
    save_file(tensors, file, metadata={"format": "pt"})


def renamed(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    first = min(tensors)
    tensors["x" * len(first)] = tensors.pop(first)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def split(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

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


def shard(directory: Path) -> None:
    """The checkpoint in two files and an index, as large ones are published."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = {f"model-0000{part}-of-00002.safetensors": sorted(tensors)[part - 1 :: 2] for part in (1, 2)}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, directory / file)
    write_index(directory, {name: file for file, names in halves.items() for name in names})


def write_index(directory: Path, weight_map: dict[str, str], size: int = 0) -> None:
    content = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_sharded_checkpoint_is_its_files_and_its_index(copied: Path, tmp_path: Path) -> None:
    shard(copied)
    ours = identity(copied)
    assert identity(Path(shutil.copytree(copied, tmp_path / "again"))) == ours
    index = copied / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    # What is written of the whole model, and the order of names, change nothing that is loaded.
    write_index(copied, dict(reversed(weight_map.items())), size=9)
    assert identity(copied) == ours
    first = min(weight_map)
    write_index(copied, weight_map | {first: "model-00002-of-00002.safetensors"})
    assert identity(copied).weights != ours.weights
    index.write_text("{}", encoding="utf-8")
    broken = identity(copied)
    index.write_text("[1", encoding="utf-8")
    assert len({ours.weights, broken.weights, identity(copied).weights}) == 3


def test_quantized_weights_are_other_weights(copied: Path) -> None:
    """Of the same names and shapes: only types and values tell them apart."""
    import torch
    from safetensors.torch import load_file, save_file

    ours = identity(copied)
    file = copied / "model.safetensors"
    save_file({name: each.to(torch.float8_e4m3fn) for name, each in load_file(file).items()}, file)
    assert identity(copied).weights != ours.weights


@pytest.mark.parametrize("sample", [0, 1])
@pytest.mark.parametrize("tensor", [0, 5, -1])
def test_a_change_within_any_sample_is_seen(copied: Path, tensor: int, sample: int) -> None:
    ours = identity(copied)
    file = copied / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    places = list(model_identity._tensor_samples(bytes(content[8 : 8 + length]), len(content)))
    content[places[2 * tensor + sample]] ^= 1
    file.write_bytes(content)
    assert identity(copied).weights != ours.weights


def test_a_single_file_is_known_by_its_content(tmp_path: Path) -> None:
    one, two = tmp_path / "model-q8.gguf", tmp_path / "elsewhere.gguf"
    one.write_bytes(b"GGUF" + bytes(range(256)) * 400)
    two.write_bytes(one.read_bytes())
    assert identity(one) == identity(two)
    two.write_bytes(b"GGUF" + bytes(range(255, -1, -1)) * 400)
    assert identity(one).weights != identity(two).weights


def test_what_is_read_of_a_file_is_bounded(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = model_identity.os.pread
    monkeypatch.setattr(model_identity, "_MOST_SAMPLES_OF_A_FILE", 7)
    monkeypatch.setattr(model_identity, "_MOST_WHOLE_BYTES", 100)
    monkeypatch.setattr(
        model_identity.os, "pread", lambda file, nbytes, at: read.append(nbytes) or pread(file, nbytes, at)
    )
    header_bytes = int.from_bytes((copied / "model.safetensors").read_bytes()[:8], "little")
    ModelIdentity.of(str(copied / "model.safetensors"), "no tokenizer here")
    assert sum(read) == 8 + header_bytes + 7 * 128
    read.clear()
    large = copied / "tokenizer.json"
    large.write_bytes(bytes(1 << 20))
    ModelIdentity.of("no model here", str(large))
    assert sum(read) == 1024 * 128


class CachedHub:
    """What the hub's cache of this machine has."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, commit: str, checkpoint: Path) -> None:
        shutil.copytree(checkpoint, self.root / "models--org--model" / "snapshots" / commit)

    def point(self, branch: str, commit: str) -> None:
        refs = self.root / "models--org--model" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / branch).write_text(commit, encoding="ascii")


def test_a_name_of_the_hub_is_the_files_that_the_machine_has_of_it(
    checkpoint: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch moves: the same name may be other weights on another machine."""
    hub = CachedHub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.root))
    old, new = "0" * 40, "1" * 40
    trained(copied)
    hub.add(old, checkpoint)
    hub.add(new, copied)
    hub.point("main", old)
    assert ModelIdentity.of("org/model", "org/model") == identity(checkpoint)
    assert ModelIdentity.of("org/model", "org/model", new, new) == identity(copied)
    hub.point("main", new)
    assert ModelIdentity.of("org/model", "org/model").weights == identity(copied).weights


def test_a_directory_without_weights_is_not_another_one(tmp_path: Path) -> None:
    """Its weights come from somewhere else: nothing is known of them."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert identity(one) == identity(one)
    assert identity(one).weights != identity(two).weights


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b"{",
        b"[1]",
        *(
            json.dumps({"w": {"data_offsets": offsets}}).encode()
            for offsets in (None, [1], ["a", "b"], [-(10**30), 10**30], [5, 1], [0, 10**30])
        ),
    ],
)
def test_weights_with_any_header_have_an_identity(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 100)
    assert ModelIdentity.of(str(tmp_path), str(tmp_path)).weights
