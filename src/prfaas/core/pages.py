"""Where a reader of a message finds a page of the documentation: an installed package has no folder `docs` beside it."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def page(name: str) -> str:
    """Its address on the site that the variable PRFAAS_DOCS names, else its file in the package or the repository.

    Args:
        name: from the root of the documentation, without an ending: "guides/alerts".
    """
    if site := os.environ.get("PRFAAS_DOCS", "").rstrip("/"):
        return f"{site}/{name}.html"
    folders = (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs")
    return str(next(filter(Path.is_dir, folders), folders[0]) / f"{name}.md")
