"""A share of a core for each of some processes: engines that run on one machine as if each had a machine of its own.

What an engine may not use is there for the others, so they take nothing from it.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Short beside a step of an engine, so that its own threads seldom wait for their share.
_PERIOD_US = 20_000
# That of one process, and the greatest. Cgroups of version 1 count in other units.
_WEIGHT, _FIRST, _SHARES_OF_WEIGHT = 100, 10_000, 10


def missing() -> str | None:
    """What stands against `limited` on this machine, as one sentence; None: nothing does."""
    if os.geteuid() != 0:
        return "run it as root: shares of cores are given with cgroups"
    if not os.access(_parent() / "cgroup.procs", os.W_OK):
        return f"{_parent()} can't be written: shares of cores are given with the cpu controller of cgroups"
    return None


@contextlib.contextmanager
def limited(groups: Sequence[Sequence[int]], share: float, *, first: bool = False) -> Iterator[None]:
    """Meanwhile each group of processes, and what they start, gets at most `share` of one core's time.

    `first`: before all that is not limited so.

    Raises:
        OSError: the kernel does not give shares here; `missing` often knows why.
    """
    parent = _parent()
    made: list[Path] = []
    try:
        for processes in groups:
            group = parent / f"prfaas-bench-{os.getpid()}-{processes[0]}"
            group.mkdir()
            made.append(group)
            _limit(group, share, _FIRST if first else _WEIGHT)
            _move(processes, group)
        yield
    finally:
        for group in made:
            _move(map(int, (group / "cgroup.procs").read_text().split()), parent)
            group.rmdir()


def _parent() -> Path:
    """Where groups are made: cgroups of version 2 have all controllers in one tree."""
    return _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "cpu"


def _limit(group: Path, share: float, weight: int) -> None:
    quota_us = round(share * _PERIOD_US)
    # A group counts as one process beside those outside it, whatever the niceness of its own.
    if group.parent == _ROOT:
        (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        (group / "cpu.weight").write_text(str(weight))
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    else:
        (group / "cpu.shares").write_text(str(_SHARES_OF_WEIGHT * weight))
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _move(processes: Iterable[int], group: Path) -> None:
    for process in processes:
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(process))
