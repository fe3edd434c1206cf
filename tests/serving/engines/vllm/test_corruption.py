"""The short form of `bench/corruption.py`: what page digests see, over the real transport."""

import json
import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[4] / "bench" / "corruption.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs in this process, which has imported vLLM; what it sets for a process of its own is set back."""
    monkeypatch.syspath_prepend(BENCH.parent)
    logger, interval_s = logging.getLogger("prfaas"), sys.getswitchinterval()
    level = logger.level
    yield BENCH
    logger.setLevel(level)
    sys.setswitchinterval(interval_s)


@pytest.mark.slow("damages transfers in every way that there is")
@pytest.mark.parametrize(
    "corruptions", [300, pytest.param(900, marks=pytest.mark.extended("more corruptions of the same kinds"))]
)
def test_no_corruption_is_undetected_and_nothing_else_is_an_alarm(
    bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corruptions: int
) -> None:
    found = tmp_path / "found.json"
    clean = str(2 * corruptions // 3)
    count = ("--corruptions", str(corruptions), "--clean", clean)
    monkeypatch.setattr(sys, "argv", [str(bench), *count, "--json", str(found)])
    runpy.run_path(str(bench), run_name="__main__")
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
