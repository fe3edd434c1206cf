"""Docker Compose: one file for each machine, on the machine's own network."""

from collections.abc import Iterator
from typing import Any

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

_NVIDIA = "nvidia.com/gpu"

Service = dict[str, Any]


def compose_files(blueprint: Blueprint) -> tuple[EmittedFile, ...]:
    """A folder for each machine: `compose.yaml`, the deployment file, and the ports to open.

    Raises:
        DeploymentError: its GPUs are of a kind that Compose is not told of here.
    """
    return tuple(file for place in blueprint.places() for file in _files_of(blueprint, place))


def _files_of(blueprint: Blueprint, place: Place) -> Iterator[EmittedFile]:
    services = dict(_services(blueprint, place))
    yield EmittedFile(place.folder / "compose.yaml", yaml_text({"services": services}))
    for path, text in blueprint.documents.items():
        yield EmittedFile(place.folder / "prfaas" / path, text)
    yield EmittedFile(place.folder / "ports.txt", ports_table(blueprint, place))


def _services(blueprint: Blueprint, place: Place) -> Iterator[tuple[str, Service]]:
    pool = None if place.machine is None else place.machine.pool
    if pool is not None:
        yield pool.name, _pool(blueprint, pool)
    devices = 0
    for instance in place.instances:
        gpus = blueprint.gpus_of(instance)
        yield instance.name, _engine(blueprint, instance, pool, range(devices, devices + gpus))
        devices += gpus
    if place.has_gateway:
        yield "gateway", _gateway(blueprint)


def _engine(blueprint: Blueprint, instance: Instance, pool: PoolNode | None, devices: range) -> Service:
    containers, deployment = blueprint.containers, blueprint.deployment
    is_synthetic = deployment.cluster_of(instance).hardware == SYNTHETIC
    service = _service(
        containers.gateway_image if is_synthetic else containers.engine_image,
        ["engine", CONFIG_FILE, instance.name],
        ENGINE_STOP_S,
    )
    service["volumes"] += [f"{folder}:{folder}:ro" for folder in blueprint.model_folders]
    service["ulimits"]["memlock"] = -1
    service["healthcheck"] = _health(instance)
    if pool is not None:
        service["volumes"].append("/dev/shm:/dev/shm")
        service["depends_on"] = [pool.name]
    else:
        service["shm_size"] = "8gb"
    if devices:
        if containers.gpu_resource != _NVIDIA:
            raise DeploymentError(
                deployment.path,
                None,
                "containers.gpu_resource",
                f'"{containers.gpu_resource}" is not known to Compose; it can be given GPUs of {_NVIDIA} only',
            )
        device = {"driver": "nvidia", "device_ids": [str(each) for each in devices], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _pool(blueprint: Blueprint, pool: PoolNode) -> Service:
    service = _service(
        blueprint.containers.gateway_image, ["pool", CONFIG_FILE, pool.name], ENGINE_STOP_S, writes=False
    )
    service["volumes"].append("/dev/shm:/dev/shm")
    disk = pool.path.parents[1]
    if not disk.is_relative_to(STATE_DIR):
        service["volumes"].append(f"{disk}:{disk}")
    service["ulimits"]["memlock"] = -1
    return service


def _gateway(blueprint: Blueprint) -> Service:
    service = _service(
        blueprint.containers.gateway_image, ["serve", CONFIG_FILE], GATEWAY_STOP_S, writes=False
    )
    if blueprint.deployment.model.source is None:
        model = blueprint.deployment.model.path
        service["volumes"].append(f"{model}:{model}:ro")
    service["healthcheck"] = _asked(f"{blueprint.deployment.gateway.url}/ready", start_s=30)
    return service


def _service(image: str, command: list[str], stop_s: int, *, writes: bool = True) -> Service:
    service: Service = {
        "image": image,
        "command": command,
        # KVCache goes from machine to machine: a network of the containers' own would cost MTU and hide TCP's facts.
        "network_mode": "host",
        "user": f"{USER_ID}:{USER_ID}",
        "environment": {"PRFAAS_HOME": STATE_DIR, "HOME": STATE_DIR},
        "volumes": [f"./prfaas:{CONFIG_DIR}:ro", f"{STATE_DIR}:{STATE_DIR}"],
        "ulimits": {"nofile": 1048576},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_s}s",
    }
    if not writes:
        service |= {"read_only": True, "tmpfs": ["/tmp"]}
    return service


def _health(instance: Instance) -> Service:
    if not instance.tls:
        return _asked(f"{instance.url}/health", start_s=READY_S)
    # Its server wants a certificate of who asks: that it listens must do.
    code = f"import socket; socket.create_connection(({instance.host!r}, {instance.http_port}), 3)"
    return _checked(code, READY_S)


def _asked(url: str, start_s: int) -> Service:
    code = f"import urllib.request as u; u.build_opener(u.ProxyHandler({{}})).open({url!r}, timeout=3)"
    return _checked(code, start_s)


def _checked(code: str, start_s: int) -> Service:
    return {
        "test": ["CMD", "python3", "-c", code],
        "interval": "10s",
        "timeout": "5s",
        "retries": 3,
        "start_period": f"{start_s}s",
    }
