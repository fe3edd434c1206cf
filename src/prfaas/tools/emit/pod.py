"""The pods of a site: their Services, the workloads that run them, and what their containers start."""

from collections.abc import Iterator
from pathlib import Path

from prfaas.core.deployment import GATEWAY, Instance, is_loopback
from prfaas.core.deployment.schema import PodSection
from prfaas.core.units import GIB
from prfaas.tools.emit.blueprint import (
    READY_S,
    Blueprint,
    Process,
)
from prfaas.tools.emit.health import health_code
from prfaas.tools.emit.pod_plan import PodPlan, bad_field, is_address, kubernetes_name
from prfaas.tools.emit.template import Fields, objects
from prfaas.tools.emit.volume import (
    KEYS_DIR,
    SECRETS_DIR,
    model_places,
    placing_script,
    pod_values,
    secret_files,
    secret_name,
)

MEMBER_LABEL = "prfaas/member"
SITE_LABEL = "prfaas/site"
COMPONENT_LABEL = "app.kubernetes.io/component"

_PROBE_S = 5

PRESTOP_S = 5
"""So long a gateway that is to end takes new requests, until no node sends it any."""

# Estimates, which the file replaces. vLLM has a process for each GPU and two more, and the connector has threads beside
# them. Its processes share 8 GiB, as with Compose.
_ENGINE_CPUS, _CPUS_PER_GPU, _OTHER_CPUS = 4, 2, 2
_ENGINE_BYTES = _RANK_BYTES = _SHARED_BYTES = 8 * GIB
_GATEWAY_BYTES = 4 * GIB
_ENGINE_DISK_BYTES, _OTHER_DISK_BYTES = 10 * GIB, GIB


