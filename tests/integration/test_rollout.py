"""`bench/rollout.py` with engines of vLLM: streams of all kinds over two gateways while engines are replaced."""

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


@pytest.mark.engine
@pytest.mark.slow("starts engines of vLLM, and one of them again")
@pytest.mark.extended("its parts run against stand-ins in `make test`")
@pytest.mark.timeout(600)
def test_nobody_notices_a_rollout_of_vllm(tmp_path: Path) -> None:
    options = ("--engines", "vllm", "--streams", "30", "--per-s", "1", "--replace", "home-d-0")
    assert report(tmp_path, *options)["replaced"] == ["home-d-0"]
