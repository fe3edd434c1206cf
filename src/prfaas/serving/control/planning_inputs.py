"""Inputs of planning and routing, from the deployment file, the model and the running deployment."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.core.arrays import OfLength
from prfaas.core.deployment import Cluster, Deployment, Instance, Link
from prfaas.core.deployment.peers import joins_pools
from prfaas.core.deployment.source import read_source
from prfaas.core.deployment.speculation import counted_model, kept_model
from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.drafters import DrafterError
from prfaas.core.kv.layers import CompressedAttention
from prfaas.core.kv.model import KvModel, model_on_wire
from prfaas.core.kv.published import published_models
from prfaas.core.kv.told import read_told_layers
from prfaas.core.latency.prefill_curves import PrefillCurves
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import KvSize, PlanProblem
from prfaas.core.scheduling.decision import KvFacts
from prfaas.core.scheduling.live_problem import (
    ClusterFacts,
    LinkFacts,
    group_ranks,
    prefill_instances,
    problem_now,
)
from prfaas.core.scheduling.parameters import PolicyError
from prfaas.core.scheduling.policy import Policy, make_policy
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, PoolView, View
from prfaas.core.units import GB, SECONDS_PER_HOUR
from prfaas.core.workload.lengths import LengthDistribution
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)

# Engines move whole blocks and choose their size themselves. This is vLLM's largest so far: what must fit into
# staging is never taken for less than it is.
_LARGEST_BLOCK_TOKENS = 256


def kv_model_of(deployment: Deployment) -> KvModel | None:
    """The model's layers by its config, with the widest dtype and drafter of any cluster; None, with a warning, where
    that can't be read."""
    for cluster in deployment.clusters:
        try:
            kept_model(deployment, cluster)
        except DrafterError as error:
            logger.warning("the KVCache of %s is counted without a drafter's; %s", cluster.name, error)
        except ConfigError as error:
            logger.warning(
                "what the model keeps is unknown, so it counts for a large hybrid one until an engine tells: %s",
                error,
            )
            return None
    return _widest(deployment)


def _widest(deployment: Deployment) -> KvModel:
    return max((_kept(deployment, each.name) for each in deployment.clusters), key=KvModel.compared_bytes)


def sent_model(deployment: Deployment, source: str, target: str) -> KvModel | None:
    """What of KVCache crosses between two clusters by name, or moves inside of one.

    None: it is what `kv_model_of` says, or not known.
    """
    ranks = _ranks(deployment.cluster(target))
    return _unless_usual(
        deployment, ranks, lambda: model_on_wire(_kept(deployment, source), _kept(deployment, target), ranks)
    )


def held_model(deployment: Deployment, cluster: str) -> KvModel | None:
    """What all ranks of an instance hold, and so does its machine's pool; None as of `sent_model`."""
    ranks = _ranks(deployment.cluster(cluster))
    return _unless_usual(deployment, ranks, lambda: _kept(deployment, cluster).on_all_ranks(ranks))


def _kept(deployment: Deployment, cluster: str) -> KvModel:
    return counted_model(deployment, deployment.cluster(cluster))


def _ranks(cluster: Cluster) -> int:
    """Of its instances, which mostly have as many; whichever of them decodes."""
    return max(instance.tensor_parallel for instance in cluster.instances)


def _unless_usual(deployment: Deployment, ranks: int, model_of: Callable[[], KvModel]) -> KvModel | None:
    # Options may give a drafter.
    are_alike = len({cluster.extra_args for cluster in deployment.clusters}) == 1
    if ranks == 1 and are_alike and not deployment.converts_kv:
        return None
    try:
        model = model_of()
    except ConfigError:
        return None
    except ValueError as error:
        logger.warning("KVCache is counted as that of one rank: %s", error)
        return None
    return None if model == _widest(deployment) else model


def _facts(model: KvModel | None) -> KvFacts | None:
    return None if model is None else kv_facts(model)


