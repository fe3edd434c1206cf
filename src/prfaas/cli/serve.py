"""`prfaas serve`: the gateway alone."""

import typer

from prfaas.cli.common import DeploymentPath


def serve(deployment: DeploymentPath) -> None:
    """Run the gateway of a deployment whose engines are started elsewhere, until Ctrl-C.

    Example: prfaas serve examples/local.yaml
    """
    from prfaas.cli.gateway_process import run_gateway
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.preparation import ensure_key, ensure_model

    loaded = load_deployment(deployment)
    if loaded.model.tiny is not None:
        ensure_model(loaded)
    ensure_key(loaded)
    run_gateway(loaded, ready=lambda _port: typer.echo(f"ready: {loaded.gateway.url}/v1"))
