"""From a deployment file to a `Deployment`."""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from prfaas.deployment.changes import changed
from prfaas.deployment.checks import check_to_run
from prfaas.deployment.problems import first_problem
from prfaas.deployment.schema import ClusterSection, DeploymentFile
from prfaas.deployment.source import Source, read_source
from prfaas.deployment.types import (
    Cluster,
    ControlConfig,
    Deployment,
    EngineConfig,
    GatewayConfig,
    Instance,
    Link,
    ModelRef,
    Routing,
    Security,
    Slo,
    TransferLimits,
)
from prfaas.profiles import ProfileError, load_profile


def default_state_dir() -> Path:
    """Where models, keys and logs are kept: `$PRFAAS_HOME`, else `~/.cache/prfaas`."""
    home = os.environ.get("PRFAAS_HOME")
    return Path(home).expanduser().absolute() if home else Path.home() / ".cache" / "prfaas"


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


def read_file(path: Path, changes: Mapping[str, float] | None = None) -> tuple[Source, DeploymentFile]:
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
    return Slo(slo.ttft_s, slo.tpot_s if slo.tokens_per_s is None else 1 / slo.tokens_per_s)


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
        )
        for link in file.links
    )


def _frozen(source: Source, file: DeploymentFile, state_dir: Path) -> Deployment:
    engine, path = file.engine, source.path
    return Deployment(
        name=file.name,
        path=path,
        state_dir=state_dir,
        model=_model(path, file, state_dir),
        clusters=tuple(_cluster(source, c, cluster) for c, cluster in enumerate(file.clusters)),
        links=links_of(file),
        routing=Routing(file.routing.policy, file.routing.threshold_tokens),
        slo=slo_of(file),
        gateway=GatewayConfig(file.gateway.host, file.gateway.port),
        security=Security(
            state_dir / file.name / Path(file.security.key_file).expanduser(), file.security.tenant_header
        ),
        engine=EngineConfig(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_gib=engine.kv_cache_gib,
            staging_bytes=engine.staging,
            transfer_block_bytes=engine.transfer_block,
            prefix_cache_retention_tokens=engine.prefix_cache_retention_tokens,
            extra_args=tuple(engine.extra_args),
            env=dict(engine.env),
        ),
        transfer=TransferLimits(**file.transfer.model_dump()),
        control=ControlConfig(**file.control.model_dump()),
    )


def _model(path: Path, file: DeploymentFile, state_dir: Path) -> ModelRef:
    model = file.model
    assert model.served_name is not None and model.max_model_len is not None
    if model.tiny is not None:
        directory = state_dir / "models" / model.tiny
    else:
        assert model.path is not None
        directory = path.parent.absolute() / Path(model.path).expanduser()
    adapters = {
        name: path.parent.absolute() / Path(adapter).expanduser() for name, adapter in model.adapters.items()
    }
    return ModelRef(model.served_name, model.max_model_len, directory, model.tiny, adapters)


def _cluster(source: Source, index: int, cluster: ClusterSection) -> Cluster:
    profile = None
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
        )
        for instance in cluster.instances or ()
    )
    return Cluster(cluster.name, cluster.kind, cluster.hardware, instances, profile, cluster.speedup or 1.0)
