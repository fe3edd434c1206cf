"""systemd units: one for each engine, pool and gateway of a machine, a target, and a script that installs them."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from prfaas.core.deployment import GATEWAY
from prfaas.tools.emit.blueprint import (
    CONFIG_DIR,
    CONFIG_FILE,
    STATE_DIR,
    Blueprint,
    EmittedFile,
    Place,
    Process,
)
from prfaas.tools.emit.ports import ports_table
from prfaas.tools.emit.template import rendered

TARGET = "prfaas.target"


# The user of engines and pools, since those of a machine share its memory. A user's home is the `$PRFAAS_HOME` of its
# units, which no other user may enter.
_HOMES, _KV_USER = Path(STATE_DIR).parent, Path(STATE_DIR).name
# Who takes an engine over has neither the operators' token nor the certificates that command other engines.
_GATEWAY_USER = f"{_KV_USER}-gateway"


def systemd_files(blueprint: Blueprint, program: str) -> tuple[EmittedFile, ...]:
    """A folder for each machine: its units, the deployment file, what installs them, and the ports to open.

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
    yield EmittedFile(place.folder / "install.sh", _install_script(blueprint, place), is_script=True)
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
    pool = None if place.machine is None else place.machine.pool
    homes, first = (Path("/home"), Path("/root")), 0
    for process in blueprint.processes(place):
        what = process.kind if process.kind == GATEWAY else f"{process.kind} {process.name}"
        devices = range(first, first + process.gpus)
        first += process.gpus
        text = rendered(
            "unit.service.jinja",
            kind=process.kind,
            what=what,
            deployment=blueprint.deployment.name,
            command=" ".join((program, *_arguments(process))),
            target=TARGET,
            user=_user(blueprint, process),
            home=_HOMES / _user(blueprint, process),
            config_dir=CONFIG_DIR,
            needed=(CONFIG_FILE, *_secrets(blueprint, process)),
            # Hidden, unless the model lies in a person's folder.
            reads_home=any(
                folder.is_relative_to(home) for folder in blueprint.model_folders for home in homes
            ),
            stop_s=process.stop_s,
            before_stop=" ".join((program, *process.before_stop)) if process.before_stop else "",
            pool_unit=None if pool is None or process.kind != "engine" else _unit_name(f"pool {pool.name}"),
            # An engine that is alone on its machine finds its GPUs itself.
            devices=",".join(map(str, devices)) if len(place.instances) > 1 else "",
            disk=process.disk,
        )
        yield _unit_name(what), text


def _unit_name(what: str) -> str:
    return f"prfaas-{what.replace(' ', '-')}.service"


def _arguments(process: Process) -> tuple[str, ...]:
    """Of `prfaas`. What a pool holds in memory outlives its unit, which may be started again."""
    return ("pool", "start", "--keep-memory", *process.args[1:]) if process.kind == "pool" else process.args


def _user(blueprint: Blueprint, process: Process) -> str:
    # On one machine a key is made by who needs it first, and has one place.
    return _GATEWAY_USER if process.kind == GATEWAY and not blueprint.is_on_one_machine else _KV_USER


def _secrets(blueprint: Blueprint, process: Process) -> tuple[Path, ...]:
    """The files that must be copied to the machine before the unit can start."""
    if blueprint.is_on_one_machine:
        return ()
    home = _HOMES / _user(blueprint, process)
    paths = (path for _, _, path in blueprint.secrets(process.members))
    return tuple(
        home / path.relative_to(STATE_DIR) if path.is_relative_to(STATE_DIR) else path for path in paths
    )


def _install_script(blueprint: Blueprint, place: Place) -> str:
    """Secrets that lie outside of their user's home are the operator's to place."""
    name = blueprint.deployment.name
    accounts: dict[str, dict[str, None]] = {}
    for process in blueprint.processes(place):
        user = _user(blueprint, process)
        own, folder = accounts.setdefault(user, {}), _HOMES / user / name
        paths = (path for path in _secrets(blueprint, process) if path.is_relative_to(folder))
        own |= dict.fromkeys(shlex.quote(str(path.relative_to(folder))) for path in paths)
    needed = [Path(name, secret).parent for secrets in accounts.values() for secret in secrets]
    return rendered(
        "install.sh.jinja",
        machine=place.folder.name,
        deployment=name,
        secrets_of=accounts,
        homes=_HOMES,
        folders=sorted({str(folder) for folder in needed}),
        has_secrets=bool(needed),
        config_dir=CONFIG_DIR,
        target=TARGET,
    )
