"""What must fit together between the fields of a deployment file. Each check raises what it finds first."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from prfaas.deployment.schema import ClusterSection, DeploymentFile, InstanceSection
from prfaas.deployment.source import Location, Source


def check_together(source: Source, file: DeploymentFile) -> None:
    """All checks.

    Raises:
        DeploymentError: two fields contradict each other, or something every deployment needs is missing.
    """
    _check_model(source, file)
    _check_names(source, file)
    _check_roles(source, file)
    _check_links(source, file)
    _check_ports(source, file)
    _check_engine(source, file)


def _instances(file: DeploymentFile) -> Iterator[tuple[Location, ClusterSection, InstanceSection]]:
    for c, cluster in enumerate(file.clusters):
        for i, instance in enumerate(cluster.instances):
            yield ("clusters", c, "instances", i), cluster, instance


def _check_model(source: Source, file: DeploymentFile) -> None:
    if (file.model.path is None) == (file.model.tiny is None):
        given = "both are given" if file.model.path is not None else "neither is given"
        raise source.error(
            ("model",), f"needs either path (a checkpoint directory) or tiny (a made model's name); {given}"
        )
    if file.model.tiny is not None and Path(file.model.tiny).name != file.model.tiny:
        raise source.error(
            ("model", "tiny"), f'"{file.model.tiny}" is no name; write for example "qwen3-next"'
        )


def _check_names(source: Source, file: DeploymentFile) -> None:
    seen: dict[str, Location] = {}
    named: list[tuple[Location, str]] = []
    for c, cluster in enumerate(file.clusters):
        named.append((("clusters", c), cluster.name))
    for location, _, instance in _instances(file):
        named.append((location, instance.name))
    for location, name in named:
        if name in seen:
            line = source.line((*seen[name], "name"))
            raise source.error(
                (*location, "name"),
                f'"{name}" is already a name in line {line}; give every cluster and instance its own',
            )
        seen[name] = location


def _check_roles(source: Source, file: DeploymentFile) -> None:
    for location, cluster, instance in _instances(file):
        if len(set(instance.roles)) != len(instance.roles):
            raise source.error((*location, "roles"), "names a role twice; name each role once")
        if cluster.kind == "prfaas" and "decode" in instance.roles:
            raise source.error(
                (*location, "roles"), 'a cluster of kind "prfaas" only prefills; make its kind "pd" to decode'
            )
    for c, cluster in enumerate(file.clusters):
        if cluster.kind == "pd" and not any("decode" in instance.roles for instance in cluster.instances):
            raise source.error(
                ("clusters", c), 'is of kind "pd" but none of its instances has the role decode; add one'
            )
    if not any(cluster.kind == "pd" for cluster in file.clusters):
        raise source.error(("clusters",), 'nothing decodes; add a cluster of kind "pd"')
    if not any("prefill" in instance.roles for _, _, instance in _instances(file)):
        raise source.error(("clusters",), "no instance has the role prefill; give it to at least one")


def _check_links(source: Source, file: DeploymentFile) -> None:
    clusters = {cluster.name: cluster for cluster in file.clusters}
    known = ", ".join(clusters)
    seen: dict[tuple[str, str], int] = {}
    for index, link in enumerate(file.links):
        location: Location = ("links", index)
        for end, name in (("source", link.source), ("target", link.target)):
            if name not in clusters:
                raise source.error(
                    (*location, end), f'there is no cluster "{name}"; the clusters are {known}'
                )
        if link.source == link.target:
            raise source.error(
                location, f'leads from "{link.source}" to itself; instances of one cluster need no link'
            )
        if clusters[link.target].kind != "pd":
            raise source.error(
                (*location, "target"), f'"{link.target}" does not decode; a link must lead to a "pd" cluster'
            )
        pair = (link.source, link.target)
        if pair in seen:
            raise source.error(
                location,
                f'repeats links[{seen[pair]}] ("{link.source}" to "{link.target}"); keep one of them',
            )
        seen[pair] = index
    for c, cluster in enumerate(file.clusters):
        if cluster.kind == "prfaas" and not any(link.source == cluster.name for link in file.links):
            raise source.error(
                ("clusters", c),
                f'no link leads from "{cluster.name}"; add one under links to a "pd" cluster',
            )


def _check_ports(source: Source, file: DeploymentFile) -> None:
    taken: list[tuple[str, int, str]] = [(file.gateway.host, file.gateway.port, "the gateway")]
    for location, _, instance in _instances(file):
        owner = f'instance "{instance.name}"'
        last = instance.kv_port + instance.tensor_parallel - 1
        if last > 65535:
            raise source.error(
                (*location, "kv_port"),
                f"{instance.kv_port} leaves no room for {instance.tensor_parallel} ranks; take one up to "
                f"{65536 - instance.tensor_parallel}",
            )
        wanted = [("http_port", instance.http_port)]
        wanted += [("kv_port", port) for port in range(instance.kv_port, last + 1)]
        for field, port in wanted:
            for host, taken_port, by in taken:
                if port == taken_port and _same_host(instance.host, host):
                    raise source.error(
                        (*location, field),
                        f"{port} is already used by {by}; give each instance its own ports",
                    )
            taken.append((instance.host, port, owner))


def _same_host(one: str, other: str) -> bool:
    one, other = (_address(host) for host in (one, other))
    if one == other:
        return True
    # A wildcard listener takes the port on every address of its machine; that is only certain for loopback.
    wildcards = {"0.0.0.0", "::"}
    return (one in wildcards and _is_loopback(other)) or (other in wildcards and _is_loopback(one))


def _address(host: str) -> str:
    return "127.0.0.1" if host.lower() == "localhost" else host.lower()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_engine(source: Source, file: DeploymentFile) -> None:
    engine = file.engine
    if engine.staging < engine.transfer_block:
        raise source.error(
            ("engine", "staging"),
            f"{engine.staging} bytes hold no transfer block of {engine.transfer_block}; make it larger",
        )
    for c, cluster in enumerate(file.clusters):
        if cluster.hardware == "cpu" and engine.kv_cache_gib is None:
            raise source.error(
                ("clusters", c, "hardware"),
                "engines on cpu need engine.kv_cache_gib (GiB of memory for the KVCache); add it",
            )
    if file.routing.threshold_tokens > file.model.max_model_len:
        raise source.error(
            ("routing", "threshold_tokens"),
            f"{file.routing.threshold_tokens} is more than model.max_model_len ({file.model.max_model_len}), "
            'so nothing would ever be offloaded; lower it, or say policy: "local"',
        )
