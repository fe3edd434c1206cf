"""The KVCache that a deployment file is planned with, and which dtypes its clusters may keep it in beside each other.

It is that of a published model, a `config.json` or a checkpoint.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from prfaas.core.deployment.model import ModelSection, default_state_dir
from prfaas.core.deployment.planned import PlannedCluster, PlannedDeployment
from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.source import Findings
from prfaas.core.deployment.speculation import speculation_of
from prfaas.core.deployment.types import SYNTHETIC, ClusterSection, Link, by_pool
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
from prfaas.core.yaml_source import Location, YamlSource


def planned_deployment(source: YamlSource, file: DeploymentFile, links: Sequence[Link]) -> PlannedDeployment:
    """The deployment, with what its clusters hold and its `links` carry of a request's KVCache.

    Raises:
        DeploymentError: the model is not known or can't be read, its caches have no such dtype, or its heads can't be
            divided among the ranks of a cluster.
    """
    once = {each.name: _kv_model(source, file, each, index) for index, each in enumerate(file.clusters)}
    ranks = {cluster.name: _ranks(file, cluster) for cluster in file.clusters}
    held = {name: _on_all_ranks(source, c, once[name], ranks[name]) for c, name in enumerate(once)}
    widest = max(file.clusters, key=lambda cluster: held[cluster.name].compared_bytes())
    kv_model = held[widest.name]
    sent = {
        link.name: model_on_wire(once[link.source], once[link.target], ranks[link.target]) for link in links
    }
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
        dtypes=_dtypes(file.model, widest),
        clusters=tuple(
            replace(
                _planned_cluster(cluster),
                tensor_parallel=ranks[cluster.name],
                kv_model=None if held[cluster.name] == kv_model else held[cluster.name],
                dtypes=_dtypes(file.model, cluster),
            )
            for cluster in file.clusters
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


def _ranks(file: DeploymentFile, cluster: ClusterSection) -> int:
    """Of an instance."""
    if cluster.instances is not None:
        return cluster.instances[0].tensor_parallel
    assert cluster.profile is not None
    # The published times are those of the paper, which counts every byte once; vLLM would copy heads to all ranks.
    usual = cluster.profile.gpus_per_instance if file.model.published is None else 1
    return cluster.tensor_parallel or usual


def _on_all_ranks(source: YamlSource, index: int, model: KvModel, ranks: int) -> KvModel:
    try:
        return model.on_all_ranks(ranks)
    except ValueError as error:
        problem = f"{error}; give the tensor_parallel that its engines run with"
        raise source.error(("clusters", index, "tensor_parallel"), problem) from None


def _planned_cluster(cluster: ClusterSection) -> PlannedCluster:
    profile, instances = cluster.profile, cluster.instances or ()
    assert profile is not None
    # Groups of several sizes are moved by what divides them all.
    groups = Counter(each.data_parallel or f"alone {each.name}" for each in instances)
    return PlannedCluster(
        name=cluster.name,
        kind=cluster.kind,
        hardware=cluster.hardware,
        instance_count=cluster.instance_count or len(instances),
        gpus_per_instance=profile.gpus_per_instance,
        profile=profile if cluster.speedup == 1 else profile.sped_up(cluster.speedup),
        prefix_hit_ratio=cluster.prefix_hit_ratio,
        pool=cluster.pool,
        instances_per_machine=max(map(len, by_pool(cluster.name, instances).values()), default=1),
        kills_per_hour=cluster.expected_kills_per_hour,
        group_ranks=math.gcd(*groups.values()) or 1,
    )


def _dtypes(model: ModelSection, cluster: ClusterSection) -> CacheDtypes:
    return CacheDtypes(cluster.kv_cache_dtype or model.kv_cache_dtype, model.dtype)


def _kv_model(source: YamlSource, file: DeploymentFile, cluster: ClusterSection, index: int) -> KvModel:
    model, config = _own_kv_model(source, file, cluster, index), _config(file)
    assert config is not None
    try:
        speculation = speculation_of((*file.engine.extra_args, *cluster.extra_args))
        return with_drafter(model, config, speculation, _dtypes(file.model, cluster))
    except DrafterError as error:
        place = ("clusters", index, "extra_args") if cluster.extra_args else ("engine", "extra_args")
        raise source.error(place, str(error)) from None


def _own_kv_model(source: YamlSource, file: DeploymentFile, cluster: ClusterSection, index: int) -> KvModel:
    model, dtypes = file.model, _dtypes(file.model, cluster)
    made = model.source
    try:
        if model.published is not None:
            return published_model(model.published).kept_in(dtypes)
        config = _config_file(file)
        if config is not None:
            return model_from_file(
                config, name=model.served_name or (None if made is None else made.name), dtypes=dtypes
            )
    except CacheDtypeError as error:
        place = ("model",) if cluster.kv_cache_dtype is None else ("clusters", index)
        raise source.error((*place, "kv_cache_dtype"), str(error)) from None
    except ConfigError as error:
        if made is not None and made.kind == "hub":
            problem = f"{made.name} is not on this machine yet; prfaas model fetch {source.path}"
            raise source.error(("model", "hub"), problem) from None
        raise source.error(("model", "config" if model.config else "path"), str(error)) from None
    raise source.error(
        ("model", "tiny"), "a made model has no published speed; plan with published, config or path"
    )


def check_cluster_dtypes(file: DeploymentFile) -> Findings:
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
    config = _config(file)
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


def _config_file(file: DeploymentFile) -> Path | None:
    """The `config.json` of the model of a file that is to be planned; None: published, or only made when it runs."""
    model, made = file.model, file.model.source
    if made is not None:
        if made.kind == "tiny":
            return None
        return made.config_folder(made.directory(default_state_dir(), file.name)) / "config.json"
    if model.config is not None and model.config.suffix == ".json":
        return model.config
    folder = model.config or model.path
    return None if folder is None else folder / "config.json"


def _config(file: DeploymentFile) -> Mapping[str, Any] | None:
    """The model's configuration; None where it is made or brought later."""
    try:
        if file.model.published is not None:
            return published_model(file.model.published).config
        path = _config_file(file)
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
