"""Kubernetes: a Kustomize base that all sites share, and an overlay for each site."""

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from prfaas.core.deployment import GATEWAY, TOOLS, is_loopback
from prfaas.tools.emit.blueprint import ENGINE_STOP_S, GATEWAY_STOP_S, Blueprint, EmittedFile
from prfaas.tools.emit.document import yaml_text
from prfaas.tools.emit.network_policy import PolicyMaker
from prfaas.tools.emit.pod import (
    COMPONENT_LABEL,
    MEMBER_LABEL,
    SITE_LABEL,
    pod_labels,
    pod_template,
)
from prfaas.tools.emit.pod_plan import PodPlan, kubernetes_name, plan_pods
from prfaas.tools.emit.site import Site, sites_of
from prfaas.tools.emit.volume import (
    CA_SECRET,
    CONFIG_MAP,
    TOKEN_SECRET,
    Fields,
    config_keys,
    secret_files,
    secret_name,
    secret_of,
)

_BASE = PurePosixPath("base")
_OVERLAYS = PurePosixPath("overlays")


def kubernetes_files(blueprint: Blueprint) -> tuple[EmittedFile, ...]:
    """`base/`, and `overlays/SITE/` with the site's pods, Services, policies, and a script that makes its Secrets.

    Raises:
        DeploymentError: a host, a path or a name of the file can't be used in Kubernetes.
    """
    plans = {site.name: plan_pods(blueprint, site) for site in sites_of(blueprint.deployment)}
    files = list(_base_files(blueprint, plans))
    for site in sites_of(blueprint.deployment):
        files += _overlay_files(blueprint, site, plans[site.name])
    return tuple(files)


def _base_files(blueprint: Blueprint, plans: dict[str, tuple[PodPlan, ...]]) -> Iterator[EmittedFile]:
    uses_machines = any(plan.host is not None for pods in plans.values() for plan in pods)
    uses_folders = bool(blueprint.model_folders) and blueprint.containers.models_claim is None
    level = "privileged" if uses_machines or uses_folders else "restricted"
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": blueprint.containers.namespace,
            "labels": {"pod-security.kubernetes.io/enforce": level},
        },
    }
    keys = config_keys(blueprint)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG_MAP},
        "data": {keys[path]: text for path, text in blueprint.documents.items()},
    }
    yield _file(_BASE / "namespace.yaml", namespace)
    yield _file(_BASE / "config-map.yaml", config)
    yield _kustomization(_BASE, ["namespace.yaml", "config-map.yaml"], blueprint)


def _overlay_files(blueprint: Blueprint, site: Site, plans: tuple[PodPlan, ...]) -> Iterator[EmittedFile]:
    folder = _OVERLAYS / site.name
    maker = PolicyMaker(blueprint, site.name, {member: plan for plan in plans for member in plan.members})
    names = ["../../base"]
    for plan in plans:
        names.append(f"{plan.name}.yaml")
        service = _gateway_service(blueprint) if plan.component == GATEWAY else _service(blueprint, plan)
        yield _file(folder / names[-1], service, _workload(blueprint, plan), maker.policy(plan))
    if any(plan.component == "engine" for plan in plans):
        names.append("pod-disruption-budget.yaml")
        yield _file(folder / names[-1], _disruption_budget(blueprint, site))
    monitors = tuple(_pod_monitors(blueprint, plans)) if blueprint.containers.pod_monitor else ()
    if monitors:
        names.append("pod-monitors.yaml")
        yield _file(folder / names[-1], *monitors)
    yield _kustomization(folder, names, blueprint)
    yield EmittedFile(folder / "create-secrets.sh", _secrets_script(blueprint, plans), is_script=True)


def _file(path: PurePosixPath, *objects: Fields) -> EmittedFile:
    return EmittedFile(path, yaml_text(*objects))


def _kustomization(folder: PurePosixPath, resources: list[str], blueprint: Blueprint) -> EmittedFile:
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": blueprint.containers.namespace,
        "resources": resources,
    }
    return _file(folder / "kustomization.yaml", document)


def _workload(blueprint: Blueprint, plan: PodPlan) -> Fields:
    template = pod_template(blueprint, plan)
    selector = {"matchLabels": {MEMBER_LABEL: plan.name}}
    labels = pod_labels(blueprint, plan)
    if plan.component == GATEWAY:
        template["spec"]["terminationGracePeriodSeconds"] = GATEWAY_STOP_S
        # Two on one machine's network would want the same port.
        together = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        strategy = together if plan.host is None else {"type": "Recreate"}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": plan.name, "labels": labels},
            "spec": {
                "replicas": _gateways(blueprint, plan),
                "selector": selector,
                "strategy": strategy,
                "template": template,
            },
        }
    template["spec"]["terminationGracePeriodSeconds"] = ENGINE_STOP_S
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": plan.name, "labels": labels},
        "spec": {
            "replicas": 1,
            "serviceName": plan.name,
            "selector": selector,
            # A change would restart all engines at the same time: each is a StatefulSet of its own.
            "updateStrategy": {"type": "OnDelete"},
            "template": template,
        },
    }


