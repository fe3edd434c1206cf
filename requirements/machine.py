"""Whether this machine can run the demo, said in one sentence before anything is installed or started.

`make demo` runs this file alone, without any package: only the standard library may be imported here.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

GB = 1_000_000_000
MIB = 1 << 20
# Measured: three engines with 1 GiB of KVCache each, two pools, the gateway and the client.
MEMORY_BYTES = 7 * GB
# Both pools keep their pages in shared memory.
SHARED_MEMORY_BYTES = 512 * MIB
# Measured: the environment with vLLM's CPU build, and pip's unpacking beside it.
DISK_BYTES = 4 * GB

_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_FILE = Path("/proc/meminfo")
_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


@dataclass(frozen=True)
class MachineFacts:
    """What a machine has. None: it can't be told."""

    system: str
    architecture: str
    free_memory_bytes: int | None
    free_shared_memory_bytes: int | None
    free_disk_bytes: int | None
    """Where the environment goes; None if it is there already."""


def machine_facts(environment: Path | None = None) -> MachineFacts:
    """Of this machine.

    Args:
        environment: The folder that packages are to be installed into; None: nothing is to be installed.
    """
    return MachineFacts(
        system=platform.system(),
        architecture=platform.machine(),
        free_memory_bytes=_free_memory_bytes(),
        free_shared_memory_bytes=_free_disk_bytes(_SHARED_MEMORY),
        free_disk_bytes=None if environment is None else _free_disk_bytes(environment),
    )


def machine_problem(facts: MachineFacts) -> str | None:
    """Why the demo can't run on such a machine, and what would do; None if it can."""
    if (facts.system, facts.architecture) != ("Linux", "x86_64"):
        return f"the demo needs Linux on x86-64, for vLLM's CPU build; this is {facts.system} on {facts.architecture}"
    for what, free_bytes, needed_bytes, remedy in (
        (
            "disk for the environment",
            facts.free_disk_bytes,
            DISK_BYTES,
            "free some, or name another with VENV=DIR",
        ),
        ("memory for three engines", facts.free_memory_bytes, MEMORY_BYTES, "end other programs"),
        (
            "shared memory for two pools",
            facts.free_shared_memory_bytes,
            SHARED_MEMORY_BYTES,
            f"make {_SHARED_MEMORY} larger (a container: --shm-size=1g)",
        ),
    ):
        if free_bytes is not None and free_bytes < needed_bytes:
            return f"the demo needs {needed_bytes / GB:.1f} GB of {what}, {free_bytes / GB:.1f} GB are free: {remedy}"
    return None


def _free_memory_bytes() -> int | None:
    """The kernel's estimate of what new programs can have, within the container's limit."""
    try:
        lines = _MEMORY_FILE.read_text(encoding="utf-8").splitlines()
        free_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    try:
        limit_bytes, used_bytes = (int(path.read_text(encoding="utf-8")) for path in _LIMIT_FILES)
    except (OSError, ValueError):
        # No container, or one without a limit ("max").
        return free_bytes
    return min(free_bytes, limit_bytes - used_bytes)


def _free_disk_bytes(path: Path) -> int | None:
    """Where `path` is, or would be."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def main() -> int:
    """For `make demo`: the environment's folder as the only argument, if it is to be installed."""
    problem = machine_problem(machine_facts(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
    if problem is not None:
        print(f"{problem} (go on anyway: make demo CHECK=no)", file=sys.stderr)
    return os.EX_OK if problem is None else 2


if __name__ == "__main__":
    sys.exit(main())
