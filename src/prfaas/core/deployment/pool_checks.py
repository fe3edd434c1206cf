"""What must fit together for the prefix-cache pools of a deployment file."""

from collections.abc import Iterator

from prfaas.core.deployment.pool import by_machine, pool_names
from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.source import Location, YamlSource
from prfaas.core.deployment.types import SYNTHETIC

_MAX_NAME = 63


def check_pool_sections(source: YamlSource, file: DeploymentFile) -> None:
    """What holds for files to run and files to plan with.

    Raises:
        DeploymentError: a pool where nothing can use it, or settings that have no effect.
    """
    for c, cluster in enumerate(file.clusters):
        pool = cluster.pool
        if pool is None:
            continue
        location: Location = ("clusters", c, "pool")
        if cluster.hardware == SYNTHETIC:
            raise source.error(
                location,
                f'is not for hardware "{SYNTHETIC}": stand-ins have no KVCache to keep; leave it out',
            )
        if pool.path is not None and pool.ssd_bytes == 0:
            raise source.error(
                (*location, "path"),
                "is where the SSD's share lies, but pool.ssd is 0; say how much it may take",
            )
    if source.gives(("pool",)) and not any(cluster.pool for cluster in file.clusters):
        raise source.error(("pool",), "is about pools, but no cluster has one; give clusters a pool")
    if source.gives(("pool", "tenant_share")) and file.security.tenant_header is None:
        raise source.error(
            ("pool", "tenant_share"), "needs security.tenant_header, which says whose a request is"
        )


def check_pools(source: YamlSource, file: DeploymentFile) -> None:
    """What holds where pools are to be started. Their ports are checked with all others.

    Raises:
        DeploymentError: a pool can't be reached, has another's name, or its engines don't share pages.
    """
    taken = {cluster.name for cluster in file.clusters}
    taken |= {instance.name for cluster in file.clusters for instance in cluster.instances or ()}
    for c, cluster in enumerate(file.clusters):
        if cluster.pool is None:
            continue
        location: Location = ("clusters", c, "pool")
        if cluster.pool.kv_port is None:
            raise source.error(
                (*location, "kv_port"), "is missing; give the port where other machines' pools reach this one"
            )
        machines = by_machine(cluster.instances or ())
        for name, together in zip(pool_names(cluster.name, len(machines)), machines, strict=True):
            if name in taken:
                raise source.error(
                    location, f'its name would be "{name}", which is taken; rename the other one'
                )
            if len(name) > _MAX_NAME:
                raise source.error(
                    ("clusters", c, "name"),
                    f'leaves no room for the name of its pool ("{name}"); take one of up to '
                    f"{_MAX_NAME - len(name) + len(cluster.name)} characters",
                )
            taken.add(name)
            if len({instance.tensor_parallel for instance in together}) > 1:
                raise source.error(
                    location,
                    f"serves {' and '.join(instance.name for instance in together)}, whose tensor_parallel "
                    "differs, so that they can't share pages; make it equal on each machine",
                )
    if file.pool.staging_bytes < file.engine.transfer_block_bytes:
        raise source.error(
            ("pool", "staging"),
            f"{file.pool.staging_bytes} bytes hold no transfer block of {file.engine.transfer_block_bytes}; "
            "make it larger",
        )


def pool_ports(file: DeploymentFile) -> Iterator[tuple[Location, str, str, int]]:
    """Every port that a pool listens on: the field that it comes from, the pool's name, its host, the port."""
    for c, cluster in enumerate(file.clusters):
        if cluster.pool is None:
            continue
        location: Location = ("clusters", c, "pool")
        machines = by_machine(cluster.instances or ())
        for name, together in zip(pool_names(cluster.name, len(machines)), machines, strict=True):
            host, events_port = together[0].host, cluster.pool.events_port
            if cluster.pool.kv_port is not None:
                yield (*location, "kv_port"), name, host, cluster.pool.kv_port
            if events_port is not None:
                yield (*location, "events_port"), name, host, events_port
                yield (*location, "events_port"), name, host, events_port + 1
