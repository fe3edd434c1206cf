"""systemd units: one for each engine, pool and gateway of a machine, and a target that starts them together."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

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

TARGET = "prfaas.target"

# What no part of prfaas needs. Engines keep their devices, which are GPUs, and may compile kernels.
_HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077
"""
_WITHOUT_DEVICES = """\
PrivateDevices=yes
SystemCallFilter=@system-service
"""


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
        yield _name("pool", pool.name), _pool(blueprint, pool, program)
    devices = 0
    for instance in place.instances:
        gpus = blueprint.gpus_of(instance)
        # An engine that is alone on its machine finds its GPUs itself.
        own = range(devices, devices + gpus) if len(place.instances) > 1 else range(0)
        yield _name("engine", instance.name), _engine(blueprint, instance, pool, own, program)
        devices += gpus
    if place.has_gateway:
        yield "prfaas-gateway.service", _gateway(blueprint, program)


def _name(kind: str, name: str) -> str:
    return f"prfaas-{kind}-{name}.service"


def _engine(
    blueprint: Blueprint, instance: Instance, pool: PoolNode | None, devices: range, program: str
) -> str:
    after = () if pool is None else (_name("pool", pool.name),)
    visible = ",".join(map(str, devices))
    return _service(
        blueprint,
        f"engine {instance.name}",
        f"{program} engine {CONFIG_FILE} {instance.name}",
        members=(instance.name,),
        after=after,
        settings=(
            *((f"Environment=CUDA_VISIBLE_DEVICES={visible}",) if visible else ()),
            "LimitMEMLOCK=infinity",
            f"TimeoutStopSec={ENGINE_STOP_S}",
        ),
        hardening=_HARDENING,
    )


def _pool(blueprint: Blueprint, pool: PoolNode, program: str) -> str:
    # Below it the daemon makes a folder for the deployment and the pool.
    disk = pool.path.parents[1]
    own = disk.is_relative_to(STATE_DIR)
    return _service(
        blueprint,
        f"pool {pool.name}",
        f"{program} pool {CONFIG_FILE} {pool.name}",
        members=(pool.name,),
        settings=(
            *(() if own else (f"ReadWritePaths={disk}",)),
            "LimitMEMLOCK=infinity",
            f"TimeoutStopSec={ENGINE_STOP_S}",
        ),
        hardening=_HARDENING + _WITHOUT_DEVICES,
    )


def _gateway(blueprint: Blueprint, program: str) -> str:
    return _service(
        blueprint,
        "gateway",
        f"{program} serve {CONFIG_FILE}",
        members=tuple(CERTIFICATE_NAMES),
        settings=("ExecReload=/bin/kill -HUP $MAINPID", f"TimeoutStopSec={GATEWAY_STOP_S}"),
        hardening=_HARDENING + _WITHOUT_DEVICES,
    )


def _service(
    blueprint: Blueprint,
    what: str,
    command: str,
    *,
    members: Sequence[str],
    after: Sequence[str] = (),
    settings: Sequence[str] = (),
    hardening: str = "",
) -> str:
    needed = "".join(f"AssertPathExists={path}\n" for path in (CONFIG_FILE, *_secrets(blueprint, members)))
    return (
        "[Unit]\n"
        f"Description=prfaas {what} of {blueprint.deployment.name}\n"
        "Wants=network-online.target\n"
        f"After={' '.join(('network-online.target', *after))}\n"
        f"PartOf={TARGET}\n"
        f"{needed}"
        "StartLimitIntervalSec=600\n"
        "StartLimitBurst=10\n"
        "\n[Service]\n"
        "Type=exec\n"
        "User=prfaas\n"
        "Group=prfaas\n"
        f"Environment=PRFAAS_HOME={STATE_DIR} HOME={STATE_DIR}\n"
        f"StateDirectory={PurePosixPath(STATE_DIR).name}\n"
        "StateDirectoryMode=0700\n"
        f"ConfigurationDirectory={PurePosixPath(CONFIG_DIR).name}\n"
        f"ExecStart={command}\n"
        "Restart=always\n"
        "RestartSec=5\n"
        # The first process ends the others; what is left after the time for it is killed.
        "KillMode=mixed\n"
        "LimitNOFILE=1048576\n"
        + "".join(f"{line}\n" for line in settings)
        + f"ProtectHome={_home_access(blueprint)}\n"
        + hardening
        + f"\n[Install]\nWantedBy={TARGET}\n"
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


def _home_access(blueprint: Blueprint) -> str:
    """Hidden, unless the model lies in a person's folder."""
    homes = (Path("/home"), Path("/root"))
    in_home = any(folder.is_relative_to(home) for folder in blueprint.model_folders for home in homes)
    return "read-only" if in_home else "yes"
