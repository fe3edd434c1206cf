"""Emitted files as they get onto the disk."""

from collections.abc import Sequence
from pathlib import Path

from prfaas.tools.emit.blueprint import EmittedFile


def write_files(folder: Path, files: Sequence[EmittedFile]) -> tuple[Path, ...]:
    """Write them below `folder`, over those of an earlier time; whatever else is there stays.

    Raises:
        OSError: one can't be written.
    """
    written = []
    for file in files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text, encoding="utf-8")
        if file.is_script:
            target.chmod(0o755)
        written.append(target)
    return tuple(written)
