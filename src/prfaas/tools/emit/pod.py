"""The pods of a site: their Services, the workloads that run them, and what their containers start."""

from collections.abc import Iterator

from prfaas.core.deployment import GATEWAY, Instance, is_loopback
from prfaas.tools.emit.blueprint import (
    CONFIG_DIR,
    ENGINE_STOP_S,
    GATEWAY_STOP_S,
    READY_S,
    STATE_DIR,
    USER_ID,
    Blueprint,
    Process,
)
from prfaas.tools.emit.pod_plan import PodPlan, is_address, kubernetes_name
from prfaas.tools.emit.template import Fields, objects
from prfaas.tools.emit.volume import (
    CONFIG_MAP,
    SECRETS_DIR,
    config_keys,
    model_places,
    placing_script,
    secret_files,
    secret_name,
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
        config_map=CONFIG_MAP,
        config_keys=config_keys(blueprint),
        secrets={name: secret_name(blueprint, name) for name, _ in secret_files(blueprint, plan)},
        placing_script=placing_script(blueprint, plan),
        models=model_places(blueprint),
        models_claim=blueprint.containers.models_claim,
        sockets=str(blueprint.deployment.home / "pools"),
        disk=None if plan.pool is None else blueprint.pool(plan.pool).disk,
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
        gateway = blueprint.deployment.gateway
        ports = [("http", gateway.port)]
        if not is_loopback(gateway.admin.host):
            ports.append(("admin", gateway.admin.port))
        yield _container(blueprint.gateway(), ports)
    if (instance := plan.instance) is not None:
        process = blueprint.engine(instance)
        ports = [
            ("http", instance.http_port),
            *((f"kv-{rank}", port) for rank, port in enumerate(instance.kv_ports)),
            *([] if instance.nixl_port is None else [("nixl", instance.nixl_port)]),
        ]
        resources = {"limits": limits} if (limits := _devices(blueprint, instance, process)) else None
        yield _container(process, ports, resources, meets_others=plan.uses_pool is not None)
    if (pool := plan.pool) is not None:
        ports = [("pool-kv", pool.kv_port)]
        memory_bytes = pool.memory_bytes + blueprint.deployment.pool.staging_bytes
        requests = {"requests": {"memory": str(memory_bytes)}}
        yield _container(blueprint.pool(pool), ports, requests, meets_others=is_address(pool.host))


def _devices(blueprint: Blueprint, instance: Instance, process: Process) -> dict[str, int]:
    """What an engine's container asks its node's device plugins for, by resource."""
    rdma = blueprint.containers.rdma_resource if blueprint.deployment.uses_nixl(instance) else None
    wanted = {blueprint.containers.gpu_resource: process.gpus, rdma: 1}
    return {resource: count for resource, count in wanted.items() if resource is not None and count}


def _container(
    process: Process,
    ports: list[tuple[str, int]],
    resources: Fields | None = None,
    *,
    meets_others: bool = False,
) -> Fields:
    """`meets_others`: over the socket of a pool, where engines and pool are in other pods of the machine."""
    return {
        "name": process.kind,
        "image": process.image,
        "args": process.args,
        "ports": ports,
        "meets_others": meets_others,
        "resources": resources or {},
    }
