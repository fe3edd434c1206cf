"""What a running gateway has taken on: the deployment of its file, and the instances that are about to leave."""

from dataclasses import dataclass, replace

from prfaas.core.deployment.difference import DeploymentDifference, FieldChange, difference
from prfaas.core.deployment.types import Deployment, Instance

_WAIT = "wait until it has left, and reload again"


@dataclass(frozen=True, slots=True)
class AppliedDeployment:
    """A deployment that was taken on. Several gateways run the same one when their digests are equal."""

    said: Deployment
    """As the file has it."""
    digest: str
    """SHA-256 of the file, in hex."""
    leaving: tuple[Instance, ...] = ()
    """Instances that the file no longer has. They get nothing new, and end what they have."""

    @property
    def running(self) -> Deployment:
        """The deployment with the instances that leave, each behind the others of its cluster."""
        if not self.leaving:
            return self.said
        clusters = tuple(
            replace(
                cluster,
                instances=(
                    *cluster.instances,
                    *(each for each in self.leaving if each.cluster == cluster.name),
                ),
            )
            for cluster in self.said.clusters
        )
        return replace(self.said, clusters=clusters)

    def difference(self, wanted: Deployment) -> DeploymentDifference:
        """What would change with another file.

        An instance that comes back while it leaves must be the same as before.
        """
        found = difference(self.said, wanted)
        leaving = {instance.name: instance for instance in self.leaving}
        other = tuple(
            FieldChange(
                f"clusters[{each.cluster}].instances[{each.name}]",
                f"instance {each.name} still leaves, and comes back as another one",
                _WAIT,
            )
            for each in found.added
            if each.name in leaving and each != _with_roles_of(leaving[each.name], each)
        )
        return replace(found, changes=(*found.changes, *other))

    def taking_on(self, wanted: Deployment, digest: str) -> "AppliedDeployment":
        """The same after a file was taken on: what it lacks begins to leave, what it has again stays."""
        names = {instance.name for instance in wanted.instances}
        leaving = tuple(each for each in self.running.instances if each.name not in names)
        return AppliedDeployment(wanted, digest, leaving)

    def without(self, name: str) -> "AppliedDeployment":
        """The same after an instance has left."""
        return replace(self, leaving=tuple(each for each in self.leaving if each.name != name))


def _with_roles_of(instance: Instance, other: Instance) -> Instance:
    return replace(instance, roles=other.roles)
