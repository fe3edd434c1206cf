"""What bytes over links cost, where the deployment file gives them a price."""

from prfaas.core.deployment import Deployment
from prfaas.core.units import GB
from prfaas.serving.gateway.metrics import Metrics


class EgressBill:
    """Counts the cost of this gateway's transfers by link. Transfers that fail are not on it."""

    def __init__(self, deployment: Deployment, metrics: Metrics) -> None:
        self._cost = metrics.egress_cost
        self._cluster_of: dict[str, str] = {}
        self.adopt(deployment)

    def adopt(self, deployment: Deployment) -> None:
        """Count by this file's prices from now on. What an instance sent that has left is counted still."""
        self._cluster_of |= {instance.name: instance.cluster for instance in deployment.instances}
        self._cluster_of |= {pool.name: pool.cluster for pool in deployment.pools}
        self._prices = {
            (link.source, link.target): (link.name, link.egress_per_gb / GB)
            for link in deployment.links
            if link.egress_per_gb > 0
        }

    def add(self, source: str, target: str, num_bytes: int) -> None:
        """Bytes have gone from an instance or a pool to another one."""
        priced = self._prices.get((self._cluster_of[source], self._cluster_of[target]))
        if priced is not None:
            link, price_per_byte = priced
            self._cost.labels(link).inc(num_bytes * price_per_byte)
