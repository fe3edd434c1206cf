"""docs/reference/metrics.md lists every series that there is, with its type and labels, and none that there isn't."""

import re
from pathlib import Path

from tests.tools.monitoring.catalogue import OWN_INSTANCE, catalogue

ROOT = Path(__file__).parents[1]
ROWS = dict(
    re.findall(
        r"^\| `([a-z_:]+)` \| (\w+ (?:\| [a-z_, ]*)?)\|",
        (ROOT / "docs/reference/metrics.md").read_text(),
        re.MULTILINE,
    )
)
SERIES = catalogue().series


def test_the_gateways_and_the_control_planes() -> None:
    made = {}
    for name, series in SERIES.items():
        labels = ("instance" if label == OWN_INSTANCE else label for label in series.labels)
        made[name] = " | ".join((series.kind, ", ".join(labels))).strip()
    listed = {name: row.strip() for name, row in ROWS.items() if name.startswith("prfaas_")}
    assert listed == {name: row for name, row in made.items() if name.startswith("prfaas_")}


def test_the_engines() -> None:
    assert {name for name in ROWS if name.startswith("vllm:")} == {
        name for name in SERIES if name.startswith("vllm:")
    }
