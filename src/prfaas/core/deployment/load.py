"""From a deployment file to a `Deployment` (to run) or a `PlannedDeployment` (to plan and simulate)."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from prfaas.core.deployment.checks import admin_port, check_to_plan, check_to_run
from prfaas.core.deployment.encryption import gateway_cluster, speaks_tls
from prfaas.core.deployment.engine import EngineConfig, TransferLimits
from prfaas.core.deployment.fleet_section import fleet_of
from prfaas.core.deployment.gateway import AdminConfig, GatewayConfig, GatewayLimits, TracingConfig
from prfaas.core.deployment.model import ModelRef, default_state_dir
from prfaas.core.deployment.model_checks import source_of
from prfaas.core.deployment.planned import (
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
from prfaas.core.deployment.planned_model import kept_models, planned_caches
from prfaas.core.deployment.pool import PoolSettings, PoolSpace, by_machine
from prfaas.core.deployment.preemptible import kills_per_hour
from prfaas.core.deployment.problems import first_problem
from prfaas.core.deployment.schema import ClusterSection, DeploymentFile, LengthsSection, MachinePoolSection
from prfaas.core.deployment.security import Security
from prfaas.core.deployment.source import YamlSource, changed, read_source
from prfaas.core.deployment.types import (
    SYNTHETIC,
    Cluster,
    ControlConfig,
    Deployment,
    Instance,
    Link,
    Routing,
    Slo,
)
from prfaas.core.latency import ProfileError, load_profile


def load_deployment(path: Path | str, *, state_dir: Path | None = None) -> Deployment:
    """Read and check a deployment file that is to be run. `state_dir` defaults to `default_state_dir()`.

    Raises:
        DeploymentError: the first thing that is wrong, with file, line and field; or the file names no servers
            and is only good for planning.
    """
    path = Path(path)
    source, file = read_file(path)
    check_to_run(source, file)
    return _frozen(source, file, (state_dir or default_state_dir()).absolute())


def read_file(path: Path, changes: Mapping[str, float] | None = None) -> tuple[YamlSource, DeploymentFile]:
    """The fields of a deployment file, each good by itself, `changes` put in.

    Raises:
        DeploymentError: the file can't be read, a field is unknown or its value wrong.
    """
    source = read_source(path)
    if not isinstance(source.values, dict):
        raise source.error((), 'must be a mapping of fields ("name: …", "model: …", …)')
    if changes:
        source = changed(source, changes)
    try:
        return source, DeploymentFile.model_validate(source.values)
    except ValidationError as error:
        raise first_problem(source, error) from None


def slo_of(file: DeploymentFile) -> Slo:
    """The SLO, a speed given as tokens per second turned into time per token."""
    slo = file.slo
    tpot_s = slo.tpot_s if slo.tokens_per_s is None else 1 / slo.tokens_per_s
    return Slo(slo.ttft_s, tpot_s, slo.ttft_statistic)


def links_of(file: DeploymentFile) -> tuple[Link, ...]:
    """The links as the file has them."""
    return tuple(
        Link(
            link.source,
            link.target,
            link.bandwidth,
            link.connections,
            link.rtt_s,
            link.connection_bandwidth,
            link.encryption,
            link.compression,
            file.prices.egress_per_gb if link.egress_per_gb is None else link.egress_per_gb,
            link.mapping_bandwidth,
        )
        for link in file.links
    )


def _routing(file: DeploymentFile) -> Routing:
    routing = file.routing
    return Routing(routing.policy, routing.threshold_tokens, dict(routing.params))


def _frozen(source: YamlSource, file: DeploymentFile, state_dir: Path) -> Deployment:
    engine, path = file.engine, source.path
    home = state_dir / file.name
    return Deployment(
        name=file.name,
        path=path,
        state_dir=state_dir,
        model=_model(path, file, state_dir),
        clusters=tuple(_cluster(source, c, file) for c in range(len(file.clusters))),
        links=links_of(file),
        routing=_routing(file),
        slo=slo_of(file),
        gateway=_gateway(file, home),
        security=_security(file, home),
        engine=EngineConfig(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_gib=engine.kv_cache_gib,
            staging_bytes=engine.staging,
            transfer_block_bytes=engine.transfer_block,
            prefix_cache_retention_tokens=engine.prefix_cache_retention_tokens,
            extra_args=tuple(engine.extra_args),
            env=dict(engine.env),
            log_bytes=engine.log_size,
            log_files=engine.log_files,
            local_transfer=engine.local_transfer,
        ),
        transfer=TransferLimits(**file.transfer.model_dump()),
        control=ControlConfig(**file.control.model_dump()),
        pool=_pool_settings(file),
        fleet=fleet_of(source, file.fleet, home),
    )


def _pool_settings(file: DeploymentFile) -> PoolSettings:
    pool = file.pool
    return PoolSettings(
        checkpoint_tokens=pool.checkpoint_tokens,
        tenant_share=pool.tenant_share,
        eviction=pool.eviction,
        staging_bytes=pool.staging,
        timeout_s=pool.timeout_s,
    )


def _pool_space(pool: MachinePoolSection | None) -> PoolSpace | None:
    if pool is None:
        return None
    folder = None if pool.path is None else Path(pool.path).expanduser()
    return PoolSpace(pool.memory, pool.ssd, folder, pool.kv_port, pool.events_port)


def _security(file: DeploymentFile, home: Path) -> Security:
    security = file.security
    return Security(
        key_file=home / Path(security.key_file).expanduser(),
        tenant_header=security.tenant_header,
        tenant_weights=dict(security.tenant_weights),
        certificates=home / Path(security.certificates).expanduser(),
        encrypt_inside=security.encrypt_inside,
    )


def _gateway(file: DeploymentFile, home: Path) -> GatewayConfig:
    gateway, admin, limits = file.gateway, file.gateway.admin, file.gateway.limits
    token_file = None if admin.token_file is None else home / Path(admin.token_file).expanduser()
    return GatewayConfig(
        host=gateway.host,
        port=gateway.port,
        first_byte_s=gateway.first_byte_s,
        idle_s=gateway.idle_s,
        admin=AdminConfig(admin.host, admin_port(file), token_file),
        hosts=tuple(gateway.hosts),
        route_header=gateway.route_header,
        shadow=gateway.shadow,
        first_token=gateway.first_token,
        limits=GatewayLimits(limits.requests, limits.queue_s, limits.bodies, limits.body_values),
        cluster=gateway_cluster(file),
        tracing=_tracing(file, home),
    )


def _tracing(file: DeploymentFile, home: Path) -> TracingConfig | None:
    tracing = file.gateway.tracing
    if tracing is None:
        return None
    headers_file = None if tracing.headers_file is None else home / Path(tracing.headers_file).expanduser()
    return TracingConfig(tracing.endpoint, tracing.sample_ratio, headers_file)


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
        model.served_name,
        model.max_model_len,
        directory,
        origin,
        adapters,
        model.kv_cache_dtype,
        model.dtype,
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
            name=instance.name,
            cluster=cluster.name,
            roles=tuple(instance.roles),
            host=instance.host,
            http_port=instance.http_port,
            kv_port=instance.kv_port,
            tensor_parallel=instance.tensor_parallel,
            events_port=instance.events_port,
            tls=speaks_tls(file, cluster, instance),
            nixl_port=instance.nixl_port,
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
        pool=_pool_space(cluster.pool),
        instance_price_per_hour=_instance_price_per_hour(file, cluster),
        preemptible=cluster.preemptible,
        kills_per_hour=kills_per_hour(cluster),
        extra_args=tuple(cluster.extra_args),
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
    links = links_of(file)
    caches = planned_caches(source, file, models, clusters, links)
    return PlannedDeployment(
        name=file.name,
        path=path,
        kv_model=caches.kv_model,
        clusters=caches.clusters,
        links=links,
        workload=WorkloadSpec(
            lengths=_lengths(path, file.workload.lengths),
            output_tokens=file.workload.output_tokens,
            prefix_hit_ratio=file.workload.prefix_hit_ratio,
            load=file.workload.load,
        ),
        routing=_routing(file),
        control=ControlConfig(**file.control.model_dump()),
        slo=slo_of(file),
        prices=file.prices.per_gpu_hour,
        source=source,
        pool=_pool_settings(file),
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
        pool=_pool_space(cluster.pool),
        instances_per_machine=together,
        tensor_parallel=_tensor_parallel(source, index, cluster, profile.gpus_per_instance, ranks),
        kills_per_hour=kills_per_hour(cluster),
    )


def _lengths(path: Path, lengths: LengthsSection) -> LengthsSpec:
    if lengths.distribution == "trace":
        assert lengths.path is not None
        return TraceLengths(path.parent / Path(lengths.path).expanduser(), lengths.format, lengths.columns)
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
