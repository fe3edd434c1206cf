"""The console's page: its files, and what browsers may do with them."""

from collections.abc import Mapping
from importlib.resources import files

KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
"""Content types by the end of a file's name."""
HEADERS = {
    # Nothing from elsewhere, nothing inline, and nobody may show the page in a frame of theirs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Another version's scripts must not meet this one's answers.
    "Cache-Control": "no-cache",
}
"""Every file is given with these."""


def page_files() -> Mapping[str, bytes]:
    """Path below `page` → content: only these are ever given out."""
    root = files("prfaas.serving.console").joinpath("page")
    found = {entry.name: entry for entry in root.iterdir() if entry.is_file()}
    found |= {f"vendor/{entry.name}": entry for entry in root.joinpath("vendor").iterdir()}
    return {name: entry.read_bytes() for name, entry in found.items() if name[name.rfind(".") :] in KINDS}
