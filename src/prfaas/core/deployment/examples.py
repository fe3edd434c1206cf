"""The deployment files that come with prfaas: in the installed package, or in the repository it is run from."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


def example_files(folder: str = "") -> dict[str, Path]:
    """File name → path of every example, in the order of names; empty where none are installed.

    Args:
        folder: below that of the examples: "recipes" has a file for each of some models that people run.
    """
    for examples in _FOLDERS:
        if examples.is_dir():
            return {path.name: path for path in sorted((examples / folder).glob("*.yaml"))}
    return {}


def example_path(name: str) -> Path:
    """The path of one example.

    Args:
        name: of a deployment file, with or without ".yaml", for example "local"; or of another file there, for
            example "traces/mooncake_burst.jsonl.gz".

    Raises:
        FileNotFoundError: there is none of that name; the text says which there are.
    """
    for folder in _FOLDERS:
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file():
                return path
    known = ", ".join(file.removesuffix(".yaml") for file in example_files()) or "none with this installation"
    raise FileNotFoundError(f'there is no example "{name}"; there are {known}')
