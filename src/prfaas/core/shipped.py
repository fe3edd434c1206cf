"""What comes beside the code, pages and examples: in the package, or in the repository that it runs from."""

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
