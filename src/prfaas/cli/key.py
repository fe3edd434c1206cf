"""`prfaas key`: the secret that engines and gateway share."""

from prfaas.cli.common import DeploymentPath


def key(deployment: DeploymentPath) -> None:
    """Make the deployment's key file, once, to be copied to every machine of the deployment.

    A deployment that is all on this machine needs no such step: its key is made on first use.

    Example: prfaas key examples/local.yaml
    """
    import typer

    from prfaas.core.deployment import load_deployment
    from prfaas.serving.secret_files import create_key

    path = load_deployment(deployment).security.key_file
    create_key(path)
    typer.echo(path)
