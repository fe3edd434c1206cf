"""A short form of `bench/faults.py`: engines of processes of their own, a gateway process, one fault of every kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "faults.py"


@pytest.mark.extended("each of these faults has tests of its own; here they come one after the other")
@pytest.mark.timeout(300)
def test_a_fault_of_every_kind_costs_no_answer_and_no_token(tmp_path: Path) -> None:
    report = tmp_path / "faults.json"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH), "--faults", "8", "--seed", "1", "--longest", "5", "--load", "5"),
            *("--json", str(report), "--keep-logs", str(tmp_path / "logs")),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    assert {fault["kind"] for fault in found["faults"]} == {
        *("kill", "freeze", "incompatible", "garbage", "stall", "files", "flood", "restart")
    }
    # How soon things are noticed is the machine's too: the bench judges that. A slow one may cost a client patience.
    outcomes = found["outcomes"]
    assert (outcomes["wrong"], found["left_over"], found["tracebacks"]) == (0, [], []), done.stdout
    assert outcomes["right"] > 50 and outcomes["none"] <= found["requests"] // 50, done.stdout
