"""The pods of a site: their Services, the workloads that run them, and what their containers start."""

from collections.abc import Iterator

from prfaas.core.deployment import GATEWAY, SYNTHETIC, Instance, PoolNode, is_loopback
from prfaas.tools.emit.blueprint import (
    CONFIG_DIR,
    CONFIG_FILE,
    ENGINE_STOP_S,
    GATEWAY_STOP_S,
    READY_S,
    STATE_DIR,
    USER_ID,
    Blueprint,
)
from prfaas.tools.emit.pod_plan import PodPlan, kubernetes_name
from prfaas.tools.emit.template import Fields, objects
from prfaas.tools.emit.volume import (
    SECRETS_DIR,
    engine_mounts,
    model_mounts,
    placing_script,
    pool_mounts,
    volumes_of,
)

MEMBER_LABEL = "prfaas/member"
SITE_LABEL = "prfaas/site"
COMPONENT_LABEL = "app.kubernetes.io/component"

_PROBE_S = 5


def pod_objects(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    """Its Service, and its StatefulSet or, of the gateway, Deployment.

    Pods whose host is an address run on the node whose label prfaas/machine has it.
    """
    return objects(
        "pod.yaml.jinja",
        plan=plan,
        labels=_labels(blueprint, plan),
        containers=list(_containers(blueprint, plan)),
        volumes=volumes_of(blueprint, plan),
        placing_script=placing_script(blueprint, plan),
        gateways=_gateways(blueprint, plan),
        stop_s=GATEWAY_STOP_S if plan.component == GATEWAY else ENGINE_STOP_S,
        user=USER_ID,
        state_dir=STATE_DIR,
        config_dir=CONFIG_DIR,
        secrets_dir=SECRETS_DIR,
        probe_s=_PROBE_S,
        ready_s=READY_S,
    )


def _labels(blueprint: Blueprint, plan: PodPlan) -> Fields:
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


def _gateways(blueprint: Blueprint, plan: PodPlan) -> int:
    """Two where they can share what they know, each under a name of its own."""
    fleet = blueprint.deployment.fleet
    return 2 if fleet is not None and fleet.name is None and plan.host is None else 1


def _containers(blueprint: Blueprint, plan: PodPlan) -> Iterator[Fields]:
    if plan.component == GATEWAY:
        yield _gateway_container(blueprint)
    if plan.instance is not None:
        yield _engine_container(blueprint, plan, plan.instance)
    if plan.pool is not None:
        yield _pool_container(blueprint, plan.pool)


def _gateway_container(blueprint: Blueprint) -> Fields:
    gateway = blueprint.deployment.gateway
    ports = [("http", gateway.port)]
    if not is_loopback(gateway.admin.host):
        ports.append(("admin", gateway.admin.port))
    return {
        "name": GATEWAY,
        "image": blueprint.containers.gateway_image,
        "args": ["serve", CONFIG_FILE],
        "ports": ports,
        "mounts": model_mounts(blueprint),
        "resources": {},
    }


def _engine_container(blueprint: Blueprint, plan: PodPlan, instance: Instance) -> Fields:
    containers, deployment = blueprint.containers, blueprint.deployment
    is_synthetic = deployment.cluster_of(instance).hardware == SYNTHETIC
    gpus = blueprint.gpus_of(instance)
    return {
        "name": "engine",
        "image": containers.gateway_image if is_synthetic else containers.engine_image,
        "args": ["engine", CONFIG_FILE, instance.name],
        "ports": [
            ("http", instance.http_port),
            *((f"kv-{rank}", port) for rank, port in enumerate(instance.kv_ports)),
        ],
        "mounts": engine_mounts(blueprint, plan),
        "resources": {"limits": {containers.gpu_resource: gpus}} if gpus else {},
    }


def _pool_container(blueprint: Blueprint, pool: PoolNode) -> Fields:
    memory_bytes = pool.memory_bytes + blueprint.deployment.pool.staging_bytes
    return {
        "name": "pool",
        "image": blueprint.containers.gateway_image,
        "args": ["pool", CONFIG_FILE, pool.name],
        "ports": [("pool-kv", pool.kv_port)],
        "mounts": pool_mounts(blueprint, pool),
        "resources": {"requests": {"memory": str(memory_bytes)}},
    }
