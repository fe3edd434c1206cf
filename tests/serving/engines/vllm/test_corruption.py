"""The short form of `bench/corruption.py`: what page digests see, over the real transport."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[4] / "bench" / "corruption.py"


@pytest.mark.slow("damages transfers in every way that there is")
@pytest.mark.parametrize(
    "corruptions", [300, pytest.param(900, marks=pytest.mark.extended("more corruptions of the same kinds"))]
)
def test_no_corruption_is_undetected_and_nothing_else_is_an_alarm(tmp_path: Path, corruptions: int) -> None:
    found = tmp_path / "found.json"
    clean = str(2 * corruptions // 3)
    count = ("--corruptions", str(corruptions), "--clean", clean)
    command = [sys.executable, str(BENCH), *count, "--json", str(found)]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    document = json.loads(found.read_text())
    assert [(goal["name"], goal["value"]) for goal in document["goals"]] == [
        ("undetected corruptions", 0),
        ("false alarms", 0),
    ]
    sites = document["figures"]["sites"]
    assert {site: sum(outcomes.values()) for site, outcomes in sites.items()} == dict.fromkeys(
        sites, corruptions // 6
    )
    assert len(sites) == 6
    # What the checksums of the wire see is sent again; all else is the digests'.
    assert {site for site, outcomes in sites.items() if outcomes.get("repaired")} == {"wire"}
