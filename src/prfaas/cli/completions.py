"""Shell completions: names of policies, models, GPUs, profiles and recipes, and those in a deployment file.

Nothing here may fail or be slow: it runs at every press of the Tab key, and a file may be half written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

_MOST_FILES = 20


def policy_names() -> list[str]:
    """Of routing policies, other packages' too."""
    from importlib.metadata import entry_points

    # As `known_policies`, which imports all of them: too slow for a key.
    return [each.name for each in entry_points(group="prfaas.policies")]


def model_names() -> list[str]:
    """Of published models."""
    from prfaas.core.kv.published import published_models

    return [each.kv_model.name for each in published_models()]


def gpu_names() -> list[str]:
    """Of GPUs that times are estimated for."""
    from prfaas.core.latency.roofline import gpu_names

    return list(gpu_names())


def profile_names() -> list[str]:
    """Of profiles that come with prfaas."""
    from prfaas.core.latency.files import profile_names

    return list(profile_names())


def trace_formats() -> list[str]:
    """Of recorded requests."""
    from typing import get_args

    from prfaas.core.workload.trace_columns import TraceFormat

    return list(get_args(TraceFormat))


def recipe_names() -> list[str]:
    """Of deployment files for models that people run."""
    from prfaas.core.shipped import example_files

    return [path.stem for path in example_files("recipes").values()]


def made_model_names() -> list[str]:
    """Of models that prfaas has itself: trained and tiny ones."""
    from prfaas.core.deployment.model import made_model_names

    return list(made_model_names())


def instance_names(context: typer.Context) -> list[str]:
    """Of the deployment file on the command line; without one, of the files in this folder."""
    return [
        str(instance["name"])
        for document in _documents(context)
        for cluster in _mappings(document, "clusters")
        for instance in _mappings(cluster, "instances")
        if "name" in instance
    ]


def pool_names(context: typer.Context) -> list[str]:
    """Of the deployment file on the command line."""
    from prfaas.core.deployment import DeploymentError, load_deployment

    try:
        return [node.name for node in load_deployment(_given(context)).pools]
    except (DeploymentError, OSError, TypeError):
        return []


def _given(context: typer.Context) -> Any:
    return context.params.get("deployment") or context.params.get("where")


def _documents(context: typer.Context) -> Iterator[Any]:
    from prfaas.core.bounded_file import WRITTEN_BYTES, file_text
    from prfaas.core.yaml_source import yaml_source

    given = _given(context)
    for path in [Path(given)] if given else sorted(Path().glob("*.yaml"))[:_MOST_FILES]:
        try:
            # Not as a deployment: names are wanted from files with mistakes too.
            yield yaml_source(path, file_text(path, WRITTEN_BYTES)).values
        except (OSError, ValueError):
            continue


def _mappings(document: Any, key: str) -> Iterator[dict[str, Any]]:
    """The mappings in the list that `document` has under `key`."""
    found = document.get(key) if isinstance(document, dict) else None
    if isinstance(found, list):
        yield from (each for each in found if isinstance(each, dict))
