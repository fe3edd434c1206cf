"""Docker Compose: one file for each machine, on the machine's own network."""

from collections.abc import Iterator

from prfaas.core.deployment import SYNTHETIC, DeploymentError, Instance, PoolNode
from prfaas.tools.emit.blueprint import (
    CONFIG_DIR,
    CONFIG_FILE,
    ENGINE_STOP_S,
    GATEWAY_STOP_S,
    READY_S,
    STATE_DIR,
    USER_ID,
    Blueprint,
    EmittedFile,
    Place,
)
from prfaas.tools.emit.document import yaml_text
from prfaas.tools.emit.ports import ports_table
from prfaas.tools.emit.template import Fields, objects

_NVIDIA = "nvidia.com/gpu"

_SHARED_MEMORY = "/dev/shm:/dev/shm"


def compose_files(blueprint: Blueprint) -> tuple[EmittedFile, ...]:
    """A folder for each machine: `compose.yaml`, the deployment file, and the ports to open.

    Raises:
        DeploymentError: its GPUs are of a kind that Compose is not told of here.
    """
    return tuple(file for place in blueprint.places() for file in _files_of(blueprint, place))


def _files_of(blueprint: Blueprint, place: Place) -> Iterator[EmittedFile]:
    documents = objects(
        "compose.yaml.jinja",
        services=list(_services(blueprint, place)),
        user=USER_ID,
        state_dir=STATE_DIR,
        config_dir=CONFIG_DIR,
        ready_s=READY_S,
    )
    yield EmittedFile(place.folder / "compose.yaml", yaml_text(*documents))
    for path, text in blueprint.documents.items():
        yield EmittedFile(place.folder / "prfaas" / path, text)
    yield EmittedFile(place.folder / "ports.txt", ports_table(blueprint, place))


def _services(blueprint: Blueprint, place: Place) -> Iterator[Fields]:
    pool = None if place.machine is None else place.machine.pool
    if pool is not None:
        yield _pool(blueprint, pool)
    devices = 0
    for instance in place.instances:
        gpus = blueprint.gpus_of(instance)
        yield _engine(blueprint, instance, pool, range(devices, devices + gpus))
        devices += gpus
    if place.has_gateway:
        yield _gateway(blueprint)


def _engine(blueprint: Blueprint, instance: Instance, pool: PoolNode | None, devices: range) -> Fields:
    containers, deployment = blueprint.containers, blueprint.deployment
    is_synthetic = deployment.cluster_of(instance).hardware == SYNTHETIC
    if devices and containers.gpu_resource != _NVIDIA:
        raise DeploymentError(
            deployment.path,
            None,
            "containers.gpu_resource",
            f'"{containers.gpu_resource}" is not known to Compose; it can be given GPUs of {_NVIDIA} only',
        )
    listens = f"import socket; socket.create_connection(({instance.host!r}, {instance.http_port}), 3)"
    return {
        "kind": "engine",
        "name": instance.name,
        "image": containers.gateway_image if is_synthetic else containers.engine_image,
        "command": ["engine", CONFIG_FILE, instance.name],
        "stop_s": ENGINE_STOP_S,
        "volumes": [
            *(f"{folder}:{folder}:ro" for folder in blueprint.model_folders),
            *(() if pool is None else (_SHARED_MEMORY,)),
        ],
        "health": listens if instance.tls else _asked(f"{instance.url}/health"),
        "pool": None if pool is None else pool.name,
        "devices": list(devices),
    }


def _pool(blueprint: Blueprint, pool: PoolNode) -> Fields:
    disk = pool.path.parents[1]
    return {
        "kind": "pool",
        "name": pool.name,
        "image": blueprint.containers.gateway_image,
        "command": ["pool", CONFIG_FILE, pool.name],
        "stop_s": ENGINE_STOP_S,
        "volumes": [_SHARED_MEMORY, *(() if disk.is_relative_to(STATE_DIR) else (f"{disk}:{disk}",))],
        "health": None,
        "devices": [],
    }


def _gateway(blueprint: Blueprint) -> Fields:
    model = blueprint.deployment.model
    return {
        "kind": "gateway",
        "name": "gateway",
        "image": blueprint.containers.gateway_image,
        "command": ["serve", CONFIG_FILE],
        "stop_s": GATEWAY_STOP_S,
        "volumes": [f"{model.path}:{model.path}:ro"] if model.source is None else [],
        "health": _asked(f"{blueprint.deployment.gateway.url}/ready"),
        "devices": [],
    }


def _asked(url: str) -> str:
    return f"import urllib.request as u; u.build_opener(u.ProxyHandler({{}})).open({url!r}, timeout=3)"
