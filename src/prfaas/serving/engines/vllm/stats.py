"""Counters of the connector, carried by vLLM to the engine's own `/metrics`."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from prfaas.serving.engines.transfer_counters import COUNTERS, POOL_COUNTERS

_COUNTERS = {**COUNTERS, **POOL_COUNTERS}


@dataclass
class ConnectorStats(KVConnectorStats):
    """Increments since the last step; vLLM adds them up over ranks and steps."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Start again at zero."""
        self.data: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count one or more of `name`, which is one of `COUNTERS` or `POOL_COUNTERS`."""
        self.data[name] += amount

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        for name in _COUNTERS:
            self.data[name] += other.data.get(name, 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """`vllm:prfaas_<counter>_total` per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_class = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter_class(name=f"vllm:prfaas_{name}", documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))
