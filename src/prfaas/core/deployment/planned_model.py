"""The KVCache that a deployment file is planned with, and which dtypes its clusters may keep it in beside each other.

It is that of a published model, a `config.json` or a checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from prfaas.core.deployment.model import default_state_dir
from prfaas.core.deployment.planned import PlannedCluster, PlannedDeployment
from prfaas.core.deployment.schema import ClusterSection, DeploymentFile, ModelSection
from prfaas.core.deployment.source import Findings, Location, YamlSource
from prfaas.core.deployment.speculation import speculation_of
from prfaas.core.deployment.types import SYNTHETIC, Link
from prfaas.core.kv import (
    CacheDtypeError,
    CacheDtypes,
    ConfigError,
    DrafterError,
    FullAttention,
    KvModel,
    are_convertible,
    kept_dtype,
    model_from_config,
    model_from_file,
    model_on_wire,
    published_model,
    read_config,
    with_drafter,
)


def kept_models(source: YamlSource, file: DeploymentFile) -> dict[str, KvModel]:
    """The KVCache of the file's model on one rank, by cluster.

    Raises:
        DeploymentError: the model is not known or can't be read, or its caches have no such dtype.
    """
    return {
        cluster.name: _kv_model(source, file, cluster, index) for index, cluster in enumerate(file.clusters)
    }


def planned_deployment(
    source: YamlSource,
    file: DeploymentFile,
    once: Mapping[str, KvModel],
    clusters: Sequence[PlannedCluster],
    links: Sequence[Link],
) -> PlannedDeployment:
    """The deployment, with what its clusters hold and its links carry of a request's KVCache.

    Args:
        source: Of the file.
        file: The file.
        once: By cluster, as `kept_models` gives them.
        clusters: Of the file.
        links: Of the file.

    Raises:
        DeploymentError: the model's heads can't be divided among the ranks of a cluster.
    """
    ranks = {cluster.name: cluster.tensor_parallel for cluster in clusters}
    held = {
        cluster.name: _on_all_ranks(source, c, once[cluster.name], cluster)
        for c, cluster in enumerate(clusters)
    }
    widest = max(held, key=lambda name: held[name].compared_bytes())
    sent = {
        link.name: model_on_wire(once[link.source], once[link.target], ranks[link.target]) for link in links
    }
    kv_model = held[widest]
    inside = [model_on_wire(once[name], once[name], count) for name, count in ranks.items()]
    most_sent = max((*sent.values(), *inside), key=KvModel.compared_bytes)
    assert file.workload is not None
    return PlannedDeployment(
        name=file.name,
        path=source.path,
        links=tuple(links),
        workload=file.workload,
        routing=file.routing,
        control=file.control,
        slo=file.slo.with_inverse(),
        prices=file.prices.per_gpu_hour,
        source=source,
        pool=file.pool,
        first_token=file.gateway.first_token or "decode",
        step_tokens=file.engine.max_num_batched_tokens,
        seats=file.engine.max_num_seqs,
        kv_model=kv_model,
        dtypes=next(_dtypes(file.model, each) for each in file.clusters if each.name == widest),
        clusters=tuple(
            replace(
                cluster,
                kv_model=None if held[cluster.name] == kv_model else held[cluster.name],
                dtypes=_dtypes(file.model, section),
            )
            for cluster, section in zip(clusters, file.clusters, strict=True)
        ),
        kv_copies=max(
            (
                sent[link.name].compared_bytes()
                / model_on_wire(once[link.source], once[link.target], 1).compared_bytes()
                for link in links
            ),
            default=1.0,
        ),
        wire_model=None if most_sent == kv_model else most_sent,
        link_models={name: model for name, model in sent.items() if model != most_sent},
    )


def _dtypes(model: ModelSection, cluster: ClusterSection) -> CacheDtypes:
    return CacheDtypes(cluster.kv_cache_dtype or model.kv_cache_dtype, model.dtype)


def _kv_model(source: YamlSource, file: DeploymentFile, cluster: ClusterSection, index: int) -> KvModel:
    model, config = _own_kv_model(source, file, cluster, index), _config(source, file)
    assert config is not None
    try:
        speculation = speculation_of((*file.engine.extra_args, *cluster.extra_args))
        return with_drafter(model, config, speculation, _dtypes(file.model, cluster))
    except DrafterError as error:
        place = ("clusters", index, "extra_args") if cluster.extra_args else ("engine", "extra_args")
        raise source.error(place, str(error)) from None


def _own_kv_model(source: YamlSource, file: DeploymentFile, cluster: ClusterSection, index: int) -> KvModel:
    model, dtypes = file.model, _dtypes(file.model, cluster)
    origin = model.origin
    try:
        if model.published is not None:
            return published_model(model.published).kept_in(dtypes)
        config = _config_file(source, file)
        if config is not None:
            return model_from_file(
                config, name=model.served_name or (None if origin is None else origin.name), dtypes=dtypes
            )
    except CacheDtypeError as error:
        place = ("model",) if cluster.kv_cache_dtype is None else ("clusters", index)
        raise source.error((*place, "kv_cache_dtype"), str(error)) from None
    except ConfigError as error:
        if origin is not None and origin.kind == "hub":
            problem = f"{origin.name} is not on this machine yet; prfaas model fetch {source.path}"
            raise source.error(("model", "hub"), problem) from None
        field = "published" if model.published else "config" if model.config else "path"
        raise source.error(("model", field), str(error)) from None
    raise source.error(
        ("model", "tiny"), "a made model has no published speed; plan with published, config or path"
    )


def _on_all_ranks(source: YamlSource, index: int, model: KvModel, cluster: PlannedCluster) -> KvModel:
    try:
        return model.on_all_ranks(cluster.tensor_parallel)
    except ValueError as error:
        raise source.error(
            ("clusters", index, "tensor_parallel"),
            f"{error}; give the tensor_parallel that its engines run with",
        ) from None


def check_cluster_dtypes(source: YamlSource, file: DeploymentFile) -> Findings:
    """Whether unlike dtypes of clusters can be converted. A model that can't be read yet is judged by names alone."""
    named = [_dtypes(file.model, cluster).named for cluster in file.clusters]
    if len(set(named)) == 1:
        return
    for c, cluster in enumerate(file.clusters):
        if cluster.hardware == SYNTHETIC:
            yield (
                ("clusters", c, "hardware"),
                "stand-in engines convert no KVCache; leave kv_cache_dtype of all clusters out",
            )
    config = _config(source, file)
    kept = named if config is None else [_kept(config, file.model, cluster) for cluster in file.clusters]
    for a, b in combinations(range(len(file.clusters)), 2):
        if named[a] == named[b]:
            continue
        # At least one of the two says it.
        at, beside = (b, a) if file.clusters[b].kv_cache_dtype is not None else (a, b)
        location: Location = ("clusters", at, "kv_cache_dtype")
        if not are_convertible(kept[a], kept[b]):
            yield (
                location,
                f'{kept[at]} is not converted to or from {kept[beside]} of cluster "{file.clusters[beside].name}"; mix '
                "one of bfloat16 and float16 with one of fp8_e4m3 and fp8_e5m2",
            )
        if config is not None and _keeps_latents(config):
            yield (
                location,
                "the model keeps latents (MLA), which are not converted; leave it out, so that all clusters keep one "
                "dtype",
            )


