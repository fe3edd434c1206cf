"""Published models whose KVCache comes with prfaas: the paper's, and others that people run."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.model import KvModel


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where some fields of a configuration come from; `assumed` where nobody published them."""

    fields: tuple[str, ...]
    origin: str
    assumed: bool


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model by its short name: `layers` decoder layers, its KVCache, and a source for every number."""

    name: str
    title: str
    in_paper: bool
    layers: int
    kv_model: KvModel
    """With vLLM's default dtypes."""
    sources: tuple[ConfigSource, ...]
    config: Mapping[str, Any]
    """The fields of its `config.json` that its KVCache follows from."""

    def kept_in(self, dtypes: CacheDtypes) -> KvModel:
        """Its KVCache in other dtypes.

        Raises:
            ConfigError: its caches have no such dtype.
        """
        return model_from_config(self.config, name=self.name, dtypes=dtypes)


def published_models() -> tuple[PublishedModel, ...]:
    """All of them: the paper's first, in the order of its tables."""
    return _all()


def published_model(name: str) -> PublishedModel:
    """The one of this short name.

    Raises:
        ConfigError: there is none.
    """
    models = {model.name: model for model in published_models()}
    if name not in models:
        near = difflib.get_close_matches(name, models, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(models)}"
        raise ConfigError(f'there is no published model "{name}"; {hint}')
    return models[name]


@cache
def _all() -> tuple[PublishedModel, ...]:
    import yaml

    text = (resources.files(__package__) / "data" / "published.yaml").read_text(encoding="utf-8")
    return tuple(_model(entry) for entry in yaml.load(text, yaml.CSafeLoader))


def _model(entry: Mapping[str, Any]) -> PublishedModel:
    config: dict[str, Any] = {}
    sources = []
    for block in entry["config"]:
        config |= block["fields"]
        origin = " ".join(block["from"].split())
        sources.append(ConfigSource(tuple(block["fields"]), origin, bool(block.get("assumed"))))
    return PublishedModel(
        name=entry["name"],
        title=entry["title"],
        in_paper=bool(entry.get("in_paper")),
        layers=config["num_hidden_layers"],
        kv_model=model_from_config(config, name=entry["name"]),
        sources=tuple(sources),
        config=config,
    )
