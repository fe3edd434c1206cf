"""What bytes over links cost, where the deployment file gives them a price."""

from prfaas.core.units import GB
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.running_deployment import RunningDeployment


class EgressBill:
    """Counts the cost of this gateway's transfers by link. Transfers that fail are not on it."""

    def __init__(self, running: RunningDeployment, metrics: Metrics) -> None:
        self._cost = metrics.egress_cost
        self._running = running
        self._cluster_of: dict[str, str] = {}
        self._learn()

    def add(self, source: str, target: str, num_bytes: int) -> None:
        """Bytes have gone from an instance or a pool to another one. Who has left meanwhile is counted still."""
        if not {source, target} <= self._cluster_of.keys():
            self._learn()
        link = self._running.current.link(self._cluster_of[source], self._cluster_of[target])
        if link is not None and link.egress_per_gb > 0:
            self._cost.labels(link.name).inc(num_bytes * (link.egress_per_gb / GB))

    def _learn(self) -> None:
        current = self._running.current
        self._cluster_of |= {instance.name: instance.cluster for instance in current.instances}
        self._cluster_of |= {pool.name: pool.cluster for pool in current.pools}
