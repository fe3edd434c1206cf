"""The GPU kit's whole engines, as far as a CPU goes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.engine
@pytest.mark.extended("the chain of both models has tests of its own; this is the kit's program")
@pytest.mark.slow("starts three engines one after the other")
@pytest.mark.timeout(900)
def test_the_kit_runs_whole_engines_on_a_cpu(tmp_path: Path) -> None:
    told = subprocess.run(
        [str(ROOT / "bench/gpu/check.sh"), "cpu"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), "ONLY": "kimi-linear"},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    figures = json.loads((tmp_path / "kimi-linear" / "found.json").read_text())
    assert figures["loaded"] == figures["prompts"] > 0
    assert figures["exact"] + figures["ties"] == figures["prompts"]
    assert "kimi-linear on cpu, graphs: none" in told.stdout
