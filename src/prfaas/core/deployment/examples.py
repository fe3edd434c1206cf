"""The deployment files that come with prfaas."""

import errno
from pathlib import Path

from prfaas.core.shipped import shipped


def example_files(folder: str = "") -> dict[str, Path]:
    """File name → path of every example, in the order of names; empty where none are installed.

    Args:
        folder: below that of the examples: "recipes" has a file for each of some models that people run.
    """
    return {path.name: path for path in sorted((shipped("examples") / folder).glob("*.yaml"))}


def example_path(name: str) -> Path:
    """The path of one example.

    Args:
        name: of a deployment file, with or without ".yaml", for example "local"; or of another file there, for
            example "traces/mooncake_burst.jsonl.gz".

    Raises:
        FileNotFoundError: there is none of that name; the text says which there are.
    """
    for path in (shipped("examples") / name, shipped("examples") / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(file.removesuffix(".yaml") for file in example_files()) or "none with this installation"
    raise FileNotFoundError(errno.ENOENT, f"there is no such example; there are {known}", name)