def _gateways(blueprint: Blueprint, plan: PodPlan) -> int:
    """Two where they can share what they know, each under a name of its own."""
    fleet = blueprint.deployment.fleet
    return 2 if fleet is not None and fleet.name is None and plan.host is None else 1


def _service(blueprint: Blueprint, plan: PodPlan) -> Fields:
    """The pod's name. It is known before the pod is ready: engines bind to the address that it stands for."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name, "labels": pod_labels(blueprint, plan)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {MEMBER_LABEL: plan.name},
            "ports": _service_ports(blueprint, plan),
        },
    }


def _gateway_service(blueprint: Blueprint) -> Fields:
    """What clients connect to. Operators' pages are not part of it."""
    port = blueprint.deployment.gateway.port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "prfaas-gateway"},
        "spec": {
            "selector": {MEMBER_LABEL: "prfaas-gateway"},
            "ports": [{"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _service_ports(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    containers = pod_template(blueprint, plan)["spec"]["containers"]
    return [
        {"name": port["name"], "port": port["containerPort"], "protocol": "TCP"}
        for container in containers
        for port in container["ports"]
    ]


def _disruption_budget(blueprint: Blueprint, site: Site) -> Fields:
    """Nodes are emptied one engine at a time."""
    labels = {COMPONENT_LABEL: "engine", SITE_LABEL: kubernetes_name(blueprint, site.name)}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{kubernetes_name(blueprint, site.name)}-engines"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }


def _secrets_script(blueprint: Blueprint, plans: tuple[PodPlan, ...]) -> str:
    """Secrets of what runs at the site, from the files of this machine's state directory; nothing of them is here."""
    deployment = blueprint.deployment
    wanted: dict[str, tuple[str, str]] = {}
    for plan in plans:
        for name, target in secret_files(blueprint, plan):
            file = target.relative_to(deployment.home) if target.is_relative_to(deployment.home) else target
            wanted[secret_name(blueprint, name)] = (name, str(file))
    if blueprint.containers.pod_monitor and _needs_tools_certificate(plans):
        file = deployment.security.identity_file(TOOLS).relative_to(deployment.home)
        wanted[secret_of(blueprint, TOOLS)] = (f"{TOOLS}.pem", str(file))
    lines = [
        "#!/bin/sh",
        "# Makes the Secrets of this site from the files of `prfaas key` and `prfaas certs`. It may be run again.",
        "set -eu",
        f'cd "${{PRFAAS_HOME:-$HOME/.cache/prfaas}}"/{shlex.quote(deployment.name)}',
        "secret() {",
        f'    kubectl --namespace {blueprint.containers.namespace} create secret generic "$1" --from-file="$2=$3" \\',
        "        --dry-run=client --output yaml | kubectl apply --filename -",
        "}",
        *(f"secret {secret} {key} {shlex.quote(file)}" for secret, (key, file) in wanted.items()),
    ]
    return "\n".join(lines) + "\n"


def _pod_monitors(blueprint: Blueprint, plans: tuple[PodPlan, ...]) -> Iterator[Fields]:
    """PodMonitors of the Prometheus operator: one for each pod that has metrics which Prometheus can reach."""
    for plan in plans:
        endpoint = _monitored_endpoint(blueprint, plan)
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
                            "relabelings": _target_labels(blueprint, plan),
                            **endpoint,
                        }
                    ],
                },
            }


def _target_labels(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    """What dashboards choose by, as `prfaas monitoring scrape` gives it."""
    labels = {"deployment": blueprint.deployment.name}
    if plan.instance is not None:
        labels |= {"cluster": plan.instance.cluster, "instance": plan.instance.name}
    return [{"targetLabel": label, "replacement": value} for label, value in labels.items()]


def _needs_tools_certificate(plans: tuple[PodPlan, ...]) -> bool:
    """True if Prometheus must show a certificate: engines with TLS accept nobody without one."""
    return any(plan.instance is not None and plan.instance.tls for plan in plans)


def _monitored_endpoint(blueprint: Blueprint, plan: PodPlan) -> Fields | None:
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
