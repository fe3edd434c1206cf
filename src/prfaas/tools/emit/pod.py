"""The containers of a pod: what they start, how they are asked whether they are well, what they may do."""

from collections.abc import Iterator

from prfaas.core.deployment import GATEWAY, SYNTHETIC, Instance, PoolNode, is_loopback
from prfaas.tools.emit.blueprint import CONFIG_FILE, READY_S, STATE_DIR, USER_ID, Blueprint
from prfaas.tools.emit.pod_plan import PodPlan, kubernetes_name
from prfaas.tools.emit.volume import (
    Fields,
    engine_mounts,
    model_mounts,
    mount,
    placing_script,
    pool_mounts,
    secrets_mount,
    standing_mounts,
    volumes_of,
)

MEMBER_LABEL = "prfaas/member"
SITE_LABEL = "prfaas/site"
COMPONENT_LABEL = "app.kubernetes.io/component"
MACHINE_LABEL = "prfaas/machine"
"""Of nodes: the address in the deployment file. Pods whose host is an address run on the node that has it."""

_PROBE_S = 5


def pod_template(blueprint: Blueprint, plan: PodPlan) -> Fields:
    """The `template` of a StatefulSet or Deployment."""
    containers = list(_containers(blueprint, plan))
    spec: Fields = {
        "automountServiceAccountToken": False,
        # Their variables would pass for settings of vLLM, which begin with VLLM_.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_placing(blueprint, plan, containers[0]["image"])],
        "containers": containers,
        "volumes": volumes_of(blueprint, plan),
    }
    if plan.host is not None:
        spec |= {
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "nodeSelector": {MACHINE_LABEL: plan.host.replace(":", "-")},
        }
    return {"metadata": {"labels": pod_labels(blueprint, plan)}, "spec": spec}


def pod_labels(blueprint: Blueprint, plan: PodPlan) -> Fields:
    """Labels by which its pods are found; engines have llm-d's label for the role that they start with."""
    labels = {
        "app.kubernetes.io/name": "prfaas",
        COMPONENT_LABEL: plan.component,
        "app.kubernetes.io/part-of": kubernetes_name(blueprint, blueprint.deployment.name),
        SITE_LABEL: kubernetes_name(blueprint, plan.site),
        MEMBER_LABEL: plan.name,
    }
    if plan.instance is not None:
        roles = plan.instance.roles
        labels["llm-d.ai/role"] = "prefill-decode" if len(roles) > 1 else roles[0]
    return labels


def _containers(blueprint: Blueprint, plan: PodPlan) -> Iterator[Fields]:
    if plan.component == GATEWAY:
        yield _gateway_container(blueprint, plan)
    if plan.instance is not None:
        yield _engine_container(blueprint, plan, plan.instance)
    if plan.pool is not None:
        yield _pool_container(blueprint, plan.pool)


def _gateway_container(blueprint: Blueprint, plan: PodPlan) -> Fields:
    gateway = blueprint.deployment.gateway
    ports = [_port("http", gateway.port)]
    if not is_loopback(gateway.admin.host):
        ports.append(_port("admin", gateway.admin.port))
    container = _container(
        GATEWAY, blueprint.containers.gateway_image, ["serve", CONFIG_FILE], ports, read_only=True
    )
    container["readinessProbe"] = {**_get("/ready", plan.host), "periodSeconds": 2, "failureThreshold": 2}
    # Its /health is that of its engines: nobody is helped by a new gateway when they are away.
    container["livenessProbe"] = {**_connect(plan.host), "periodSeconds": 10, "failureThreshold": 3}
    container["volumeMounts"] += model_mounts(blueprint)
    return container


def _engine_container(blueprint: Blueprint, plan: PodPlan, instance: Instance) -> Fields:
    containers, deployment = blueprint.containers, blueprint.deployment
    is_synthetic = deployment.cluster_of(instance).hardware == SYNTHETIC
    ports = [_port("http", instance.http_port)]
    ports += [_port(f"kv-{rank}", port) for rank, port in enumerate(instance.kv_ports)]
    ports += _events_ports("events", instance.events_port)
    container = _container(
        "engine",
        containers.gateway_image if is_synthetic else containers.engine_image,
        ["engine", CONFIG_FILE, instance.name],
        ports,
        read_only=False,
    )
    gpus = blueprint.gpus_of(instance)
    if gpus:
        container["resources"] = {"limits": {containers.gpu_resource: gpus}}
    # Its server wants a certificate of who asks, and the kubelet has none: that it listens must do.
    probe = _connect(plan.host) if instance.tls else _get("/health", plan.host)
    container["startupProbe"] = {
        **probe,
        "periodSeconds": _PROBE_S,
        "failureThreshold": READY_S // _PROBE_S,
    }
    container["readinessProbe"] = {**probe, "periodSeconds": _PROBE_S, "failureThreshold": 2}
    container["livenessProbe"] = {
        **probe,
        "periodSeconds": 10,
        "timeoutSeconds": _PROBE_S,
        "failureThreshold": 6,
    }
    container["volumeMounts"] += engine_mounts(blueprint, plan)
    return container


def _pool_container(blueprint: Blueprint, pool: PoolNode) -> Fields:
    ports = [_port("pool-kv", pool.kv_port), *_events_ports("pool-ev", pool.events_port)]
    container = _container(
        "pool",
        blueprint.containers.gateway_image,
        ["pool", CONFIG_FILE, pool.name],
        ports,
        read_only=True,
    )
    staging_bytes = blueprint.deployment.pool.staging_bytes
    container["resources"] = {"requests": {"memory": str(pool.memory_bytes + staging_bytes)}}
    container["volumeMounts"] += pool_mounts(blueprint, pool)
    return container


def _container(
    name: str, image: str, arguments: list[str], ports: list[Fields], *, read_only: bool
) -> Fields:
    return {
        "name": name,
        "image": image,
        "args": arguments,
        "env": [{"name": "PRFAAS_HOME", "value": STATE_DIR}, {"name": "HOME", "value": STATE_DIR}],
        "ports": ports,
        "securityContext": _restricted(read_only),
        "volumeMounts": standing_mounts(),
    }


def _placing(blueprint: Blueprint, plan: PodPlan, image: str) -> Fields:
    return {
        "name": "secrets",
        "image": image,
        "command": ["sh", "-c", placing_script(blueprint, plan)],
        "securityContext": _restricted(True),
        "volumeMounts": [mount("state", STATE_DIR), secrets_mount()],
    }


def _restricted(read_only: bool) -> Fields:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": read_only,
    }


def _events_ports(name: str, port: int | None) -> list[Fields]:
    return [] if port is None else [_port(name, port), _port(f"{name}-replay", port + 1)]


def _port(name: str, port: int) -> Fields:
    return {"name": name, "containerPort": port, "protocol": "TCP"}


def _get(path: str, host: str | None) -> Fields:
    return {"httpGet": {"path": path, "port": "http", **_at(host)}}


def _connect(host: str | None) -> Fields:
    return {"tcpSocket": {"port": "http", **_at(host)}}


def _at(host: str | None) -> Fields:
    # A machine may have several addresses, and an engine listens on one.
    return {} if host is None else {"host": host}
