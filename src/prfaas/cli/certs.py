"""`prfaas certs`: the certificates that engines, gateway and tools show each other."""

from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import AsJson, CliError, DeploymentPath, console, print_json
from prfaas.cli.option_groups import option, with_options

if TYPE_CHECKING:
    from prfaas.core.deployment import Deployment
    from prfaas.serving.certificates import CertificateFolder, CertificateState


@with_options
def certs(
    deployment: DeploymentPath,
    days: int | None = option(
        None, "How long new certificates are good; 365 if not given.", metavar="N", min=1
    ),
    rotate: bool = option(False, "Replace all certificates, with new keys, by the newest CA.", "--rotate"),
    rotate_ca: bool = option(False, "Add a new CA, which is trusted beside the old one.", "--rotate-ca"),
    retire_ca: bool = option(False, "Trust only the newest CA from now on.", "--retire-ca"),
    show: bool = option(False, "Change nothing.", "--show"),
    as_json: AsJson = False,
) -> None:
    """Make the deployment's CA and a certificate for each instance, the gateway and the tools; show them.

    What is there and fit is kept; what is missing, unfit or about to expire is made anew. Copy ca.crt to every
    machine, and to each the files of what runs there. A deployment that is all on this machine needs no such step.

    To change the CA: --rotate-ca, copy ca.crt everywhere; --rotate, copy all; --retire-ca, copy ca.crt everywhere.

    Exit code 1: a certificate can't be used.

    Example: prfaas certs examples/local.yaml
    """
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.certificates import LIFETIME_DAYS, CertificateFolder

    wanted = [
        option
        for option, given in (
            ("--rotate", rotate),
            ("--rotate-ca", rotate_ca),
            ("--retire-ca", retire_ca),
            ("--show", show),
        )
        if given
    ]
    if len(wanted) > 1:
        raise CliError(f"{wanted[0]} and {wanted[1]} are two steps; give one of them")
    if days is not None and (rotate_ca or retire_ca or show):
        raise CliError(f"--days is for certificates that are made, and {wanted[0]} makes none; leave it out")
    loaded = load_deployment(deployment)
    folder = CertificateFolder(loaded)
    made: tuple[str, ...] = ()
    following: str | None = None
    if rotate_ca:
        folder.add_authority()
        following = f"copy {folder.ca_file} to every machine, then: prfaas certs {deployment} --rotate"
    elif retire_ca:
        folder.retire_authorities()
        following = f"copy {folder.ca_file} to every machine"
    elif not show:
        made = folder.make(lifetime_days=LIFETIME_DAYS if days is None else days, rotate=rotate)
        following = _after_making(loaded, folder, made)
    states = folder.states()
    if as_json:
        _print_json(folder, states, made, following)
    else:
        _print_table(folder, states, made)
        if following is not None:
            typer.echo(f"next: {following}", err=True)
    if any(state.problem is not None for state in states):
        raise typer.Exit(1)


def _after_making(deployment: "Deployment", folder: "CertificateFolder", made: tuple[str, ...]) -> str | None:
    """What is left to do by hand."""
    from prfaas.serving.engines.preparation import is_on_one_machine

    changes_ca = len(folder.authorities()) > 1
    retire = f"prfaas certs {deployment.path} --retire-ca"
    if is_on_one_machine(deployment):
        return retire if changes_ca else None
    if not made:
        return None
    files = f"copy {folder.ca_file} and each new file to the machine where its owner runs"
    return f"{files}, then: {retire}" if changes_ca else files


def _print_table(
    folder: "CertificateFolder", states: "tuple[CertificateState, ...]", made: tuple[str, ...]
) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=str(folder.path), title_justify="left")
    for column in ("certificate", "good until", "state"):
        table.add_column(column, overflow="fold")
    for number, authority in enumerate(folder.authorities()):
        state = "CA, trusted" if number else "CA, trusted, issues"
        table.add_row(Text(authority.name), f"{authority.expires:%Y-%m-%d}", state)
    for each in states:
        until = "-" if each.expires is None else f"{each.expires:%Y-%m-%d}"
        table.add_row(Text(each.member.file.name), until, Text(_state(each, made)))
    console().print(table)


def _state(state: "CertificateState", made: tuple[str, ...]) -> str:
    if state.problem is not None:
        return f"{state.member.name} {state.problem}"
    words = ["new"] if state.member.name in made else []
    words += ["expires soon"] if state.expires_soon else []
    words += [] if state.issued_by_newest else ["of an older CA"]
    return ", ".join(words) or "good"


def _print_json(
    folder: "CertificateFolder",
    states: "tuple[CertificateState, ...]",
    made: tuple[str, ...],
    following: str | None,
) -> None:
    print_json(
        {
            "folder": str(folder.path),
            "ca_file": str(folder.ca_file),
            "authorities": [
                {"name": each.name, "expires": each.expires.isoformat()} for each in folder.authorities()
            ],
            "certificates": [
                {
                    "name": each.member.name,
                    "file": str(each.member.file),
                    "names": list(each.member.names),
                    "expires": None if each.expires is None else each.expires.isoformat(),
                    "expires_soon": each.expires_soon,
                    "issued_by_newest": each.issued_by_newest,
                    "new": each.member.name in made,
                    "problem": each.problem,
                }
                for each in states
            ],
            "next": following,
        }
    )
