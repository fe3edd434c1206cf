"""Clusters whose instances may be taken away: `preemptible` and `kills_per_hour` of the deployment file."""

from prfaas.core.deployment.schema import ClusterSection, DeploymentFile
from prfaas.core.deployment.source import YamlSource

USUAL_KILLS_PER_HOUR = 1.0
"""Of a preemptible instance of which the file says nothing: far more than clouds tell of most kinds of machines. It
costs little: a prefill of 30 s counts as 0.13 s longer."""


def kills_per_hour(cluster: ClusterSection) -> float:
    """How often an instance is expected to be taken away while it is up; 0 where that is not to happen."""
    if not cluster.preemptible:
        return 0.0
    return USUAL_KILLS_PER_HOUR if cluster.kills_per_hour is None else cluster.kills_per_hour


def check_preemptible(source: YamlSource, file: DeploymentFile) -> None:
    """Only prefills may be lost, and a rate of kills needs something that is killed. Raises DeploymentError."""
    for c, cluster in enumerate(file.clusters):
        if cluster.preemptible and cluster.kind != "prfaas":
            raise source.error(
                ("clusters", c, "preemptible"),
                'is for a cluster of kind "prfaas", since answers that are being decoded would be cut; leave it out',
            )
        if cluster.kills_per_hour is not None and not cluster.preemptible:
            raise source.error(
                ("clusters", c, "kills_per_hour"), "goes with preemptible: true; add that or leave this out"
            )
