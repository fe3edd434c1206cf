"""A share of a core for each of some processes: engines that run on one machine as if each had a machine of its own.

What an engine may not use is there for the others, so they take nothing from it.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Short beside a step of an engine, so that its own threads seldom wait for their share.
_PERIOD_US = 20_000


def missing() -> str | None:
    """What stands against `limited` on this machine, as one sentence; None: nothing does."""
    if os.geteuid() != 0:
        return "run it as root: shares of cores are given with cgroups"
    if not os.access(_parent() / "cgroup.procs", os.W_OK):
        return f"{_parent()} can't be written: shares of cores are given with the cpu controller of cgroups"
    return None


@contextlib.contextmanager
def limited(groups: Sequence[Sequence[int]], share: float) -> Iterator[None]:
    """Meanwhile each group of processes, and what they start, gets at most `share` of one core's time.

    Raises:
        OSError: the kernel does not give shares here; `missing` often knows why.
    """
    parent = _parent()
    made: list[Path] = []
    try:
        for place, processes in enumerate(groups):
            made.append(_group(parent / f"prfaas-bench-{os.getpid()}-{place}", share))
            _move(processes, made[-1])
        yield
    finally:
        for group in made:
            _move(map(int, (group / "cgroup.procs").read_text().split()), parent)
            group.rmdir()


def _parent() -> Path:
    """Where groups are made: cgroups of version 2 have all controllers in one tree."""
    return _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "cpu"


def _group(path: Path, share: float) -> Path:
    quota_us = round(share * _PERIOD_US)
    if path.parent == _ROOT:
        (path.parent / "cgroup.subtree_control").write_text("+cpu")
        path.mkdir()
        (path / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    else:
        path.mkdir()
        (path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(quota_us))
    return path


def _move(processes: "Iterator[int] | Sequence[int]", group: Path) -> None:
    for process in processes:
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(process))
