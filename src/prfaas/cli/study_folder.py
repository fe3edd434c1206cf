"""Folders of studies, packages whose `STUDIES` has them by name; the project's own is no part of what is installed."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.cli.common import CliError

_CHECKOUT = Path(__file__).parents[3]
_NAME = "studies"


def own_folder() -> Path | None:
    """The project's own: of the checkout that this runs from, or in the current folder."""
    found = (folder / _NAME for folder in (_CHECKOUT, Path.cwd()))
    return next((folder for folder in found if (folder / "__init__.py").is_file()), None)


def studies_of(folder: Path | None) -> Mapping[str, Any]:
    """Import the studies of a folder, so that other processes can import them too.

    Args:
        folder: a package; None takes `own_folder`.

    Returns:
        Each `Study` by its name.

    Raises:
        CliError: there is none, or it can't be imported.
    """
    package = _own(", or give a folder of your own with --studies") if folder is None else folder.resolve()
    sys.path.insert(0, str(package.parent))
    try:
        studies: Mapping[str, Any] = importlib.import_module(package.name).STUDIES
    except (ImportError, AttributeError, SyntaxError) as error:
        option = "" if folder is None else "--studies: "
        raise CliError(
            f"{option}{package} is no folder of studies, a Python package whose STUDIES has each by its name: {error}"
        ) from error
    return studies


def own_module(name: str) -> Any:
    """Import a module of the project's own studies.

    Raises:
        CliError: they are not here.
    """
    sys.path.insert(0, str(_own().parent))
    return importlib.import_module(f"{_NAME}.{name}")


def _own(more: str = "") -> Path:
    folder = own_folder()
    if folder is None:
        raise CliError(
            "prfaas is installed without its studies: run this in a checkout of its repository, which has them in "
            f"{_NAME}/{more}"
        )
    return folder


def study_names() -> list[str]:
    """Of the project's own studies, without importing them."""
    folder = own_folder()
    files = sorted(folder.glob("[a-z]*.py")) if folder is not None else []
    return [file.stem.replace("_", "-") for file in files]
