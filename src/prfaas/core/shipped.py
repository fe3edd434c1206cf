"""What comes beside the code, pages and examples: in the package, or in the repository that it runs from."""

import errno
import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped(folder: str) -> Path:
    """A folder of the repository that the installed package has inside."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parents[1] / folder


def page(name: str) -> str:
    """Where who reads a message finds a page, such as "guides/alerts": its file, or on the site of PRFAAS_DOCS."""
    site = os.environ.get("PRFAAS_DOCS", "").rstrip("/")
    return f"{site}/{name}.html" if site else str(shipped("docs") / f"{name}.md")


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
