"""Compiled loops: kept on this machine for the next engine, and made anew where nothing can be kept."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from prfaas.serving.engines.vllm import host_loops

PROGRAM = """
from prfaas.serving.engines.vllm.host_loops import page_filling, page_summing, run_copying
loops = page_summing(), page_filling(), run_copying(5)
print(*(sum(kept.values()) for loop in loops for kept in loop.stats[1:]))
"""


@pytest.mark.slow("numba compiles, and two processes import it")
def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    told = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=True)
        for _ in range(2)
    ]
    # Found and not found, for each loop.
    assert [each.stdout.split() for each in told] == [["0", "1"] * 3, ["1", "0"] * 3]


def test_where_nothing_can_be_kept_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "_IPythonCacheLocator")
    copy = host_loops.run_copying.__wrapped__(8)
    source = np.arange(12).view(host_loops.item_type(8))
    target = np.zeros(4, np.int64)
    # Pages of four items, of which the middle two are wanted.
    dense, ids, runs = np.array([0, 4, 3, 1]), np.array([2, 0]), np.array([[1, 4, 0, 2, 2]])
    copy(source, target.view(host_loops.item_type(8)), dense, ids, runs, True)
    assert target.tolist() == [9, 10, 1, 2]
