"""`prfaas emit`: files that run a deployment under systemd, Docker Compose or Kubernetes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import AsJson, CliError, DeploymentPath, print_json
from prfaas.cli.option_groups import option, with_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prfaas.tools.emit.blueprint import EmittedFile

emit = typer.Typer(
    name="emit",
    no_args_is_help=True,
    help="Write files for systemd, Docker Compose or Kubernetes from the one deployment file.",
)

Out = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="Write them below this folder; it is made if need be."),
]


@emit.command()
@with_options
def systemd(
    deployment: DeploymentPath,
    out: Out,
    program: Path = option(
        Path("/opt/prfaas/bin/prfaas"), "Where `prfaas` is on the machines.", "--program", metavar="PATH"
    ),
    as_json: AsJson = False,
) -> None:
    """Write a folder of systemd units for each machine: DIR/SITE/HOST.

    Units go to /etc/systemd/system, and the folder prfaas to /etc. ports.txt is for the machine's firewall. No file
    has a secret: key and certificates are copied to /var/lib/prfaas.

    Example: prfaas emit systemd examples/two-datacenters.yaml -o build/systemd
    """
    from prfaas.tools.emit.blueprint import read_blueprint
    from prfaas.tools.emit.unit import systemd_files

    if not program.is_absolute() or any(each.isspace() or each in "%\"'\\" for each in str(program)):
        raise CliError(f"--program {program}: give an absolute path without blanks and quotes")
    write_emitted(out, systemd_files(read_blueprint(deployment), str(program)), as_json)


@emit.command()
def compose(deployment: DeploymentPath, out: Out, as_json: AsJson = False) -> None:
    """Write a folder with compose.yaml for each machine: DIR/SITE/HOST.

    Containers use the machine's network. Images are those of the file's section containers; the repository's folder
    containers makes them. No file has a secret: key and certificates are copied to /var/lib/prfaas.

    Example: prfaas emit compose examples/two-datacenters.yaml -o build/compose
    """
    from prfaas.tools.emit.blueprint import read_blueprint
    from prfaas.tools.emit.compose import compose_files

    write_emitted(out, compose_files(read_blueprint(deployment)), as_json)


@emit.command()
def kubernetes(deployment: DeploymentPath, out: Out, as_json: AsJson = False) -> None:
    """Write Kubernetes manifests: a Kustomize base, and an overlay for each site.

    kubectl apply -k DIR/overlays/SITE starts a site. No file has a secret: create-secrets.sh beside each overlay makes
    the Secrets from this machine's key and certificates.

    Example: prfaas emit kubernetes examples/two-datacenters.yaml -o build/kubernetes
    """
    from prfaas.tools.emit.blueprint import read_blueprint
    from prfaas.tools.emit.kubernetes import kubernetes_files

    blueprint = read_blueprint(deployment)
    write_emitted(out, kubernetes_files(blueprint), as_json)
    for notice in blueprint.containers.image_notices():
        typer.echo(notice, err=True)


def write_emitted(out: Path, files: "Sequence[EmittedFile]", as_json: bool) -> None:
    """Write files below a folder and print where they are."""
    from prfaas.tools.emit.writing import write_files

    written = write_files(out, files)
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return
    for path in written:
        typer.echo(path)
