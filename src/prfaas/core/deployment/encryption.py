"""Which ways of a deployment file are encrypted, and what must fit together for it."""

import ipaddress
import re
from collections.abc import Mapping

from prfaas.core.deployment.addresses import is_loopback
from prfaas.core.deployment.pool import by_machine, pool_names
from prfaas.core.deployment.schema import ClusterSection, DeploymentFile
from prfaas.core.deployment.security import OBSERVERS
from prfaas.core.deployment.source import YamlSource
from prfaas.core.deployment.types import InstanceSection


def gateway_cluster(file: DeploymentFile) -> str | None:
    """The cluster whose network the gateway is in: the file's word, or the only one that decodes."""
    if file.gateway.cluster is not None:
        return file.gateway.cluster
    decoding = [cluster.name for cluster in file.clusters if cluster.kind == "pd"]
    return decoding[0] if len(decoding) == 1 else None


def speaks_tls(file: DeploymentFile, cluster: ClusterSection, instance: InstanceSection) -> bool:
    """Whether the gateway and the tools speak TLS with an instance.

    By default they do where prompts would cross to another cluster. What goes to a loopback address stays on this
    machine.
    """
    if file.security.engine_tls != "elsewhere":
        return file.security.engine_tls == "always"
    return cluster.name != gateway_cluster(file) and not is_loopback(instance.host)


def check_encryption(source: YamlSource, file: DeploymentFile) -> None:
    """Whether certificates can be made for all that need one.

    Raises:
        DeploymentError: `gateway.cluster` is no cluster, or an instance has a name that no certificate can bear.
    """
    names = [cluster.name for cluster in file.clusters]
    if file.gateway.cluster is not None and file.gateway.cluster not in names:
        raise source.error(
            ("gateway", "cluster"),
            f'there is no cluster "{file.gateway.cluster}"; the clusters are {", ".join(names)}',
        )
    if not _encrypts(file):
        return
    seen: dict[str, str] = {}
    for c, cluster in enumerate(file.clusters):
        for i, instance in enumerate(cluster.instances or ()):
            location = ("clusters", c, "instances", i, "name")
            lower = instance.name.lower()
            if lower in OBSERVERS:
                raise source.error(location, f'"{instance.name}" is a name of prfaas itself; take another')
            if lower in seen:
                raise source.error(
                    location,
                    f'"{instance.name}" and "{seen[lower]}" are one name in certificates; let more than case differ',
                )
            seen[lower] = instance.name
    for c, cluster in enumerate(file.clusters):
        for name in _pools(cluster):
            if name.lower() in seen:
                raise source.error(
                    ("clusters", c, "pool"),
                    f'its name "{name}" and "{seen[name.lower()]}" are one name in certificates; '
                    "let more than case differ",
                )
            if not _is_dns_name(name):
                raise source.error(
                    ("clusters", c, "name"),
                    f'"{cluster.name}" is part of the name of its pool, "{name}", which can\'t stand in a certificate; '
                    'take one without empty parts between "."',
                )
            seen[name.lower()] = name
    for c, cluster in enumerate(file.clusters):
        for i, instance in enumerate(cluster.instances or ()):
            host = instance.host.lower()
            # Certificates bear the host beside the name: whoever has one could pass for the other.
            if host != instance.name.lower() and (host in OBSERVERS or host in seen):
                raise source.error(
                    ("clusters", c, "instances", i, "host"),
                    f'"{instance.host}" is also the name of {_whose(host, seen)}, and certificates bear both; '
                    "give the machine's address",
                )
            if not _is_dns_name(instance.name):
                raise source.error(
                    location,
                    f'"{instance.name}" can\'t stand in a certificate, which needs the form of a host name; '
                    'take one without empty parts between ".", and no IP address',
                )


def _pools(cluster: ClusterSection) -> tuple[str, ...]:
    if cluster.pool is None:
        return ()
    return pool_names(cluster.name, len(by_machine(cluster.instances or ())))


def _whose(host: str, instances: Mapping[str, str]) -> str:
    return f'"{instances[host]}"' if host in instances else "a part of prfaas"


def _encrypts(file: DeploymentFile) -> bool:
    return (
        file.security.encrypt_inside
        or any(link.encryption for link in file.links)
        or any(
            speaks_tls(file, cluster, instance)
            for cluster in file.clusters
            for instance in cluster.instances or ()
        )
    )


def _is_dns_name(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name) is not None
    return False
