"""The model that a deployment's engines serve, and where its checkpoint comes from."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import quote

from pydantic import AfterValidator

from prfaas.core.deployment.field_types import GIVEN, FileBeside, Name, Positive, Text, matching, needs
from prfaas.core.deployment.section import EVERYTHING, Section
from prfaas.core.kv.config_fields import UnknownModelError
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype, ModelDtype
from prfaas.core.kv.hf_config import model_from_directory, read_config
from prfaas.core.kv.model import KvModel
from prfaas.core.kv.published import published_model

TinyName = Literal["qwen3-next", "gpt-oss", "mimo-v2-flash", "qwen3"]
"""Models that prfaas makes itself: `serving/engines/tiny/configs.py` has one for each of these names."""

TrainedName = Literal["words", "smollm2", "gemma3"]
"""Models with trained weights that prfaas ships or fetches: `serving/engines/trained/` has a folder for each name."""

TINY_MODELS: tuple[str, ...] = get_args(TinyName)
TRAINED_MODELS: tuple[str, ...] = get_args(TrainedName)

_PART = r"\w([\w.-]{0,94}\w)?"
HUB_NAME = rf"(?a)(?!.*(--|\.\.)){_PART}/{_PART}"
"""`ORG/NAME`, as the hub takes it."""
REVISION = r"(?a)(?!.*\.\.)\w[\w./-]{0,199}"
"""A branch, a tag or a commit."""

_TRAINED_FOLDER = Path(__file__).parents[2] / "serving" / "engines" / "trained"


def made_model_names() -> tuple[str, ...]:
    """Of all models that need neither a path nor the hub."""
    return (*TRAINED_MODELS, *TINY_MODELS)


def made_model(name: str) -> "ModelSource | None":
    """The trained or tiny model of this name."""
    if name in TRAINED_MODELS:
        return ModelSource("trained", name)
    return ModelSource("tiny", name) if name in TINY_MODELS else None


def trained_folder(name: str) -> Path:
    """What prfaas ships of a trained model: its `config.json`, and what else is not fetched. `name`: of the model."""
    return _TRAINED_FOLDER / name


def default_state_dir() -> Path:
    """Where models, keys and logs are kept: `$PRFAAS_HOME`, else `~/.cache/prfaas`."""
    home = os.environ.get("PRFAAS_HOME")
    return Path(home).expanduser().absolute() if home else Path.home() / ".cache" / "prfaas"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where prfaas has a checkpoint from: it makes the model, ships it, or fetches it."""

    kind: Literal["tiny", "trained", "hub"]
    """The field of the deployment file."""
    name: str
    """Of the tiny or trained model; `ORG/NAME` of the hub."""
    revision: str | None = None
    """Branch, tag or commit of the hub; None: its default branch."""

    def __str__(self) -> str:
        """As the deployment file says it."""
        at = "" if self.revision is None else f", revision: {self.revision}"
        return f"{self.kind}: {self.name}{at}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit of the hub, which never moves."""
        return self.revision is not None and re.fullmatch("[0-9a-f]{40}", self.revision) is not None

    @property
    def is_fetched(self) -> bool:
        """Whether its files may have to come over a network first, which takes minutes."""
        return self.kind != "tiny"

    @property
    def context_tokens(self) -> int | None:
        """The longest context of a trained model; None: not known before there is a checkpoint.

        Raises:
            ConfigError: its `config.json` can't be read.
        """
        if self.kind != "trained":
            return None
        return int(read_config(trained_folder(self.name) / "config.json")["max_position_embeddings"])

    def directory(self, state_dir: Path, deployment: str) -> Path:
        """Where the checkpoint is, or will be.

        Models that prfaas makes are shared by all deployments of a state directory. Of the hub each deployment has a
        link of its own to the revision that it stays with.
        """
        if self.kind != "hub":
            return state_dir / "models" / self.name
        at = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return state_dir / deployment / "hub" / f"{self.name.replace('/', '--')}{at}"

    def config_folder(self, directory: Path) -> Path:
        """The folder with the model's `config.json`: `directory`, or before it is there what is shipped."""
        return trained_folder(self.name) if self.kind == "trained" and not directory.exists() else directory


