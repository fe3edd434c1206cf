"""What moves KV inside a PD cluster: where NIXL does, and what must fit together then."""

from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.source import Location, YamlSource
from prfaas.core.deployment.types import SYNTHETIC, Deployment, Instance


def uses_nixl(deployment: Deployment, instance: Instance) -> bool:
    """Whether an engine has NIXL beside our own transport."""
    return deployment.engine.local_transfer == "nixl" and deployment.cluster_of(instance).kind == "pd"


def pulls(deployment: Deployment, producer: Instance, consumer: Instance) -> bool:
    """Whether the second instance reads KV out of the first one's memory, by NIXL."""
    return uses_nixl(deployment, consumer) and producer.cluster == consumer.cluster


def check_local_transfer(source: YamlSource, file: DeploymentFile) -> None:
    """What holds where engines are to be started. Their ports are checked with all others.

    Raises:
        DeploymentError: a port is missing or has no use, or NIXL can't do what the file wants of it.
    """
    wants_nixl = file.engine.local_transfer == "nixl"
    for c, cluster in enumerate(file.clusters):
        place: Location = ("clusters", c)
        is_pd = cluster.kind == "pd"
        for i, instance in enumerate(cluster.instances or ()):
            location: Location = (*place, "instances", i)
            if wants_nixl and is_pd and instance.nixl_port is None:
                raise source.error(
                    location, "needs nixl_port, since engine.local_transfer is nixl; give it a free port"
                )
            if instance.nixl_port is not None and not (wants_nixl and is_pd):
                raise source.error(
                    (*location, "nixl_port"),
                    "is only for instances of pd clusters with engine.local_transfer: nixl; leave it out",
                )
        if wants_nixl and is_pd and cluster.hardware == SYNTHETIC:
            raise source.error(
                (*place, "hardware"), "stand-in engines have no NIXL; leave engine.local_transfer out"
            )
        if wants_nixl and is_pd and cluster.pool is not None:
            raise source.error(
                (*place, "pool"), "does not go with engine.local_transfer: nixl yet; leave one of them out"
            )
    if wants_nixl and file.security.encrypt_inside:
        raise source.error(
            ("security", "encrypt_inside"),
            "can't be with engine.local_transfer: nixl, which encrypts nothing; leave one of them out",
        )