def kv_facts(model: KvModel | None, block_tokens: int = _LARGEST_BLOCK_TOKENS) -> KvFacts:
    """Without a model: hybrid (the kind that limits most), and as large as any."""
    # The decode instance computes the last prompt token itself.
    facts = KvFacts.of_model(model or _largest(), block_tokens=block_tokens, sends_last_token=False)
    return facts if model is not None else replace(facts, is_hybrid=True, can_skip=False)


def _largest() -> KvModel:
    return max((each.kv_model for each in published_models()), key=KvModel.compared_bytes)


def view_of(
    deployment: Deployment, model: KvModel | None, curves: Mapping[str, PrefillCurves], now_s: float
) -> View:
    """The deployment at rest, by its file alone; `curves` by cluster."""
    return View(
        clusters={
            cluster.name: replace(
                cluster_view(deployment, cluster, curves[cluster.name]),
                instances=[
                    instance_view(deployment, cluster, instance, now_s) for instance in cluster.instances
                ],
            )
            for cluster in deployment.clusters
        },
        links={(link.source, link.target): link_view(deployment, link, now_s) for link in deployment.links},
        kv=kv_facts(model),
        now_s=now_s,
        stale_after_s=deployment.control.stale_after_s,
        pools={node.name: PoolView(node.name, node.cluster, node.instances) for node in deployment.pools},
    )


def cluster_view(deployment: Deployment, cluster: Cluster, curves: PrefillCurves) -> ClusterView:
    """A cluster at rest, still without its instances."""
    return ClusterView(
        cluster.name,
        cluster.kind,
        [],
        curves.alone.seconds,
        slot_s=_usual_slot_s(deployment, cluster) if cluster.kind == "pd" else 0.0,
        instance_price_per_s=cluster.instance_price_per_hour / SECONDS_PER_HOUR,
        kills_per_s=cluster.expected_kills_per_hour / SECONDS_PER_HOUR,
        kv=_facts(sent_model(deployment, cluster.name, cluster.name)),
        pool_kv=_facts(held_model(deployment, cluster.name)),
        reads_kv=deployment.reads_kv(cluster),
    )


def link_view(deployment: Deployment, link: Link, now_s: float) -> LinkView:
    """A link at rest, as the file has it."""
    return LinkView(
        link.source,
        link.target,
        link.bandwidth_bits_per_s,
        drained_s=now_s,
        seen_s=now_s,
        egress_price_per_byte=link.egress_per_gb / GB,
        kv=_facts(sent_model(deployment, link.source, link.target)),
        joins_pools=joins_pools(deployment, link),
    )


def instance_view(deployment: Deployment, cluster: Cluster, instance: Instance, now_s: float) -> InstanceView:
    """An instance at rest, by the file alone."""
    ranks = deployment.ranks_with(instance)
    return InstanceView(
        instance.name,
        cluster.name,
        prefills=instance.has_role("prefill"),
        decodes=instance.has_role("decode"),
        decode_slots=decode_slots(deployment, cluster) if cluster.kind == "pd" else 1,
        busy_until_s=now_s,
        seen_s=now_s,
        group=tuple(each.name for each in ranks) if len(ranks) > 1 else (),
    )


def policy_of(deployment: Deployment) -> Policy:
    """The routing policy that the file names, with its parameters.

    Raises:
        DeploymentError: there is no such policy, it can't be imported, or it does not take these parameters.
    """
    routing = deployment.routing
    params: dict[str, object] = dict(routing.params)
    if routing.policy == "static_threshold":
        params["threshold_tokens"] = routing.threshold_tokens
    try:
        return make_policy(routing.policy, params)
    except PolicyError as error:
        field = ("policy",) if error.parameter is None else ("params", error.parameter)
        raise read_source(deployment.path).error(("routing", *field), str(error)) from error


def prefill_curves(deployment: Deployment) -> dict[str, PrefillCurves]:
    """Prefill curves of every cluster's instances, before anything is measured."""
    return {cluster.name: curves_of(cluster) for cluster in deployment.clusters}


