"""Docker Compose: one file for each machine, on the machine's own network."""

from collections.abc import Iterator

from prfaas.core.deployment import DeploymentError
from prfaas.tools.emit.blueprint import (
    CONFIG_DIR,
    READY_S,
    STATE_DIR,
    USER_ID,
    Blueprint,
    EmittedFile,
    Place,
    Process,
)
from prfaas.tools.emit.document import yaml_text
from prfaas.tools.emit.health import asking_code, health_code
from prfaas.tools.emit.monitoring import FOLDER, monitoring_files, monitoring_services
from prfaas.tools.emit.ports import ports_table
from prfaas.tools.emit.template import Fields, objects

_NVIDIA = "nvidia.com/gpu"

_SHARED_MEMORY = "/dev/shm:/dev/shm"


def compose_files(blueprint: Blueprint) -> tuple[EmittedFile, ...]:
    """A folder for each machine: `compose.yaml`, the deployment file, and the ports to open.

    Beside the gateway also Prometheus and Grafana, which the profile `monitoring` starts.

    Raises:
        DeploymentError: its GPUs are of a kind that Compose is not told of here.
    """
    return tuple(file for place in blueprint.places() for file in _files_of(blueprint, place))


def _files_of(blueprint: Blueprint, place: Place) -> Iterator[EmittedFile]:
    documents = objects(
        "compose.yaml.jinja",
        services=list(_services(blueprint, place)),
        monitoring=monitoring_services(blueprint.deployment.home) if place.has_gateway else [],
        user=USER_ID,
        state_dir=STATE_DIR,
        config_dir=CONFIG_DIR,
        ready_s=READY_S,
    )
    yield EmittedFile(place.folder / "compose.yaml", yaml_text(*documents))
    for path, text in blueprint.documents.items():
        yield EmittedFile(place.folder / "prfaas" / path, text)
    yield EmittedFile(place.folder / "ports.txt", ports_table(blueprint, place))
    if place.has_gateway:
        for below, text in monitoring_files(blueprint.deployment):
            yield EmittedFile(place.folder / FOLDER / below, text)


def _services(blueprint: Blueprint, place: Place) -> Iterator[Fields]:
    pool, containers, first = place.machine and place.machine.pool, blueprint.containers, 0
    for process in blueprint.processes(place):
        if process.gpus and containers.gpu_resource != _NVIDIA:
            raise DeploymentError(
                blueprint.deployment.path,
                None,
                "containers.gpu_resource",
                f'"{containers.gpu_resource}" is not known to Compose; it can be given GPUs of {_NVIDIA} only',
            )
        yield {
            "process": process,
            "volumes": list(_volumes(blueprint, process, has_pool=pool is not None)),
            "health": _health(blueprint, process),
            "pool": pool and pool.name,
            "devices": list(range(first, first + process.gpus)),
        }
        first += process.gpus


def _volumes(blueprint: Blueprint, process: Process, *, has_pool: bool) -> Iterator[str]:
    model = blueprint.deployment.model
    if process.kind == "engine":
        yield from (f"{folder}:{folder}:ro" for folder in blueprint.model_folders)
    elif process.kind == "gateway" and model.source is None:
        yield f"{model.path}:{model.path}:ro"
    if process.kind == "pool" or (process.kind == "engine" and has_pool):
        yield _SHARED_MEMORY
    if process.disk is not None:
        yield f"{process.disk}:{process.disk}"


def _health(blueprint: Blueprint, process: Process) -> str | None:
    """Python that fails where the process does not answer."""
    if process.kind == "pool":
        return None
    if process.kind == "gateway":
        return asking_code(f"{blueprint.deployment.gateway.url}/ready")
    return health_code(blueprint.deployment, blueprint.deployment.instance(process.name))
