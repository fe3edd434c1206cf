"""The KVCache that a deployment file is planned with: of a published model, a `config.json` or a checkpoint."""

from pathlib import Path

from prfaas.core.deployment.schema import ModelSection
from prfaas.core.deployment.source import YamlSource
from prfaas.core.kv import (
    CacheDtypeError,
    CacheDtypes,
    ConfigError,
    KvModel,
    model_from_directory,
    published_model,
)


def planned_dtypes(model: ModelSection) -> CacheDtypes:
    """What the engines would keep their caches in."""
    return CacheDtypes(model.kv_cache_dtype, model.dtype)


def planned_kv_model(source: YamlSource, model: ModelSection) -> KvModel:
    """The KVCache of the file's `model` on one rank, in the dtypes that the file names.

    Raises:
        DeploymentError: the model is not known or can't be read, or its caches have no such dtype.
    """
    folder, dtypes = source.path.parent, planned_dtypes(model)
    try:
        if model.published is not None:
            return published_model(model.published).kept_in(dtypes)
        if model.config is not None:
            config = folder / Path(model.config).expanduser()
            directory = config.parent if config.name == "config.json" else config
            return model_from_directory(directory, name=model.served_name, dtypes=dtypes)
        if model.path is not None:
            directory = folder / Path(model.path).expanduser()
            return model_from_directory(directory, name=model.served_name, dtypes=dtypes)
    except CacheDtypeError as error:
        raise source.error(("model", "kv_cache_dtype"), str(error)) from None
    except ConfigError as error:
        field = "published" if model.published else "config" if model.config else "path"
        raise source.error(("model", field), str(error)) from None
    raise source.error(
        ("model", "tiny"), "a made model has no published speed; plan with published, config or path"
    )