def curves_of(cluster: Cluster) -> PrefillCurves:
    """Prefill curves of one cluster's instances, before anything is measured."""
    return PrefillCurves(lambda: _profiled_curve(cluster))


def _profiled_curve(cluster: Cluster) -> ServiceCurve:
    if cluster.profile is None:
        return ServiceCurve()
    return ServiceCurve.of_profile(cluster.profile, cluster.speedup)


DEFAULT_STEP_S = 0.05
DEFAULT_OUTPUT_TOKENS = 512.0
# Fewer answers than this say nothing about the mean.
_ENOUGH_OUTPUTS = 20


@dataclass(frozen=True, slots=True)
class DecodeFacts:
    """Capacity of one decode instance of a PD cluster."""

    batch: float
    """BS_max of Eq. 5."""
    step_s: float
    """T_decode of Eq. 5."""


def decode_slots(deployment: Deployment, cluster: Cluster) -> int:
    """Requests that decode together on one instance: by profile and SLO where both are given, at most (and
    otherwise) `engine.max_num_seqs`; at least 1."""
    profile, step_limit_s = cluster.profile, deployment.slo.tpot_s
    most = deployment.engine.max_num_seqs
    if profile is not None and profile.decode is not None and step_limit_s is not None:
        low, _ = profile.range_batch
        if profile.decode_step_s(low) / cluster.speedup <= step_limit_s:
            most = min(most, profile.max_batch(step_limit_s * cluster.speedup))
    return max(most, 1)


def _profiled_decode(deployment: Deployment, cluster: Cluster) -> DecodeFacts | None:
    profile = cluster.profile
    if profile is None or profile.decode is None:
        return None
    batch = decode_slots(deployment, cluster)
    low, high = profile.range_batch
    return DecodeFacts(batch, profile.decode_step_s(min(max(batch, low), high)) / cluster.speedup)


def _usual_slot_s(deployment: Deployment, cluster: Cluster) -> float:
    """What an answer keeps its decode slot for, before any has ended."""
    profiled = _profiled_decode(deployment, cluster)
    return DEFAULT_OUTPUT_TOKENS * (DEFAULT_STEP_S if profiled is None else profiled.step_s)


