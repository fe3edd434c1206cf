"""Which model a deployment file names: exactly one, by a name that can be one."""

import re
from collections.abc import Sequence
from pathlib import Path

from prfaas.core.deployment.model import TINY_MODELS, TRAINED_MODELS, ModelSource, default_state_dir
from prfaas.core.deployment.schema import DeploymentFile, ModelSection
from prfaas.core.deployment.source import YamlSource
from prfaas.core.kv import ConfigError

_FIELDS = {
    "path": "a checkpoint directory",
    "trained": "a model with trained weights",
    "hub": "ORG/NAME on the Hugging Face hub",
    "tiny": "a made model's name",
    "published": "a model that `prfaas models` lists",
    "config": "a config.json to plan with",
}
_MOST_NAME_CHARACTERS = 96


def source_of(model: ModelSection) -> ModelSource | None:
    """Where prfaas has the model from; None: the checkpoint is the user's, or nothing is to be run."""
    if model.tiny is not None:
        return ModelSource("tiny", model.tiny)
    if model.trained is not None:
        return ModelSource("trained", model.trained)
    if model.hub is not None:
        return ModelSource("hub", model.hub, model.revision)
    return None


def config_file(source: YamlSource, file: DeploymentFile) -> Path | None:
    """The `config.json` of the model of a file that is to be planned; None: published, or only made when it runs."""
    model, origin = file.model, source_of(file.model)
    if origin is not None:
        if origin.kind == "tiny":
            return None
        return origin.config_folder(origin.directory(default_state_dir(), file.name)) / "config.json"
    given = model.config or model.path
    if given is None:
        return None
    path = source.path.parent / Path(given).expanduser()
    return path if model.config is not None and path.suffix == ".json" else path / "config.json"


def check_model(source: YamlSource, file: DeploymentFile) -> None:
    """Whether the file names one model, and a name that can be one.

    Raises:
        DeploymentError: none or several are named, or there is no such model.
    """
    model = file.model
    given = [field for field in _FIELDS if getattr(model, field) is not None]
    if len(given) != 1:
        choices = ", ".join(f"{field} ({meaning})" for field, meaning in _FIELDS.items())
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise source.error(("model",), f"needs either {choices}; {found}")
    _check_known(source, "tiny", model.tiny, TINY_MODELS)
    _check_known(source, "trained", model.trained, TRAINED_MODELS)
    _check_length(source, file)
    if model.hub is not None and not is_hub_name(model.hub):
        raise source.error(
            ("model", "hub"), f'"{model.hub}" is no name of the hub; write it like HuggingFaceTB/SmolLM2-135M'
        )
    if model.revision is None:
        return
    if model.hub is None:
        raise source.error(("model", "revision"), "is of a model of the hub; it goes with model.hub only")
    if not is_revision(model.revision):
        raise source.error(
            ("model", "revision"),
            f'"{model.revision}" is no revision; write a branch, a tag or a commit, for example main',
        )


def _check_length(source: YamlSource, file: DeploymentFile) -> None:
    origin, length = source_of(file.model), file.model.max_model_len
    try:
        most = None if origin is None else origin.context_tokens
    except ConfigError as error:
        raise source.error(("model", "trained"), str(error)) from None
    if origin is not None and length is not None and most is not None and length > most:
        raise source.error(
            ("model", "max_model_len"), f"{length} is more than the {most} tokens that {origin.name} takes"
        )


def _check_known(source: YamlSource, field: str, name: str | None, known: Sequence[str]) -> None:
    if name not in (None, *known):
        raise source.error(
            ("model", field), f'there is no {field} model "{name}"; choose one of {", ".join(known)}'
        )


def is_hub_name(text: str) -> bool:
    """Whether it is `ORG/NAME`, as the hub takes it."""
    parts = text.split("/")
    return len(parts) == 2 and all(
        re.fullmatch(r"\w([\w.-]*\w)?", part, re.ASCII)
        and len(part) <= _MOST_NAME_CHARACTERS
        and "--" not in part
        and ".." not in part
        for part in parts
    )


def is_revision(text: str) -> bool:
    """Whether it can be a branch, a tag or a commit."""
    return re.fullmatch(r"\w[\w./-]{0,199}", text, re.ASCII) is not None and ".." not in text
