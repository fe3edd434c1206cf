"""The Prometheus metrics of a gateway among several."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class FleetMetrics:
    """`prfaas_control_fleet_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"prfaas_control_fleet_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"prfaas_control_fleet_{name}", text, registry=registry)

        self.members = gauge("members", "Gateways of the fleet, as last seen; this one counts.")
        self.leads = gauge("leads", "1 when this gateway decides thresholds and roles.")
        self.connected = gauge("connected", "1 when etcd answers and this gateway is a member.")
        self.losses = counter("losses", "How often etcd was lost.")
        self.leader_changes = counter("leader_changes", "How often another gateway led than before.")
        self.unreadable = counter("unreadable_values", "Values in etcd that could not be read.")
