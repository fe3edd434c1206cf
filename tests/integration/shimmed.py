"""Environments of engines in which vLLM is other than it is: folders with a `sitecustomize.py`, which Python runs."""

import os
from pathlib import Path

_HERE = Path(__file__).parent


def with_shims(*names: str) -> dict[str, str]:
    """Environment with these folders of the tests on the path, and what they share; none: as it is."""
    if not names:
        return {}
    folders = [str(_HERE / name) for name in (*names, "shims")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))}
