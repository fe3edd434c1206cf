"""The sites of a deployment: what is started together, in one place."""

from dataclasses import dataclass

from prfaas.core.deployment.addresses import plain_host
from prfaas.core.deployment.pool import PoolNode
from prfaas.core.deployment.source import DeploymentError
from prfaas.core.deployment.types import Cluster, Deployment, Instance


@dataclass(frozen=True, slots=True)
class Machine:
    """The members of a site that run on one host."""

    host: str
    instances: tuple[Instance, ...]
    pool: PoolNode | None


@dataclass(frozen=True, slots=True)
class Site:
    """One cluster and its pools, and the gateway if it is there."""

    cluster: Cluster
    pools: tuple[PoolNode, ...]
    has_gateway: bool

    @property
    def name(self) -> str:
        """That of its cluster."""
        return self.cluster.name

    @property
    def instances(self) -> tuple[Instance, ...]:
        """In the order of the file."""
        return self.cluster.instances

    @property
    def machines(self) -> tuple[Machine, ...]:
        """By the hosts of the instances, in the order of the file."""
        hosts = dict.fromkeys(plain_host(instance.host) for instance in self.instances)
        return tuple(
            Machine(
                host,
                tuple(each for each in self.instances if plain_host(each.host) == host),
                next((pool for pool in self.pools if plain_host(pool.host) == host), None),
            )
            for host in hosts
        )


def gateway_site(deployment: Deployment) -> str:
    """Where the gateway runs: `gateway.cluster`, else the first cluster that decodes."""
    return deployment.gateway.cluster or deployment.pd_clusters[0].name


def sites_of(deployment: Deployment) -> tuple[Site, ...]:
    """One site for each cluster, in the order of the file."""
    home = gateway_site(deployment)
    return tuple(
        Site(
            cluster,
            tuple(pool for pool in deployment.pools if pool.cluster == cluster.name),
            cluster.name == home,
        )
        for cluster in deployment.clusters
    )


def site_named(deployment: Deployment, name: str) -> Site:
    """A site by name.

    Raises:
        DeploymentError: there is none; the text lists those that are.
    """
    sites = sites_of(deployment)
    for site in sites:
        if site.name == name:
            return site
    known = ", ".join(site.name for site in sites)
    raise DeploymentError(deployment.path, None, "", f'has no site "{name}"; it has {known}')
