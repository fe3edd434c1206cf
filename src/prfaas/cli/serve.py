"""`prfaas serve`: the gateway and its control plane as a process's main job, until a signal."""

from prfaas.cli.common import DRAIN_TIMEOUT_S, DeploymentPath, DrainTimeout, LogsAsked
from prfaas.cli.option_groups import with_options


@with_options
def serve(
    deployment: DeploymentPath,
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S,
    *,
    logs: LogsAsked,
) -> None:
    """Run the gateway of a deployment whose engines are started elsewhere, until Ctrl-C.

    SIGTERM or Ctrl-C lets running requests end first; a second one ends them at once. SIGHUP takes the file on again,
    as `prfaas reload` does.

    Example: prfaas serve examples/local.yaml
    """
    from prfaas.cli.fetching import fetch_model
    from prfaas.cli.running import run_gateway
    from prfaas.core.deployment import GATEWAY, load_deployment
    from prfaas.serving.engines.preparation import ensure_certificates, ensure_key

    loaded = load_deployment(deployment)
    logs.write()
    if loaded.model.source is not None:
        fetch_model(loaded, weights=False)
    ensure_key(loaded)
    ensure_certificates(loaded, [GATEWAY])
    run_gateway(loaded, drain_timeout_s)
