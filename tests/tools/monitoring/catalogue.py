"""Every series that there is, as Prometheus stores it: read from the code that declares it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.engines.transfer_counters import COUNTERS, POOL_COUNTERS
from prfaas.serving.fleet.control import FleetMetrics
from prfaas.serving.gateway.metrics import Metrics

OWN_INSTANCE = "exported_instance"
"""What Prometheus calls our label `instance`, since each of its targets has one of that name already."""
TARGET_LABELS = ("deployment", "job", "instance")
"""What a target of Prometheus has: `deployment` where the scrape configuration gives it."""

_ENGINE_LABELS = ("model_name", "engine")
_PROCESS = {
    "process_cpu_seconds_total": "Seconds of CPU time.",
    "process_resident_memory_bytes": "Memory in use.",
    "process_virtual_memory_bytes": "Memory that is mapped.",
    "process_start_time_seconds": "When the process began, in Unix time.",
    "process_open_fds": "Open file descriptors.",
    "process_max_fds": "File descriptors that may be open.",
}

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """One family of series."""

    name: str
    """Counters with their `_total`, histograms without `_bucket`, `_sum` and `_count`."""
    kind: Kind
    labels: tuple[str, ...]
    """Beside those of the target."""
    meaning: str

    @property
    def samples(self) -> Mapping[str, tuple[str, ...]]:
        """What may stand in an expression → its labels, those of the target too."""
        labels = (*self.labels, *TARGET_LABELS)
        if self.kind == "histogram":
            parts = {"_bucket": (*labels, "le"), "_sum": labels, "_count": labels}
            return {self.name + part: each for part, each in parts.items()}
        return {self.name: labels}


class Catalogue:
    """All series, by name."""

    def __init__(self, series: Collection[Series]) -> None:
        self.series = {each.name: each for each in series}
        self.samples = {name: labels for each in series for name, labels in each.samples.items()}


def catalogue() -> Catalogue:
    """The series of the gateway, its control plane, its process, and of the engines' connector."""
    return Catalogue((*_of_the_gateway(), *_of_the_process(), *_of_the_engines()))


class _Declared(CollectorRegistry):
    """Keeps what is declared in it."""

    def __init__(self) -> None:
        super().__init__()
        self.families: list[Counter | Gauge | Histogram] = []

    def register(self, collector: Any) -> None:
        self.families.append(collector)
        super().register(collector)


def _of_the_gateway() -> Iterator[Series]:
    declared = _Declared()
    Metrics(declared)
    ControlMetrics(declared)
    FleetMetrics(declared)
    for family in declared.families:
        (told,) = family.describe()
        # The library has no public way to a family's labels.
        labels = tuple(OWN_INSTANCE if label == "instance" else label for label in family._labelnames)
        kind, end = _kind_of(family)
        yield Series(told.name + end, kind, labels, told.documentation)


def _kind_of(family: Counter | Gauge | Histogram) -> tuple[Kind, str]:
    """With what its name ends in."""
    if isinstance(family, Counter):
        return "counter", "_total"
    return ("histogram", "") if isinstance(family, Histogram) else ("gauge", "")


def _of_the_process() -> Iterator[Series]:
    for name, meaning in _PROCESS.items():
        yield Series(name, "counter" if name.endswith("_total") else "gauge", (), meaning)


def _of_the_engines() -> Iterator[Series]:
    for name, meaning in {**COUNTERS, **POOL_COUNTERS}.items():
        yield Series(f"vllm:prfaas_{name}_total", "counter", _ENGINE_LABELS, f"{meaning}.")