def _published(name: str) -> str:
    return published_model(name).name


_HubName = Annotated[
    Text, matching(HUB_NAME, '"{}" is no name of the hub; write it like HuggingFaceTB/SmolLM2-135M')
]
_Revision = Annotated[
    Text, matching(REVISION, '"{}" is no revision; write a branch, a tag or a commit, for example main')
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(Section, on_change=EVERYTHING):
    """Which model, under which name, up to which length. One of the six that name it; `published` also beside others.

    `published` and `config` are enough to plan with, and then the name and the length may be left out.
    """

    served_name: Annotated[Text | None, GIVEN] = None
    """What clients write in a request's `model`."""
    max_model_len: Annotated[Positive | None, GIVEN] = None
    """Longest prompt and answer together, in tokens."""
    path: FileBeside | None = None
    """Checkpoint directory, relative to the file."""
    trained: TrainedName | None = None
    """In place of `path`: a small model that prfaas ships or fetches."""
    hub: _HubName | None = None
    """In place of `path`: `ORG/NAME` on the Hugging Face hub."""
    revision: Annotated[
        _Revision | None, GIVEN, needs("hub", "is of a model of the hub; it goes with model.hub only")
    ] = None
    """With `hub`: a branch, tag or commit; left out: the default branch."""
    tiny: TinyName | None = None
    """In place of `path`: a seeded model that prfaas makes."""
    published: Annotated[Text, AfterValidator(_published)] | None = None
    """In place of `path`, or beside `path` or `hub`, to plan with: a model that `prfaas models` lists."""
    config: FileBeside | None = None
    """In place of `path`, to plan with: a `config.json`, relative to the file."""
    adapters: Mapping[Name, FileBeside] = field(default_factory=dict)
    """LoRA adapters' directories by their names, relative to the file."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """What engines keep K and V in, unless their cluster has its own: vLLM's `--kv-cache-dtype`."""
    dtype: ModelDtype = "auto"
    """What engines compute in: vLLM's `--dtype`."""

    def cache_dtypes(self, kv_cache_dtype: KvCacheDtype | None) -> CacheDtypes:
        """What engines keep their caches in; `kv_cache_dtype`: of their cluster, where it has its own."""
        return CacheDtypes(kv_cache_dtype or self.kv_cache_dtype, self.dtype)

    @property
    def source(self) -> ModelSource | None:
        """What prfaas makes or fetches it from; None: the checkpoint is the user's, or nothing is to be run."""
        if self.tiny is not None:
            return ModelSource("tiny", self.tiny)
        if self.trained is not None:
            return ModelSource("trained", self.trained)
        return None if self.hub is None else ModelSource("hub", self.hub, self.revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef(ModelSection):
    """The model that every engine serves."""

    served_name: str
    max_model_len: int
    path: Path
    """The checkpoint's directory. Of the hub: a link to it, which is there once it is fetched."""

    def kv_model(self, kv_cache_dtype: KvCacheDtype | None = None) -> KvModel:
        """The KVCache of the checkpoint as the engines keep it. Reads its `config.json`.

        Args:
            kv_cache_dtype: of the engines' cluster, where it has its own.

        Raises:
            ConfigError: it can't be read, the model is not known, or its caches have no such dtype.
        """
        dtypes = self.cache_dtypes(kv_cache_dtype)
        return model_from_directory(self.config_folder, name=self.served_name, dtypes=dtypes)

    def known_kv_model(self, kv_cache_dtype: KvCacheDtype | None = None) -> KvModel | None:
        """As `kv_model`; None where nobody has written what such a model keeps, which its engines then tell."""
        try:
            return self.kv_model(kv_cache_dtype)
        except UnknownModelError:
            return None

    @property
    def folder(self) -> Path:
        """The checkpoint's directory for an engine: of the hub the folder of the commit that the deployment has now."""
        is_link = self.source is not None and self.source.kind == "hub"
        return self.path.resolve() if is_link else self.path

    @property
    def config_folder(self) -> Path:
        """Where its `config.json` is. A trained model's is shipped, so that it is known before the model is fetched."""
        return self.path if self.source is None else self.source.config_folder(self.path)