class LiveFacts:
    """Live facts for the planner, read anew at each call. Belongs to the event loop's thread."""

    def __init__(
        self,
        running: RunningDeployment,
        kv_model: KvModel | None,
        cluster_state: ClusterState,
        curves: Mapping[str, PrefillCurves],
        engines: Mapping[str, EngineMeter],
    ) -> None:
        """`curves` by cluster, `engines` by instance. Without a `kv_model` it is taken for as large as any."""
        self._running = running
        self._cluster_state = cluster_state
        self._curves = curves
        self._engines = engines
        self._sent_of: Deployment | None = None
        self._sent: dict[tuple[str, str], OfLength] = {}
        self._kv_bytes: OfLength = KvSize(kv_model or _largest())

    def learn_model(self, kv_model: KvModel) -> None:
        """Count in what an engine tells from now on."""
        self._kv_bytes = KvSize(kv_model)

    def problem(self, lengths: LengthDistribution, output_tokens: float | None = None) -> PlanProblem:
        """The problem for uncached `lengths` and answers of a mean length; None takes what was measured.

        Raises PlanError if no PD cluster has a healthy instance.
        """
        return problem_now(
            [self._cluster(cluster) for cluster in self._running.current.clusters],
            [
                LinkFacts(
                    source=source,
                    target=target,
                    bandwidth_bits_per_s=link.capacity_bits_per_s if link.up else 0.0,
                    kv_bytes=self._link_bytes(source, target),
                )
                for (source, target), link in self._cluster_state.view.links.items()
            ],
            lengths,
            self.output_tokens if output_tokens is None else output_tokens,
            self._kv_bytes,
        )

    @property
    def view(self) -> View:
        """The view that the routing policy reads."""
        return self._cluster_state.view

    def prefill_instances(self, cluster: str) -> int:
        """Healthy instances of a PD cluster that prefill; those being converted count for what they will be."""
        return prefill_instances(self._cluster_state.view.clusters[cluster].instances)

    def decode(self, cluster: Cluster) -> DecodeFacts:
        """By profile where there is one, else as measured, else 50 ms a step."""
        profiled = _profiled_decode(self._running.current, cluster)
        if profiled is not None:
            return profiled
        gaps = [
            gap
            for i in cluster.instances
            if (gap := self._engines[i.name].token_gap_s) is not None and gap > 0
        ]
        step_s = sum(gaps) / len(gaps) if gaps else DEFAULT_STEP_S
        return DecodeFacts(decode_slots(self._running.current, cluster), step_s)

    @property
    def output_tokens(self) -> float:
        """Mean length of the answers of the last minute; 512 before enough have ended."""
        weighed = [
            (meter.output_tokens or 0.0, meter.outputs)
            for name, meter in self._engines.items()
            if self._cluster_state.instance(name).decodes
        ]
        outputs = sum(count for _, count in weighed)
        if outputs < _ENOUGH_OUTPUTS:
            return DEFAULT_OUTPUT_TOKENS
        return max(sum(mean * count for mean, count in weighed) / outputs, 1.0)

    def _link_bytes(self, source: str, target: str) -> "OfLength | None":
        deployment = self._running.current
        if self._sent_of is not deployment:
            # Once per file: it takes some work, and may warn.
            self._sent_of = deployment
            self._sent = {
                (link.source, link.target): KvSize(model)
                for link in deployment.links
                if (model := sent_model(deployment, link.source, link.target)) is not None
            }
        return self._sent.get((source, target))

    def _cluster(self, cluster: Cluster) -> ClusterFacts:
        views = self._cluster_state.view.clusters[cluster.name].instances
        instances = sum(each.available for each in views)
        curve = self._curves[cluster.name].usual
        facts = ClusterFacts(cluster.name, cluster.kind, instances, curve)
        if cluster.kind == "prfaas":
            return facts
        decode = self.decode(cluster)
        return replace(
            facts,
            decode_batch=decode.batch,
            decode_step_s=decode.step_s,
            group_ranks=group_ranks(views),
        )


class KvShape:
    """The KVCache of a model of which nobody has written what its layers keep: its engines tell it while they run.

    Routing and planning count in it, in the most of any of them. Until the first one has told, the model counts for the
    largest published one, and for a hybrid.
    """

    def __init__(
        self,
        running: RunningDeployment,
        state: ClusterState,
        facts: LiveFacts,
        prefixes: PrefixKnowledge,
        *,
        is_known: bool,
    ) -> None:
        """`is_known`: the model's own file says it, so nothing that engines tell is taken."""
        self._running = running
        self._state = state
        self._facts = facts
        self._prefixes = prefixes
        self._is_known = is_known
        self.model: KvModel | None = None
        """As told; None: not yet, or there is no need."""

    def learn_stats(self, name: str, stats: Mapping[str, Any]) -> None:
        """Take what a rank of an engine answers."""
        instance = next((each for each in self._running.current.instances if each.name == name), None)
        if self._is_known or instance is None:
            return
        try:
            told = read_told_layers(
                stats.get("kv_layers"), self._running.current.model.served_name, instance.rank_grid.tensor
            )
        except ValueError as error:
            logger.debug("%s does not tell what it keeps: %s", name, error)
            return
        if self.model is not None and told.compared_bytes() <= self.model.compared_bytes():
            return
        self.model = told
        logger.info("%s tells what it keeps: %s", name, told.describe())
        pages = [each.page_tokens for each in told.groups if isinstance(each, CompressedAttention)]
        self._state.view.kv = kv_facts(told, max(pages, default=1))
        self._facts.learn_model(told)
        self._prefixes.learn_model(told)
