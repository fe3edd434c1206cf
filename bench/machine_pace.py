"""How fast this machine computes, from second to second: CPU time of a fixed piece of work, over and over.

A machine that others share is faster at one time than at another, by a fifth within minutes. Probes before and after a
drive of ten minutes don't say what was in between. This does, and takes one percent of a core.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

Reading = tuple[float, float]
"""(monotonic clock, CPU seconds of the work)."""

_PERIOD_S = 1.0
_SIDE, _REPEATS = 320, 3
# Of readings in a window, fewer say nothing.
_FEWEST = 10
_WINDOW = 20


@contextlib.contextmanager
def metered(path: Path) -> Iterator[None]:
    """Meanwhile a process of its own writes readings to `path`, a line each."""
    # One thread: a library's others would wait for a core that engines have.
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with path.open("w") as file:
        meter = subprocess.Popen([sys.executable, __file__], stdout=file, env=env)
        try:
            yield
        finally:
            meter.terminate()
            meter.wait(timeout=10)


def readings_in(path: Path, start_s: float, end_s: float) -> list[Reading]:
    """Those between two times of the monotonic clock; a last line may be cut."""
    found = []
    for line in path.read_text().splitlines():
        at_s, _, work_s = line.partition(" ")
        if work_s and start_s <= float(at_s) <= end_s:
            found.append((float(at_s), float(work_s)))
    return found


def pace_between(before: Sequence[Reading], now: Sequence[Reading]) -> float | None:
    """How much longer the work took `now` than `before`; None if one of them has too few readings."""
    if min(len(before), len(now)) < _FEWEST:
        return None
    return _usual_s(now) / _usual_s(before)


def paces_over(
    before: Sequence[Reading], now: Sequence[Reading], began_s: float
) -> list[tuple[float, float]]:
    """The same over time: (seconds since `began_s`, how much longer), each from so many readings as `_WINDOW`."""
    usual_s = _usual_s(before)
    paces = [(0.0, 1.0)]
    for first in range(0, len(now) - _WINDOW + 1, _WINDOW // 2):
        readings = now[first : first + _WINDOW]
        # It holds for the half in its middle.
        at_s = readings[_WINDOW // 4][0] - began_s
        pace = _usual_s(readings) / usual_s
        if at_s <= 0:
            paces = [(0.0, pace)]
        else:
            paces.append((at_s, pace))
    return paces


def _usual_s(readings: Sequence[Reading]) -> float:
    """The mean without the tenth at either end: a reading that was interrupted has filled its caches again."""
    ordered = sorted(work_s for _, work_s in readings)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _measure() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    left, right = (rng.random((_SIDE, _SIDE), dtype=np.float32) for _ in range(2))
    while True:
        time.sleep(_PERIOD_S)
        left @ right  # its caches are those of others by now
        start_s = time.thread_time()
        for _ in range(_REPEATS):
            left @ right
        print(f"{time.monotonic():.3f} {time.thread_time() - start_s:.7f}", flush=True)


if __name__ == "__main__":
    _measure()
