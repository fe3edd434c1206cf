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
from prfaas.core.deployment.speculation import speculation_of
from prfaas.core.deployment.types import SYNTHETIC, ClusterSection, Link, by_pool
from prfaas.core.kv.config_fields import CacheDtypeError, ConfigError
from prfaas.core.kv.drafters import DrafterError, with_drafter
from prfaas.core.kv.dtypes import CacheDtypes, are_convertible
from prfaas.core.kv.hf_config import kept_dtype, model_from_config, model_from_file, read_config
from prfaas.core.kv.layers import FullAttention
from prfaas.core.kv.model import KvModel, model_on_wire
from prfaas.core.kv.published import published_model


def planned_deployment(file: DeploymentFile, links: Sequence[Link]) -> PlannedDeployment:
    """The deployment, with what its clusters hold and its `links` carry of a request's KVCache.

    Raises:
        DeploymentError: the model is not known or can't be read, its caches have no such dtype, or its heads can't be
            divided among the ranks of a cluster.
    """
    once = {each.name: _kv_model(file, each, index) for index, each in enumerate(file.clusters)}
    ranks = {cluster.name: _ranks(file, cluster) for cluster in file.clusters}
    held = {name: _on_all_ranks(file, c, once[name], ranks[name]) for c, name in enumerate(once)}
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
        path=file.source.path,
        links=tuple(links),
        workload=file.workload,
        routing=file.routing,
        control=file.control,
        slo=file.slo.with_inverse(),
        prices=file.prices.per_gpu_hour,
        source=file.source,
        pool=file.pool,
        first_token=file.gateway.first_token or "decode",
        step_tokens=file.engine.max_num_batched_tokens,
        seats=file.engine.max_num_seqs,
        kv_model=kv_model,
        dtypes=file.model.cache_dtypes(widest.kv_cache_dtype),
        clusters=tuple(
            replace(
                _planned_cluster(cluster),
                tensor_parallel=ranks[cluster.name],
                kv_model=None if held[cluster.name] == kv_model else held[cluster.name],
                dtypes=file.model.cache_dtypes(cluster.kv_cache_dtype),
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


def _on_all_ranks(file: DeploymentFile, index: int, model: KvModel, ranks: int) -> KvModel:
    try:
        return model.on_all_ranks(ranks)
    except ValueError as error:
        problem = f"{error}; give the tensor_parallel that its engines run with"
        raise file.error(("clusters", index, "tensor_parallel"), problem) from None


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


def _kv_model(file: DeploymentFile, cluster: ClusterSection, index: int) -> KvModel:
    """What one rank alone would hold."""
    made, published = file.model.source, file.model.published
    dtypes = file.model.cache_dtypes(cluster.kv_cache_dtype)
    try:
        if published is not None:
            model = published_model(published).kept_in(dtypes)
        else:
            name = file.model.served_name or (None if made is None else made.name)
            model = model_from_file(_config_path(file), name=name, dtypes=dtypes)
        speculation = speculation_of((*file.engine.extra_args, *cluster.extra_args))
        return with_drafter(model, _config(file), speculation, dtypes)
    except DrafterError as error:
        place = ("clusters", index, "extra_args") if cluster.extra_args else ("engine", "extra_args")
        raise file.error(place, str(error)) from None
    except CacheDtypeError as error:
        above = ("model",) if cluster.kv_cache_dtype is None else ("clusters", index)
        raise file.error((*above, "kv_cache_dtype"), str(error)) from None
    except ConfigError as error:
        problem = str(error)
        if made is not None and made.kind == "hub":
            problem = f"{made.name} is not on this machine yet; prfaas model fetch {file.source.path}"
        given = "config" if file.model.config else "path" if made is None else made.kind
        raise file.error(("model", given), problem) from None


def check_cluster_dtypes(file: DeploymentFile) -> None:
    """Whether unlike dtypes of clusters can be converted. A model that can't be read yet is judged by names alone."""
    named = [file.model.cache_dtypes(cluster.kv_cache_dtype).named for cluster in file.clusters]
    if len(set(named)) == 1:
        return
    for c, cluster in enumerate(file.clusters):
        if cluster.hardware == SYNTHETIC:
            raise file.error(
                ("clusters", c, "hardware"),
                "stand-in engines convert no KVCache; leave kv_cache_dtype of all clusters out",
            )
    try:
        config = _config(file)
    except ConfigError:
        config = {}
    kept = named if not config else [_kept(config, file.model, cluster) for cluster in file.clusters]
    for a, b in combinations(range(len(file.clusters)), 2):
        if named[a] == named[b]:
            continue
        # At least one of the two says it.
        at, beside = (b, a) if file.clusters[b].kv_cache_dtype is not None else (a, b)
        location = ("clusters", at, "kv_cache_dtype")
        if not are_convertible(kept[a], kept[b]):
            raise file.error(
                location,
                f'{kept[at]} is not converted to or from {kept[beside]} of cluster "{file.clusters[beside].name}"; mix '
                "one of bfloat16 and float16 with one of fp8_e4m3 and fp8_e5m2",
            )
        if config and _keeps_latents(config):
            raise file.error(
                location,
                "the model keeps latents (MLA), which are not converted; leave it out, so that all clusters keep one "
                "dtype",
            )


def _config(file: DeploymentFile) -> Mapping[str, Any]:
    """The model's configuration. Raises ConfigError, as where it is made or brought later."""
    published = file.model.published
    return read_config(_config_path(file)) if published is None else published_model(published).config


def _config_path(file: DeploymentFile) -> Path:
    model, made = file.model, file.model.source
    if made is None:
        folder = model.config or model.path
        assert folder is not None
    elif made.kind == "tiny":
        raise ConfigError("a made model has no published speed; plan with published, config or path")
    else:
        folder = made.config_folder(made.directory(default_state_dir(), file.name))
    return folder if folder == model.config and folder.suffix == ".json" else folder / "config.json"


def _kept(config: Mapping[str, Any], model: ModelSection, cluster: ClusterSection) -> str:
    dtypes = model.cache_dtypes(cluster.kv_cache_dtype)
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
