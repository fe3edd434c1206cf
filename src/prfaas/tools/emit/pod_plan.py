"""Which pods a site has, and who of the deployment is in each."""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.core.deployment import (
    CERTIFICATE_NAMES,
    GATEWAY,
    DeploymentError,
    Instance,
    PoolNode,
    is_loopback,
)
from prfaas.tools.emit.blueprint import WILDCARDS, Blueprint
from prfaas.tools.emit.site import Machine, Site


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod of a site, and who of the deployment is in it."""

    name: str
    """Of its object, Service and label: the member's name as Kubernetes allows it."""
    site: str
    component: str
    """`engine`, `pool` or `gateway`."""
    instance: Instance | None
    pool: PoolNode | None
    """Of a pod of its own, or beside the engine."""
    uses_pool: PoolNode | None
    """A pool in another pod of the same machine."""
    host: str | None
    """The address of its machine, whose network it uses; None: it has an address of its own."""

    @property
    def members(self) -> tuple[str, ...]:
        """The names in the deployment file of all that runs in it."""
        if self.component == GATEWAY:
            return (GATEWAY,)
        return tuple(each.name for each in (self.instance, self.pool) if each is not None)

    @property
    def identities(self) -> tuple[str, ...]:
        """The names of the certificates that may be needed in it."""
        return tuple(CERTIFICATE_NAMES) if self.component == GATEWAY else self.members


def kubernetes_name(blueprint: Blueprint, name: str) -> str:
    """A name of the file as Kubernetes allows it: lower case, no "." and no "_".

    Raises:
        DeploymentError: it would be too long for a StatefulSet's pods.
    """
    text = name.lower().replace("_", "-").replace(".", "-").rstrip("-")
    if len(text) > 52:
        raise bad_field(
            blueprint, "", f'"{name}" is too long for Kubernetes; take a name of up to 52 characters'
        )
    return text


def plan_pods(blueprint: Blueprint, site: Site) -> tuple[PodPlan, ...]:
    """Every pod of a site.

    An engine whose host is an address uses its machine's network, beside others of that machine. One whose host is a
    name has a network of its own: the name is that of its Service.

    Raises:
        DeploymentError: a host can't be reached in Kubernetes, or a name is taken twice.
    """
    plans = [plan for machine in site.machines for plan in _pods_of(blueprint, site, machine)]
    if site.has_gateway:
        plans.append(_gateway(blueprint, site))
    seen: dict[str, str] = {}
    for plan in plans:
        if plan.name in seen:
            raise bad_field(
                blueprint,
                "",
                f'"{plan.members[0]}" and "{seen[plan.name]}" are both "{plan.name}" in Kubernetes; rename one',
            )
        seen[plan.name] = plan.members[0]
    return tuple(plans)


def _pods_of(blueprint: Blueprint, site: Site, machine: Machine) -> Iterator[PodPlan]:
    host = machine.host
    if is_loopback(host):
        raise bad_field(
            blueprint,
            f"clusters.{site.name}",
            f'host "{host}" is one machine alone, and pods are several; give addresses of nodes, or names of Services',
        )
    if is_address(host):
        if machine.pool is not None:
            name = kubernetes_name(blueprint, machine.pool.name)
            yield PodPlan(name, site.name, "pool", None, machine.pool, uses_pool=None, host=host)
        for instance in machine.instances:
            name = kubernetes_name(blueprint, instance.name)
            yield PodPlan(name, site.name, "engine", instance, None, uses_pool=machine.pool, host=host)
        return
    first, *others = machine.instances
    if others:
        raise bad_field(
            blueprint,
            f"clusters.{site.name}",
            f'"{first.name}" and "{others[0].name}" have the same name "{host}" as host, but a pod is one engine; '
            "give each its own",
        )
    name = kubernetes_name(blueprint, first.name)
    if host.split(".")[0] != name:
        raise bad_field(
            blueprint,
            f"clusters.{site.name}",
            f'host "{host}" of "{first.name}" must begin with "{name}", which is the name of its Service',
        )
    yield PodPlan(name, site.name, "engine", first, machine.pool, uses_pool=None, host=None)


def _gateway(blueprint: Blueprint, site: Site) -> PodPlan:
    host = blueprint.deployment.gateway.host
    if is_loopback(host):
        raise bad_field(
            blueprint, "gateway.host", f'"{host}" is reached only inside its own pod; write "0.0.0.0"'
        )
    if host not in WILDCARDS and not is_address(host):
        raise bad_field(blueprint, "gateway.host", f'a pod can\'t listen on "{host}"; write "0.0.0.0"')
    own = None if host in WILDCARDS else host
    return PodPlan("prfaas-gateway", site.name, GATEWAY, None, None, uses_pool=None, host=own)


def is_address(host: str) -> bool:
    """True for an IP address, false for a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bad_field(blueprint: Blueprint, field: str, problem: str) -> DeploymentError:
    """The error to raise about a field of the deployment file."""
    return DeploymentError(blueprint.deployment.path, None, field, problem)