def pod_objects(blueprint: Blueprint, plan: PodPlan) -> list[Fields]:
    """Its Service, and its StatefulSet or, of the gateway, Deployment.

    Pods whose host is an address run on the node whose label prfaas/machine has it.
    """
    containers = list(_containers(blueprint, plan))
    at = {} if plan.host is None else {"prfaas/machine": plan.host.replace(":", "-")}
    return objects(
        "pod.yaml.jinja",
        plan=plan,
        labels=_labels(blueprint, plan),
        containers=containers,
        node_selector={**containers[0]["settings"].node_selector, **at},
        shared_bytes=_shared_bytes(blueprint, plan),
        health=None if plan.instance is None else health_code(blueprint.deployment, plan.instance),
        secrets={name: secret_name(blueprint, name) for name, _ in secret_files(blueprint, plan)},
        placing_script=placing_script(blueprint, plan),
        models=model_places(blueprint),
        sockets=str(blueprint.deployment.home / "pools"),
        disk=_disk(blueprint, plan),
        gateways=_gateways(blueprint, plan),
        stop_s=max(each["stop_s"] for each in containers) + (PRESTOP_S if plan.component == GATEWAY else 0),
        prestop_s=PRESTOP_S,
        secrets_dir=SECRETS_DIR,
        keys_dir=KEYS_DIR,
        probe_s=_PROBE_S,
        ready_s=READY_S,
        **pod_values(blueprint),
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


def _disk(blueprint: Blueprint, plan: PodPlan) -> Path | None:
    """The folder of the SSD that the pod's pool writes into.

    Raises:
        DeploymentError: none is named, and the pages would fill the root disk of the node.
    """
    if plan.pool is None or not plan.pool.ssd_bytes:
        return None
    disk = blueprint.pool(plan.pool).disk
    if disk is None:
        raise bad_field(
            blueprint,
            f"clusters.{plan.site}.pool.path",
            "is missing: the pool's pages would lie on the root disk of its node; name a folder of an SSD",
        )
    return disk


def _shared_bytes(blueprint: Blueprint, plan: PodPlan) -> int:
    """The most that a pod has in shared memory of its own: what vLLM needs, staging, and the pool's pages."""
    deployment = blueprint.deployment
    pool = 0 if plan.pool is None else plan.pool.memory_bytes + deployment.pool.staging_bytes
    return _SHARED_BYTES + deployment.engine.staging_bytes + pool


def _containers(blueprint: Blueprint, plan: PodPlan) -> Iterator[Fields]:
    containers, deployment = blueprint.containers, blueprint.deployment
    if plan.component == GATEWAY:
        gateway = deployment.gateway
        ports = [("http", gateway.port)]
        if not is_loopback(gateway.admin.host):
            ports.append(("admin", gateway.admin.port))
        resources = _resources(containers.gateway_pod, _GATEWAY_BYTES, 2 * _GATEWAY_BYTES)
        yield _container(blueprint.gateway(), ports, containers.gateway_pod, resources)
    if (instance := plan.instance) is not None:
        process = blueprint.engine(instance)
        ports = [
            ("http", instance.http_port),
            *((f"kv-{rank}", port) for rank, port in enumerate(instance.kv_ports)),
            *([] if instance.nixl_port is None else [("nixl", instance.nixl_port)]),
        ]
        resources = _engine_resources(blueprint, plan, instance, process)
        meets_others = plan.uses_pool is not None
        yield _container(process, ports, containers.engine_pod, resources, meets_others=meets_others)
    if (pool := plan.pool) is not None:
        ports = [("pool-kv", pool.kv_port)]
        memory_bytes = pool.memory_bytes + deployment.pool.staging_bytes
        resources = _resources(containers.pool_pod, memory_bytes, memory_bytes + 2 * GIB)
        meets_others = is_address(pool.host)
        yield _container(
            blueprint.pool(pool), ports, containers.pool_pod, resources, meets_others=meets_others
        )


def _engine_resources(blueprint: Blueprint, plan: PodPlan, instance: Instance, process: Process) -> Fields:
    """Those of an engine, with what its node's device plugins hand out."""
    containers, engine, gpus = blueprint.containers, blueprint.deployment.engine, process.gpus
    pool = plan.pool or plan.uses_pool
    memory_bytes = _ENGINE_BYTES + _RANK_BYTES * max(gpus, 1) + engine.staging_bytes
    # Pages of a pool count as memory of who touches them first. On CPUs the model is in memory, too: not known here.
    most_bytes = (
        2 * memory_bytes + _shared_bytes(blueprint, plan) + (0 if pool is None else pool.memory_bytes)
    )
    resources = _resources(
        containers.engine_pod,
        memory_bytes,
        most_bytes if gpus or instance.is_stand_in else None,
        cpus=_ENGINE_CPUS + _CPUS_PER_GPU * gpus,
        disk_bytes=_ENGINE_DISK_BYTES,
    )
    rdma = containers.rdma_resource if blueprint.deployment.uses_nixl(instance) else None
    wanted = {containers.gpu_resource: gpus, rdma: 1}
    resources["limits"] |= {resource: count for resource, count in wanted.items() if resource and count}
    return resources


def _resources(
    settings: PodSection,
    memory_bytes: int,
    most_bytes: int | None,
    *,
    cpus: float = _OTHER_CPUS,
    disk_bytes: int = _OTHER_DISK_BYTES,
) -> Fields:
    """Requests and limits of a container: as the file says, else as these estimates say."""
    requests = {
        "cpu": f"{settings.cpus or cpus:g}",
        "memory": str(settings.memory_bytes or memory_bytes),
        "ephemeral-storage": str(settings.disk_bytes or disk_bytes),
    }
    limits = {"memory": settings.memory_bytes or most_bytes, "ephemeral-storage": settings.disk_bytes}
    return {"requests": requests, "limits": {name: str(most) for name, most in limits.items() if most}}


def _container(
    process: Process,
    ports: list[tuple[str, int]],
    settings: PodSection,
    resources: Fields,
    *,
    meets_others: bool = False,
) -> Fields:
    """`meets_others`: over the socket of a pool, where engines and pool are in other pods of the machine."""
    return {
        "name": process.kind,
        "image": process.image,
        "args": process.args,
        "before_stop": process.before_stop,
        "stop_s": process.stop_s,
        "ports": ports,
        "meets_others": meets_others,
        "settings": settings,
        "resources": resources,
    }
