"""Container settings of the deployment file: images, volumes, GPUs. Only `prfaas emit` uses them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath

from prfaas.core.deployment.load import read_file
from prfaas.core.deployment.schema import ContainersSection
from prfaas.core.deployment.types import SYNTHETIC
from prfaas.core.yaml_source import YamlSource

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings(ContainersSection):
    """The section `containers`, and what else of the file containers need."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of one instance by the cluster's name; a cluster that is not there has as many as ranks."""
    companions: tuple[PurePosixPath, ...] = ()
    """Files that the deployment file names relative to itself, so that they must lie beside it everywhere."""

    def image_notices(self) -> Iterator[str]:
        """A sentence for each image that nodes of a cluster will not find, or not always the same."""
        for name in ("gateway_image", "engine_image"):
            image = getattr(self, name)
            registry, slash, _ = image.partition("/")
            lacks = [] if slash and (set(registry) & set(".:")) else ["no registry"]
            tag = image.rpartition("/")[2].partition(":")[2]
            lacks += [] if tag not in ("", "latest") else ["no version"]
            if lacks:
                yield (
                    f'containers.{name}: "{image}" names {" and ".join(lacks)}; the images are not published: '
                    "build and push them, and write REGISTRY/NAME:VERSION"
                )


def load_containers(path: Path | str) -> ContainerSettings:
    """Read what a deployment file says of containers.

    Raises:
        DeploymentError: a field is wrong, or names a file that can't lie beside the deployment file in a container.
    """
    file = read_file(Path(path))
    source = file.source
    given = file.containers
    for name in given.networks:
        file.require_cluster(("containers", "networks", name), name)
    model = source.values["model"]
    if "path" in model:
        _check_absolute(source, ("model", "path"), model["path"])
    for name, adapter in model.get("adapters", {}).items():
        _check_absolute(source, ("model", "adapters", name), adapter)
    companions: dict[PurePosixPath, None] = {}
    gpus: dict[str, int] = {}
    for c, cluster in enumerate(file.clusters):
        if cluster.hardware in ("cpu", SYNTHETIC):
            gpus[cluster.name] = 0
        elif cluster.gpus_per_instance is not None:
            gpus[cluster.name] = cluster.gpus_per_instance
        profile = source.values["clusters"][c].get("profile", "")
        if "/" in profile or profile.endswith(_SUFFIXES):
            companions[_beside(source, c, profile)] = None
    return ContainerSettings(
        **{each.name: getattr(given, each.name) for each in fields(given)},
        gpus=gpus,
        companions=tuple(companions),
    )


def _check_absolute(source: YamlSource, location: tuple[str | int, ...], path: str) -> None:
    if not path.startswith("/"):
        raise source.error(
            location,
            f'"{path}" is relative to the file, which lies elsewhere on other machines; give an absolute path',
        )


def _beside(source: YamlSource, index: int, profile: str) -> PurePosixPath:
    path = PurePosixPath(profile)
    if path.is_absolute() or ".." in path.parts or profile.startswith("~"):
        raise source.error(
            ("clusters", index, "profile"),
            f'"{profile}" does not lie beside the file, with which it is handed out; '
            "put it into the file's folder",
        )
    return path
