"""What engines draft tokens with, by the options that a deployment file gives vLLM, and what they keep with it."""

import json
from collections.abc import Sequence
from typing import Any

from prfaas.core.deployment.types import Cluster, Deployment
from prfaas.core.kv.drafters import DrafterError, Speculation, with_drafter
from prfaas.core.kv.hf_config import read_config
from prfaas.core.kv.model import KvModel

_OPTION = "--speculative-config"
# Others for one of its fields each: vllm/engine/arg_utils.py, create_speculative_config.
_FIELD_OPTIONS = {"--spec-method": "method", "--spec-model": "model"}


def kept_model(deployment: Deployment, cluster: Cluster) -> KvModel:
    """The KVCache of a request on one rank, as the engines of a cluster keep it: with what drafts for them.

    Raises:
        ConfigError: as `ModelRef.kv_model`.
        DrafterError: what the drafter keeps is not known.
    """
    model = deployment.model.kv_model(cluster.kv_cache_dtype)
    speculation = speculation_of((*deployment.engine.extra_args, *cluster.extra_args))
    if speculation is None:
        return model
    config = read_config(deployment.model.config_folder / "config.json")
    return with_drafter(model, config, speculation, deployment.cache_dtypes(cluster.name))


def counted_model(deployment: Deployment, cluster: Cluster) -> KvModel:
    """The same, or the model's alone where it is not known what the drafter keeps. Raises ConfigError."""
    try:
        return kept_model(deployment, cluster)
    except DrafterError:
        return deployment.model.kv_model(cluster.kv_cache_dtype)


def speculation_of(arguments: Sequence[str]) -> Speculation | None:
    """Of an engine that is started with these arguments of vLLM's server; None where it drafts nothing.

    Raises:
        DrafterError: they can't be read.
    """
    fields: dict[str, Any] = {}
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        option, _, inner = name.replace("_", "-").partition(".")
        if option not in (_OPTION, "-sc", *_FIELD_OPTIONS):
            continue
        value = value if equals else next(given, "")
        if option in _FIELD_OPTIONS:
            fields[_FIELD_OPTIONS[option]] = value
        elif inner:
            fields[inner] = value
        else:
            fields = _fields(value)
    if not fields:
        return None
    method, model, kv_cache_dtype = (fields.get(name) for name in ("method", "model", "kv_cache_dtype"))
    # "deepseek_mtp" and others are vLLM's old names of one method.
    is_mtp = str(method).endswith("_mtp")
    return Speculation("mtp" if is_mtp else str(method or ""), str(model or ""), kv_cache_dtype)


def _fields(value: str) -> dict[str, Any]:
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DrafterError(f"{_OPTION} must be a JSON object, not {value!r:.300}")
    return {name.replace("-", "_"): each for name, each in fields.items()}
