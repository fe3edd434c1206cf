"""docs/reference/metrics.md lists every series that there is, with its type and labels, and none that there isn't."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from prfaas.serving.control.fleet_metrics import FleetMetrics
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.engines.transfer_counters import COUNTERS, POOL_COUNTERS
from prfaas.serving.gateway.metrics import Metrics

ROOT = Path(__file__).parents[1]
ROWS = dict(
    re.findall(
        r"^\| `([a-z_:]+)` \| (\w+ (?:\| [a-z_, ]*)?)\|",
        (ROOT / "docs/reference/metrics.md").read_text(),
        re.MULTILINE,
    )
)


def test_the_gateways_and_the_control_planes() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    ControlMetrics(registry)
    FleetMetrics(registry)
    made = {}
    for collector in registry._collector_to_names:
        name = collector._name + ("_total" if collector._type == "counter" else "")  # type: ignore[attr-defined]
        labels = ", ".join(collector._labelnames)  # type: ignore[attr-defined]
        made[name] = " | ".join((collector._type, labels)).strip()  # type: ignore[attr-defined]
    listed = {name: row.strip() for name, row in ROWS.items() if name.startswith("prfaas_")}
    assert listed == made


def test_the_engines() -> None:
    made = {f"vllm:prfaas_{name}_total" for name in (*COUNTERS, *POOL_COUNTERS)}
    assert {name for name in ROWS if name.startswith("vllm:")} == made
