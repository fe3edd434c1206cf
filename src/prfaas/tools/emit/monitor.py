"""PodMonitors of the Prometheus operator: the gateway's metrics, and each engine's own."""

from collections.abc import Iterator

from prfaas.core.deployment import GATEWAY, TOOLS, is_loopback
from prfaas.tools.emit.blueprint import Blueprint
from prfaas.tools.emit.pod import MEMBER_LABEL
from prfaas.tools.emit.pod_plan import PodPlan
from prfaas.tools.emit.volume import CA_SECRET, TOKEN_SECRET, Fields, secret_of


def pod_monitors(blueprint: Blueprint, plans: tuple[PodPlan, ...]) -> Iterator[Fields]:
    """One for each pod that has metrics which Prometheus can reach."""
    for plan in plans:
        endpoint = _endpoint(blueprint, plan)
        if endpoint is not None:
            yield {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PodMonitor",
                "metadata": {"name": plan.name},
                "spec": {
                    "selector": {"matchLabels": {MEMBER_LABEL: plan.name}},
                    "podMetricsEndpoints": [
                        {
                            "path": "/metrics",
                            "interval": "15s",
                            "relabelings": _labels(blueprint, plan),
                            **endpoint,
                        }
                    ],
                },
            }


def _labels(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    """What dashboards choose by, as `prfaas monitoring scrape` gives it."""
    labels = {"deployment": blueprint.deployment.name}
    if plan.instance is not None:
        labels |= {"cluster": plan.instance.cluster, "instance": plan.instance.name}
    return [{"targetLabel": label, "replacement": value} for label, value in labels.items()]


def needs_tools_certificate(plans: tuple[PodPlan, ...]) -> bool:
    """True if Prometheus must show a certificate: engines with TLS accept nobody without one."""
    return any(plan.instance is not None and plan.instance.tls for plan in plans)


def _endpoint(blueprint: Blueprint, plan: PodPlan) -> Fields | None:
    if plan.component == GATEWAY:
        admin = blueprint.deployment.gateway.admin
        if is_loopback(admin.host):
            return None
        token = {"name": TOKEN_SECRET, "key": "admin-token"}
        return {"port": "admin", "authorization": {"type": "Bearer", "credentials": token}}
    if plan.instance is None:
        return None
    if not plan.instance.tls:
        return {"port": "http"}
    own = {"name": secret_of(blueprint, TOOLS), "key": f"{TOOLS}.pem"}
    return {
        "port": "http",
        "scheme": "https",
        "tlsConfig": {
            "ca": {"secret": {"name": CA_SECRET, "key": "ca.crt"}},
            # One file has both.
            "cert": {"secret": own},
            "keySecret": own,
            "serverName": plan.instance.name,
        },
    }
