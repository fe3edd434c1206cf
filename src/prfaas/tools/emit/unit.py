"""systemd units: one for each engine, pool and gateway of a machine, and a target that starts them together."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from prfaas.core.deployment import CERTIFICATE_NAMES, GATEWAY, Instance, PoolNode
from prfaas.tools.emit.blueprint import (
    CONFIG_DIR,
    CONFIG_FILE,
    ENGINE_STOP_S,
    GATEWAY_STOP_S,
    STATE_DIR,
    Blueprint,
    EmittedFile,
    Place,
)
from prfaas.tools.emit.ports import ports_table
from prfaas.tools.emit.template import rendered

TARGET = "prfaas.target"


def systemd_files(blueprint: Blueprint, program: str) -> tuple[EmittedFile, ...]:
    """A folder for each machine: its units, the deployment file, and the ports to open.

    Args:
        blueprint: what to run.
        program: path of the `prfaas` command on the machines.
    """
    return tuple(file for place in blueprint.places() for file in _files_of(blueprint, place, program))


def _files_of(blueprint: Blueprint, place: Place, program: str) -> Iterator[EmittedFile]:
    units = dict(_units(blueprint, place, program))
    for name, text in units.items():
        yield EmittedFile(place.folder / name, text)
    yield EmittedFile(place.folder / TARGET, _target(blueprint, place, tuple(units)))
    for path, text in blueprint.documents.items():
        yield EmittedFile(place.folder / "prfaas" / path, text)
    yield EmittedFile(place.folder / "ports.txt", ports_table(blueprint, place))


def _target(blueprint: Blueprint, place: Place, units: Sequence[str]) -> str:
    return (
        "[Unit]\n"
        f"Description=prfaas {blueprint.deployment.name} on {place.folder.name}, site {place.site.name}\n"
        f"Wants={' '.join(units)}\n"
        "\n[Install]\nWantedBy=multi-user.target\n"
    )


def _units(blueprint: Blueprint, place: Place, program: str) -> Iterator[tuple[str, str]]:
    machine = place.machine
    pool = None if machine is None else machine.pool
    if pool is not None:
        yield _name("pool", pool.name), _pool(blueprint, pool, f"{program} pool {CONFIG_FILE} {pool.name}")
    devices = 0
    for instance in place.instances:
        gpus = blueprint.gpus_of(instance)
        # An engine that is alone on its machine finds its GPUs itself.
        own = range(devices, devices + gpus) if len(place.instances) > 1 else range(0)
        yield (
            _name("engine", instance.name),
            _engine(blueprint, instance, pool, own, f"{program} engine {CONFIG_FILE} {instance.name}"),
        )
        devices += gpus
    if place.has_gateway:
        yield (
            "prfaas-gateway.service",
            _service(
                blueprint,
                "gateway",
                "",
                f"{program} serve {CONFIG_FILE}",
                members=tuple(CERTIFICATE_NAMES),
                stop_s=GATEWAY_STOP_S,
            ),
        )


def _name(kind: str, name: str) -> str:
    return f"prfaas-{kind}-{name}.service"


def _engine(
    blueprint: Blueprint, instance: Instance, pool: PoolNode | None, devices: range, command: str
) -> str:
    return _service(
        blueprint,
        "engine",
        instance.name,
        command,
        members=(instance.name,),
        pool_unit=None if pool is None else _name("pool", pool.name),
        devices=",".join(map(str, devices)),
    )


def _pool(blueprint: Blueprint, pool: PoolNode, command: str) -> str:
    # Below it the daemon makes a folder for the deployment and the pool.
    disk = pool.path.parents[1]
    own = disk.is_relative_to(STATE_DIR)
    return _service(blueprint, "pool", pool.name, command, members=(pool.name,), disk=None if own else disk)


def _service(
    blueprint: Blueprint,
    kind: str,
    name: str,
    command: str,
    *,
    members: Sequence[str],
    stop_s: int = ENGINE_STOP_S,
    pool_unit: str | None = None,
    devices: str = "",
    disk: Path | None = None,
) -> str:
    homes = (Path("/home"), Path("/root"))
    return rendered(
        "unit.service.jinja",
        kind=kind,
        what=f"{kind} {name}".rstrip(),
        deployment=blueprint.deployment.name,
        command=command,
        target=TARGET,
        state_dir=STATE_DIR,
        config_dir=CONFIG_DIR,
        needed=(CONFIG_FILE, *_secrets(blueprint, members)),
        # Hidden, unless the model lies in a person's folder.
        reads_home=any(folder.is_relative_to(home) for folder in blueprint.model_folders for home in homes),
        stop_s=stop_s,
        pool_unit=pool_unit,
        devices=devices,
        disk=disk,
    )


def _secrets(blueprint: Blueprint, members: Sequence[str]) -> tuple[Path, ...]:
    """The files that must be copied to the machine before the unit can start."""
    if blueprint.is_on_one_machine:
        return ()
    deployment, security = blueprint.deployment, blueprint.deployment.security
    own = [security.identity_file(name) for name in members if deployment.needs_certificate(name)]
    token = deployment.gateway.admin.token_file if GATEWAY in members else None
    return (
        security.key_file,
        *((security.ca_file,) if own else ()),
        *own,
        *((token,) if token is not None else ()),
        *((path for _, path in blueprint.etcd_files) if GATEWAY in members else ()),
    )
