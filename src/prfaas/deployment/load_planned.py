"""From a deployment file to a `PlannedDeployment`."""

from collections.abc import Mapping
from pathlib import Path

from prfaas.deployment.checks import check_to_plan
from prfaas.deployment.load import links_of, read_file, slo_of
from prfaas.deployment.planned import (
    EmpiricalLengths,
    FixedLengths,
    LengthsSpec,
    LogNormalLengths,
    PlannedCluster,
    PlannedDeployment,
    TraceLengths,
    UniformLengths,
    WorkloadSpec,
)
from prfaas.deployment.schema import ClusterSection, DeploymentFile, LengthsSection
from prfaas.deployment.source import Source
from prfaas.kvmodel import ConfigError, KvModel, model_from_directory, published_model
from prfaas.profiles import ProfileError, load_profile


def load_planned(path: Path | str, *, changes: Mapping[str, float] | None = None) -> PlannedDeployment:
    """Read and check a deployment file for planning: one to run will do as well as one without any server.

    `changes` puts other numbers in place of some of the file's, by field: {"links[0].bandwidth": 1e10}.

    Raises:
        DeploymentError: the first thing that is wrong, with file, line and field.
    """
    path = Path(path)
    source, file = read_file(path, changes)
    check_to_plan(source, file)
    assert file.workload is not None
    return PlannedDeployment(
        name=file.name,
        path=path,
        kv_model=_kv_model(source, file),
        clusters=tuple(
            _cluster(source, c, cluster, file.model.published) for c, cluster in enumerate(file.clusters)
        ),
        links=links_of(file),
        workload=WorkloadSpec(
            lengths=_lengths(path, file.workload.lengths),
            output_tokens=file.workload.output_tokens,
            prefix_hit_ratio=file.workload.prefix_hit_ratio,
            load=file.workload.load,
        ),
        slo=slo_of(file),
        prices=dict(file.prices),
        source=source,
    )


def _kv_model(source: Source, file: DeploymentFile) -> KvModel:
    model = file.model
    folder = source.path.parent
    try:
        if model.published is not None:
            return published_model(model.published).kv_model
        if model.config is not None:
            config = folder / Path(model.config).expanduser()
            directory = config.parent if config.name == "config.json" else config
            return model_from_directory(directory, name=model.served_name)
        if model.path is not None:
            return model_from_directory(folder / Path(model.path).expanduser(), name=model.served_name)
    except ConfigError as error:
        field = "published" if model.published else "config" if model.config else "path"
        raise source.error(("model", field), str(error)) from None
    raise source.error(
        ("model", "tiny"), "a made model has no published speed; plan with published, config or path"
    )


def _cluster(source: Source, index: int, cluster: ClusterSection, model: str | None) -> PlannedCluster:
    assert cluster.profile is not None
    try:
        profile = load_profile(cluster.profile, relative_to=source.path.parent)
    except ProfileError as error:
        raise source.error(("clusters", index, "profile"), str(error)) from None
    if model is not None and profile.model != model:
        raise source.error(
            ("clusters", index, "profile"),
            f'"{profile.name}" is how fast {profile.model} is, but model.published is {model}',
        )
    if cluster.kind == "pd" and profile.decode is None:
        raise source.error(
            ("clusters", index, "profile"),
            f'"{profile.name}" has no decode times, which a cluster of kind "pd" needs',
        )
    if cluster.instances is None:
        assert cluster.instance_count is not None
        count, gpus = cluster.instance_count, cluster.gpus_per_instance
    else:
        count = len(cluster.instances)
        gpus = cluster.gpus_per_instance or cluster.instances[0].tensor_parallel
    if gpus is not None and gpus != profile.gpus_per_instance:
        field = "gpus_per_instance" if cluster.gpus_per_instance is not None else "profile"
        raise source.error(
            ("clusters", index, field),
            f'instances have {gpus} GPUs, but profile "{profile.name}" was measured on '
            f"{profile.gpus_per_instance}; name a profile of the same size",
        )
    return PlannedCluster(
        name=cluster.name,
        kind=cluster.kind,
        hardware=cluster.hardware,
        instance_count=count,
        gpus_per_instance=profile.gpus_per_instance,
        profile=profile,
        prefix_hit_ratio=cluster.prefix_hit_ratio,
    )


def _lengths(path: Path, lengths: LengthsSection) -> LengthsSpec:
    if lengths.distribution == "trace":
        assert lengths.path is not None
        return TraceLengths(path.parent / Path(lengths.path).expanduser(), lengths.format)
    if lengths.distribution == "empirical":
        assert lengths.lengths is not None
        weights = None if lengths.weights is None else tuple(lengths.weights)
        return EmpiricalLengths(tuple(lengths.lengths), weights)
    if lengths.distribution == "fixed":
        assert lengths.tokens is not None
        return FixedLengths(lengths.tokens)
    assert lengths.low is not None and lengths.high is not None
    if lengths.distribution == "uniform":
        return UniformLengths(lengths.low, lengths.high)
    assert lengths.mu is not None and lengths.sigma is not None
    return LogNormalLengths(lengths.mu, lengths.sigma, lengths.low, lengths.high)
