"""A folder that is made once, whole or not at all, and made anew when its recipe changes."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.core.bounded_file import WRITTEN_BYTES, file_json

_MARKER = "prfaas-made.json"


def made_folder(target: Path, recipe: str, write: Callable[[Path], None]) -> Path:
    """`target`, made first if it is not there, not whole, or of another recipe.

    Processes that ask at the same time wait for each other. What one that ended left behind is removed.

    Args:
        target: the folder; those above it are made too.
        recipe: identifies how the folder would be made now.
        write: puts the files into an empty folder beside `target`, which takes its place afterwards. What it raises
            leaves `target` as it was.

    Raises:
        OSError: the folder can't be written.
    """
    if _is_complete(target, recipe):
        return target
    parent, name = target.parent, target.name
    parent.mkdir(parents=True, exist_ok=True)
    with locked(parent / f".{name}.lock"):
        if _is_complete(target, recipe):
            return target
        for leftover in parent.glob(f".{name}.*-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.draft-", dir=parent))
        try:
            # mkdtemp makes it private, as safetensors does its files: an engine of another user could not read them.
            draft.chmod(0o755)
            write(draft)
            for file in draft.iterdir():
                file.chmod(0o644)
            sizes = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
            (draft / _MARKER).write_text(json.dumps({"recipe": recipe, "files": sizes}, indent=1) + "\n")
            _replace(target, draft)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock file `path`, and hold it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(target: Path, draft: Path) -> None:
    """`draft` becomes `target`. What stood there steps aside first: no directory can be replaced in one step."""
    if not target.exists():
        draft.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.stale-", dir=target.parent))
    target.rename(aside / target.name)
    draft.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def _is_complete(target: Path, recipe: str) -> bool:
    try:
        marker = file_json(target / _MARKER, WRITTEN_BYTES)
        return marker["recipe"] == recipe and all(
            (target / file).stat().st_size == size for file, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
