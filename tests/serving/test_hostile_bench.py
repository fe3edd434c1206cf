"""A short form of `bench/hostile.py`: every kind of act beside honest requests, on stand-ins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "hostile.py"


@pytest.mark.extended("each of these acts has tests of its own; here they come beside honest requests")
@pytest.mark.timeout(240)
def test_hostile_acts_cost_nobody_else_an_answer(tmp_path: Path) -> None:
    report = tmp_path / "hostile.json"
    command = [sys.executable, str(BENCH), "--acts", "52", "--requests", "40", "--per-s", "10", "--seed", "1"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=220)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    # How soon answers begin is the machine's too: the bench judges that.
    assert set(found["acts"].values()) == {4} and len(found["acts"]) == 13
    assert (found["answered_alone"], found["answered"], found["wrong"]) == (1.0, 1.0, {})
    for name, most in found["bytes"].items():
        assert most <= 1.5 * found["alone_bytes"][name], name
    assert (found["left_over"], found["tracebacks"]) == ([], 0)
