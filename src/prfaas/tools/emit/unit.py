"""systemd units: one for each engine, pool and gateway of a machine, and a target that starts them together."""

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
            command=" ".join((program, *process.args)),
            target=TARGET,
            state_dir=STATE_DIR,
            config_dir=CONFIG_DIR,
            needed=(CONFIG_FILE, *_secrets(blueprint, process.members)),
            # Hidden, unless the model lies in a person's folder.
            reads_home=any(
                folder.is_relative_to(home) for folder in blueprint.model_folders for home in homes
            ),
            stop_s=process.stop_s,
            pool_unit=None if pool is None or process.kind != "engine" else _unit_name(f"pool {pool.name}"),
            # An engine that is alone on its machine finds its GPUs itself.
            devices=",".join(map(str, devices)) if len(place.instances) > 1 else "",
            disk=process.disk,
        )
        yield _unit_name(what), text


def _unit_name(what: str) -> str:
    return f"prfaas-{what.replace(' ', '-')}.service"


def _secrets(blueprint: Blueprint, members: Sequence[str]) -> tuple[Path, ...]:
    """The files that must be copied to the machine before the unit can start."""
    if blueprint.is_on_one_machine:
        return ()
    return tuple(path for _, _, path in blueprint.secrets(members))
