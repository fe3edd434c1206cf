"""`bench/rollout.py` as tests run it: streams of all kinds while engines and gateways are replaced."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1] / "bench" / "rollout.py"
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
