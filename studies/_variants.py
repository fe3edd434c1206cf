"""Deployments that differ from the file's: other links, more instances, the PD cluster alone, prefix caches."""

from dataclasses import replace

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.kv.model import KvModel
from prfaas.lab.simulator.prefix_caches import CacheOptions


def with_bandwidth(planned: PlannedDeployment, bits_per_s: float) -> PlannedDeployment:
    """The deployment with another link."""
    links = tuple(replace(link, bandwidth_bits_per_s=bits_per_s) for link in planned.links)
    return replace(planned, links=links)


def times(planned: PlannedDeployment, factor: int) -> PlannedDeployment:
    """So many times the instances and the link."""
    return replace(
        planned,
        clusters=tuple(
            replace(cluster, instance_count=cluster.instance_count * factor) for cluster in planned.clusters
        ),
        links=tuple(
            replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s * factor) for link in planned.links
        ),
    )


def pd_only(planned: PlannedDeployment, instances: int) -> PlannedDeployment:
    """Only the PD cluster, with so many instances."""
    pd = replace(planned.pd_clusters[0], instance_count=instances)
    return replace(planned, clusters=(pd,), links=())


def cache_of(model: KvModel, num_bytes: int) -> CacheOptions | None:
    """A prefix cache of so many bytes on every instance; None for 0, and for models without KV that grows."""
    return CacheOptions.of_memory(model, num_bytes) if model.token_bytes and num_bytes else None
