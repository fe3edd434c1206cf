"""From a deployment file to a `Deployment` (to run) or a `PlannedDeployment` (to plan and simulate)."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from pydantic import ValidationError

from prfaas.core.deployment.checks import admin_port, check_to_plan, check_to_run
from prfaas.core.deployment.encryption import gateway_cluster, speaks_tls
from prfaas.core.deployment.model import ModelRef, default_state_dir
from prfaas.core.deployment.model_checks import source_of
from prfaas.core.deployment.planned import (
    PlannedCluster,
    PlannedDeployment,
)
from prfaas.core.deployment.planned_model import kept_models, planned_caches
from prfaas.core.deployment.pool import by_machine
from prfaas.core.deployment.problems import first_problem
from prfaas.core.deployment.schema import ClusterSection, DeploymentFile
from prfaas.core.deployment.source import YamlSource, changed, read_source
from prfaas.core.deployment.types import (
    SYNTHETIC,
    Cluster,
    Deployment,
    Instance,
    Link,
    Slo,
)
from prfaas.core.latency import ProfileError, load_profile

USUAL_KILLS_PER_HOUR = 1.0
"""Of a preemptible instance of which the file says nothing: far more than clouds tell of most kinds of machines. It
costs little: a prefill of 30 s counts as 0.13 s longer."""


def kills_per_hour(cluster: ClusterSection) -> float:
    """How often an instance is expected to be taken away while it is up; 0 where that is not to happen."""
    if not cluster.preemptible:
        return 0.0
    return USUAL_KILLS_PER_HOUR if cluster.kills_per_hour is None else cluster.kills_per_hour


def load_deployment(path: Path | str, *, state_dir: Path | None = None) -> Deployment:
    """Read and check a deployment file that is to be run. `state_dir` defaults to `default_state_dir()`.

    Raises:
        DeploymentError: the first thing that is wrong, with file, line and field; or the file names no servers
            and is only good for planning.
    """
    path = Path(path)
    state_dir = (state_dir or default_state_dir()).absolute()
    source, file = read_file(path, state_dir=state_dir)
    check_to_run(source, file)
    return _frozen(source, file, state_dir)


def read_file(
    path: Path, changes: Mapping[str, float] | None = None, *, state_dir: Path | None = None
) -> tuple[YamlSource, DeploymentFile]:
    """The fields of a deployment file, each good by itself, `changes` put in.

    Without a `state_dir` its files stay relative to the deployment's folder there.

    Raises:
        DeploymentError: the file can't be read, a field is unknown or its value wrong.
    """
    source = read_source(path)
    if not isinstance(source.values, dict):
        raise source.error((), 'must be a mapping of fields ("name: …", "model: …", …)')
    if changes:
        source = changed(source, changes)
    home = Path() if state_dir is None else state_dir / str(source.values.get("name"))
    try:
        # A section that is left out has files in the deployment's folder, too.
        values = {"security": {}} | source.values
        return source, DeploymentFile.model_validate(values, context={"home": home, "beside": path.parent})
    except ValidationError as error:
        raise first_problem(source, error) from None


def slo_of(file: DeploymentFile) -> Slo:
    """The SLO, with the time per token and its inverse."""
    slo = file.slo
    if slo.tokens_per_s is not None:
        return replace(slo, tpot_s=1 / slo.tokens_per_s)
    return slo if slo.tpot_s is None else replace(slo, tokens_per_s=1 / slo.tpot_s)


def links_of(source: YamlSource, file: DeploymentFile) -> tuple[Link, ...]:
    """The links as the file has them, each with its price of egress."""
    return tuple(
        link
        if source.gives(("links", index, "egress_per_gb"))
        else replace(link, egress_per_gb=file.prices.egress_per_gb)
        for index, link in enumerate(file.links)
    )


def _frozen(source: YamlSource, file: DeploymentFile, state_dir: Path) -> Deployment:
    gateway = replace(
        file.gateway,
        admin=replace(file.gateway.admin, port=admin_port(file)),
        cluster=gateway_cluster(file),
    )
    return Deployment(
        name=file.name,
        path=source.path,
        state_dir=state_dir,
        model=_model(source.path, file, state_dir),
        clusters=tuple(_cluster(source, c, file) for c in range(len(file.clusters))),
        links=links_of(source, file),
        routing=file.routing,
        slo=slo_of(file),
        gateway=gateway,
        security=file.security,
        engine=file.engine,
        transfer=file.transfer,
        control=file.control,
        pool=file.pool,
        fleet=file.fleet,
    )


def _model(path: Path, file: DeploymentFile, state_dir: Path) -> ModelRef:
    model = file.model
    assert model.served_name is not None and model.max_model_len is not None
    origin = source_of(model)
    if origin is not None:
        directory = origin.directory(state_dir, file.name)
    else:
        assert model.path is not None
        directory = path.parent.absolute() / Path(model.path).expanduser()
    adapters = {
        name: path.parent.absolute() / Path(adapter).expanduser() for name, adapter in model.adapters.items()
    }
    return ModelRef(
        served_name=model.served_name,
        max_model_len=model.max_model_len,
        path=directory,
        source=origin,
        adapters=adapters,
        kv_cache_dtype=model.kv_cache_dtype,
        dtype=model.dtype,
    )


def _cluster(source: YamlSource, index: int, file: DeploymentFile) -> Cluster:
    cluster, profile = file.clusters[index], None
    if cluster.profile is not None:
        try:
            profile = load_profile(cluster.profile, relative_to=source.path.parent)
        except ProfileError as error:
            raise source.error(("clusters", index, "profile"), str(error)) from None
    instances = tuple(
        Instance(
            **{each.name: getattr(instance, each.name) for each in fields(instance)},
            cluster=cluster.name,
            tls=speaks_tls(file, cluster, instance),
            is_stand_in=cluster.hardware == SYNTHETIC,
        )
        for instance in cluster.instances or ()
    )
    if cluster.tensor_parallel is not None:
        raise source.error(
            ("clusters", index, "tensor_parallel"), "is only to plan with; give it to each instance here"
        )
    return Cluster(
        name=cluster.name,
        kind=cluster.kind,
        hardware=cluster.hardware,
        instances=instances,
        profile=profile,
        speedup=cluster.speedup or 1.0,
        pool=cluster.pool,
        instance_price_per_hour=_instance_price_per_hour(file, cluster),
        preemptible=cluster.preemptible,
        kills_per_hour=kills_per_hour(cluster),
        extra_args=cluster.extra_args,
        kv_cache_dtype=cluster.kv_cache_dtype,
    )


def _instance_price_per_hour(file: DeploymentFile, cluster: ClusterSection) -> float:
    sizes = [instance.tensor_parallel for instance in cluster.instances or ()]
    return file.prices.per_gpu_hour.get(cluster.hardware, 0.0) * (cluster.gpus_per_instance or max(sizes))


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
    models = kept_models(source, file)
    clusters = tuple(
        _planned_cluster(source, c, cluster, file.model.published) for c, cluster in enumerate(file.clusters)
    )
    links = links_of(source, file)
    caches = planned_caches(source, file, models, clusters, links)
    return PlannedDeployment(
        name=file.name,
        path=path,
        kv_model=caches.kv_model,
        clusters=caches.clusters,
        links=links,
        workload=file.workload,
        routing=file.routing,
        control=file.control,
        slo=slo_of(file),
        prices=file.prices.per_gpu_hour,
        source=source,
        pool=file.pool,
        dtypes=caches.dtypes,
        first_token=file.gateway.first_token,
        step_tokens=file.engine.max_num_batched_tokens,
        seats=file.engine.max_num_seqs,
        wire_model=caches.wire_model,
        link_models=caches.link_models,
        kv_copies=caches.kv_copies,
    )


def _tensor_parallel(source: YamlSource, index: int, cluster: ClusterSection, gpus: int, default: int) -> int:
    if cluster.instances is not None:
        if cluster.tensor_parallel is not None:
            raise source.error(
                ("clusters", index, "tensor_parallel"),
                "goes with instance_count; give it to each instance here",
            )
        return cluster.instances[0].tensor_parallel
    found = cluster.tensor_parallel or default
    if found > gpus:
        raise source.error(
            ("clusters", index, "tensor_parallel"),
            f"{found} ranks need as many GPUs, but an instance has {gpus}",
        )
    return found


def _planned_cluster(
    source: YamlSource, index: int, cluster: ClusterSection, model: str | None
) -> PlannedCluster:
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
    profile = profile if cluster.speedup is None else profile.sped_up(cluster.speedup)
    # The published times are those of the paper, which counts every byte once; vLLM would copy heads to all ranks.
    ranks = profile.gpus_per_instance if model is None else 1
    together = 1
    if cluster.instances is None:
        assert cluster.instance_count is not None
        count, gpus = cluster.instance_count, cluster.gpus_per_instance
    else:
        count = len(cluster.instances)
        together = max(map(len, by_machine(cluster.instances)))
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
        pool=cluster.pool,
        instances_per_machine=together,
        tensor_parallel=_tensor_parallel(source, index, cluster, profile.gpus_per_instance, ranks),
        kills_per_hour=kills_per_hour(cluster),
    )
