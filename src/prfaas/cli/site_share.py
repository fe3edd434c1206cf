"""The part of a deployment that `prfaas up` starts on this machine."""

from dataclasses import dataclass

from prfaas.cli.common import CliError
from prfaas.core.deployment import Deployment, Instance, PoolNode
from prfaas.serving.engines.preparation import is_here
from prfaas.tools.emit.site import site_named


@dataclass(frozen=True, slots=True)
class SiteShare:
    """Engines, pools and gateway to start here."""

    instances: tuple[Instance, ...]
    pools: tuple[PoolNode, ...]
    has_gateway: bool

    @property
    def instance_names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(instance.name for instance in self.instances)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(pool.name for pool in self.pools)


def share_of(deployment: Deployment, site_name: str | None, with_gateway: bool) -> SiteShare:
    """Everything, or what of one site has an address of this machine.

    Raises:
        DeploymentError: there is no such site.
        CliError: nothing of the site runs here, or options contradict each other.
    """
    if site_name is None:
        if not with_gateway:
            raise CliError("--no-gateway is about one site; name it: --site NAME")
        return SiteShare(deployment.instances, deployment.pools, True)
    site = site_named(deployment, site_name)
    share = SiteShare(
        tuple(instance for instance in site.instances if is_here(instance.host)),
        tuple(pool for pool in site.pools if is_here(pool.host)),
        site.has_gateway and with_gateway and is_here(deployment.gateway.host),
    )
    if not (share.instances or share.has_gateway):
        hosts = ", ".join(machine.host for machine in site.machines)
        raise CliError(f'nothing of site "{site.name}" runs on this machine; its hosts are {hosts}')
    return share


def runs_here(site_name: str | None, instance: Instance) -> bool:
    """True if `prfaas up` with that site starts an instance on this machine."""
    return site_name is None or (instance.cluster == site_name and is_here(instance.host))
