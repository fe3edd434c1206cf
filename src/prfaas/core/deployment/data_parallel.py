"""What must hold for the data-parallel groups of a deployment file, whose ranks are instances of it."""

from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.source import Location, YamlSource
from prfaas.core.deployment.types import InstanceSection

_ALIKE = ("tensor_parallel", "expert_parallel", "roles")


def check_data_parallel(source: YamlSource, file: DeploymentFile) -> None:
    """Whether every group has several ranks of one cluster, which are alike.

    Raises:
        DeploymentError: a rank is alone, in another cluster, or unlike the first of its group.
    """
    first: dict[str, tuple[int, InstanceSection, Location]] = {}
    alone: dict[str, None] = {}
    for c, cluster in enumerate(file.clusters):
        for i, instance in enumerate(cluster.instances or ()):
            group = instance.data_parallel
            if group is None:
                continue
            place: Location = ("clusters", c, "instances", i)
            location: Location = (*place, "data_parallel")
            if group not in first:
                first[group] = c, instance, location
                alone[group] = None
                continue
            alone.pop(group, None)
            home, rank_0, _ = first[group]
            if home != c:
                raise source.error(
                    location,
                    f'"{group}" is a group of "{file.clusters[home].name}"; its ranks are in one cluster',
                )
            for field in _ALIKE:
                if getattr(instance, field) != getattr(rank_0, field):
                    raise source.error(
                        (*place, field) if source.gives((*place, field)) else place,
                        f'{field} is another than that of "{rank_0.name}"; make the ranks of group "{group}" alike',
                    )
    for group in alone:
        raise source.error(
            first[group][2],
            f'group "{group}" has one rank; give it to further instances of the cluster, or leave it out',
        )