def _config_file(source: YamlSource, file: DeploymentFile) -> Path | None:
    """The `config.json` of the model of a file that is to be planned; None: published, or only made when it runs."""
    model, origin = file.model, file.model.origin
    if origin is not None:
        if origin.kind == "tiny":
            return None
        return origin.config_folder(origin.directory(default_state_dir(), file.name)) / "config.json"
    given = model.config or model.path
    if given is None:
        return None
    path = source.path.parent / Path(given).expanduser()
    return path if model.config is not None and path.suffix == ".json" else path / "config.json"


def _config(source: YamlSource, file: DeploymentFile) -> Mapping[str, Any] | None:
    """The model's configuration; None where it is made or brought later."""
    try:
        if file.model.published is not None:
            return published_model(file.model.published).config
        path = _config_file(source, file)
        return None if path is None else read_config(path)
    except ConfigError:
        return None


def _kept(config: Mapping[str, Any], model: ModelSection, cluster: ClusterSection) -> str:
    dtypes = _dtypes(model, cluster)
    try:
        return kept_dtype(config, dtypes)
    except CacheDtypeError:
        return dtypes.named


def _keeps_latents(config: Mapping[str, Any]) -> bool:
    try:
        groups = model_from_config(config, dtypes=CacheDtypes("bfloat16")).groups
    except ConfigError:
        return False
    return any(isinstance(group, FullAttention) and group.is_mla for group in groups)
