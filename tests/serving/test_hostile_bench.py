"""A short form of `bench/hostile.py`: every kind of act beside honest requests, on stand-ins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "hostile.py"
ACTS, KINDS = 104, 13


@pytest.mark.slow("a gateway, nine engines and a pool in real processes, 600 requests")
@pytest.mark.timeout(300)
def test_hostile_acts_cost_nobody_else_an_answer(tmp_path: Path) -> None:
    report = tmp_path / "hostile.json"
    size = ["--acts", str(ACTS), "--requests", "300", "--per-s", "80", "--open", "30", "--seed", "1"]
    command = [sys.executable, str(BENCH), *size, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    # How soon answers begin is the machine's too: the bench judges that.
    assert list(found["acts"].values()) == [ACTS // KINDS] * KINDS
    assert (found["answered_alone"], found["answered"], found["wrong"]) == (1.0, 1.0, {})
    # Of so few requests more is the noise of one process.
    for name, most in found["bytes"].items():
        assert most <= 2 * found["alone_bytes"][name], name
    assert found["left_over"] + found["tracebacks"] == []
