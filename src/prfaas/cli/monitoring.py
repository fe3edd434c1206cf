"""`prfaas monitoring`: dashboards for Grafana; alert rules and scrape configuration for Prometheus."""

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from prfaas.cli.common import DeploymentPath
from prfaas.cli.emit import write_emitted
from prfaas.cli.option_groups import option, with_options

monitoring = typer.Typer(
    name="monitoring",
    help="Dashboards for Grafana, alert rules and scrape configuration for Prometheus.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="DIR", help="Write into this folder; made if it isn't there."),
]


@monitoring.command()
@with_options
def grafana(
    folder: Path = option(
        ..., "Write into this folder; made if it isn't there.", "-o", "--output", metavar="DIR"
    ),
) -> None:
    """Write Grafana's dashboards, one JSON file each: overview, links, engines, caches, and every series.

    They are for Grafana 12 and later, by import or provisioning. Their data source is a Prometheus.

    Example: prfaas monitoring grafana -o dashboards
    """
    from prfaas.tools.monitoring import dashboards

    files = {path.name: path.read_text(encoding="utf-8") for path in dashboards()}
    _write(folder, files)


@monitoring.command()
def alerts(folder: Folder = None) -> None:
    """Print or write the alert rules for Prometheus (`rule_files`), as prfaas.rules.yaml.

    Each links to the guide of alerts, where messages find pages (PRFAAS_DOCS).

    Example: prfaas monitoring alerts -o rules
    """
    from prfaas.tools.monitoring.alerts import rules_yaml

    if folder is not None:
        _write(folder, {"prfaas.rules.yaml": rules_yaml()})
    else:
        typer.echo(rules_yaml(), nl=False)


@monitoring.command()
def scrape(deployment: DeploymentPath, folder: Folder = None) -> None:
    """Print or write where Prometheus finds the gateway and the engines of a deployment, as prfaas.scrape.yaml.

    Example: prfaas monitoring scrape examples/local.yaml
    """
    from prfaas.core.deployment import load_deployment
    from prfaas.tools.monitoring.scrape import scrape_yaml

    loaded = load_deployment(deployment)
    if folder is not None:
        _write(folder, {"prfaas.scrape.yaml": scrape_yaml(loaded)})
    else:
        typer.echo(scrape_yaml(loaded), nl=False)


def _write(folder: Path, files: dict[str, str]) -> None:
    from prfaas.tools.emit.blueprint import EmittedFile

    write_emitted(
        folder, [EmittedFile(PurePosixPath(name), text) for name, text in files.items()], as_json=False
    )
