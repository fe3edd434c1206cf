"""Short forms of `bench/rollout.py`: streams of all kinds over two gateways while engines and gateways are replaced."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "rollout.py"
KINDS = {"text", "reasoning", "tools", "responses", "messages"}


def report(folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "rollout.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), *options, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert path.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(path.read_text())
    # How late first tokens are is the machine's: the bench judges that.
    assert found["broken"] == [], done.stdout
    assert found["streams"] >= 30 and set(found["kinds"]) == KINDS
    return found


@pytest.mark.slow("starts two gateways and six engines, and replaces three of them")
@pytest.mark.timeout(300)
def test_nobody_notices_a_rollout_of_stand_ins(tmp_path: Path) -> None:
    options = ("--streams", "30", "--per-s", "6", "--replace", "home-d-0", "--no-etcd")
    assert report(tmp_path, *options)["replaced"] == ["home-d-0"]
