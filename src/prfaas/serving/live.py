"""A deployment's gateway with its live control plane."""

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from prfaas.core.deployment import GATEWAY, Deployment
from prfaas.serving.certificates import identity_of
from prfaas.serving.control.members import Members
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import kv_model_of, policy_of
from prfaas.serving.fleet.control import join_fleet
from prfaas.serving.gateway import Draining, GatewayProcess, serve_gateway
from prfaas.serving.reloading import Reloader, ReloadRefusedError
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.tls_identity import TlsIdentity

logger = logging.getLogger(__name__)


async def serve_live(
    deployment: Deployment,
    *,
    ready: Callable[[int], None] | None = None,
    draining: Draining | None = None,
    reloader: Reloader | None = None,
) -> None:
    """Serve `deployment` until cancelled, by what its engines and links report.

    Args:
        ready: called with the bound port once clients can connect.
        draining: lets the caller end the gateway without cutting what is open.
        reloader: of this deployment, through which the caller has it follow its file; None: one of its own.

    Raises:
        KeyFileError: the deployment's key can't be read.
        TlsFileError: the gateway's certificate, or one of its fleet, can't be used.
        AdminTokenError: the operators' token can't be read.
        OSError: an address of the gateway can't be bound.
    """
    kv_model = kv_model_of(deployment)
    registry = CollectorRegistry()
    tls = identity_of(deployment, GATEWAY)
    key = load_key(deployment.security.key_file)
    reloader = reloader or Reloader(deployment)
    plane = LivePlane(Members(reloader.running, key, tls), registry, kv_model)
    if deployment.fleet is not None:
        join_fleet(plane, registry).reloads.reload = reloader.reload
    reloader.follow(plane)
    reloader.wait_for(plane.drains.is_idle)
    reloader.check(lambda said, _: _check_policy(said))
    reloader.check(lambda said, _: _check_identity(said, tls))
    process = GatewayProcess(
        registry=registry, draining=draining or Draining(), tls=tls, kv_model=kv_model, reloader=reloader
    )
    await serve_gateway(deployment, plane, process, ready=ready)


def _check_policy(said: Deployment) -> None:
    """Raises DeploymentError where there is no such policy, or it does not take these parameters."""
    policy_of(said)


def _check_identity(said: Deployment, tls: TlsIdentity | None) -> None:
    """Raises ReloadRefusedError where the gateway would need a certificate that it was started without."""
    speaking = [instance.name for instance in said.instances if instance.tls]
    if speaking and tls is None:
        raise ReloadRefusedError(
            f"nothing was changed: the gateway speaks TLS with {speaking[0]}, and was started without a "
            f"certificate: run `prfaas certs {said.path}`, and start the gateway again"
        )
