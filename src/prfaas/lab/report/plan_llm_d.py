"""A plan as values for llm-d, for those who keep its router."""

import math

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Plan

_DECIDER = "prefix-based-pd-decider"


def llm_d_values(deployment: PlannedDeployment, plan: Plan) -> str:
    """YAML documents: replicas of each cluster's prefill and decode pods, then the router's plugins.

    Names are those of llm-d 0.9: `replicas` of the Deployments, and `nonCachedTokens` of the decider. That sends a
    prompt to a prefill pod if more of its tokens than this are not cached.

    Args:
        deployment: What was planned: one PD cluster, and one PrfaaS cluster or none.
        plan: The planner's answer for it.

    Raises:
        ValueError: there are more clusters; that decider has one threshold.
    """
    pds, prfaases = deployment.pd_clusters, deployment.prfaas_clusters
    if len(pds) != 1 or len(prfaases) > 1:
        raise ValueError(
            f"{deployment.name} has {len(pds)} PD and {len(prfaases)} PrfaaS clusters, and llm-d's decider has one "
            "threshold; plan one PD cluster with one PrfaaS cluster at most"
        )
    point = plan.optimum
    threshold_tokens = point.threshold_tokens if point.offloaded_fraction > 0 else None
    head = _comment(
        f"{deployment.name}, planned by prfaas: at most {point.lambda_max:.4g} requests/s.",
        "Values for llm-d 0.9: a document for each cluster's model servers, and one for the router.",
    )
    documents = [head]
    for cluster in prfaases:
        why = (
            "they take prompts over the threshold" if threshold_tokens else "no prompt is worth its way there"
        )
        told = _comment(
            f"Cluster {cluster.name} ({cluster.gpus_per_instance} {cluster.hardware} a pod): {why}."
        )
        documents.append(told + _replicas(cluster.instance_count if threshold_tokens else 0, 0))
    for cluster in pds:
        told = _comment(f"Cluster {cluster.name} ({cluster.gpus_per_instance} {cluster.hardware} a pod).")
        if threshold_tokens:
            told += _comment(
                "prfaas has this cluster's prefill pods prefill what is not over the threshold. llm-d has decode",
                f"pods do that: there, make all {point.n_prefill + point.n_decode} decode pods. The plan's throughput",
                "does not count for that.",
            )
        documents.append(told + _replicas(point.n_prefill, point.n_decode))
    return "---\n".join([*documents, _router(threshold_tokens)])


def _router(threshold_tokens: float | None) -> str:
    told = (
        "Prompts with more uncached tokens than this go to prefill pods."
        if threshold_tokens
        else "0: every prompt goes to prefill pods."
    )
    return (
        _comment("For the plugins of the router's EndpointPickerConfig.", told)
        + "plugins:\n"
        + f"- type: {_DECIDER}\n"
        + "  parameters:\n"
        + f"    nonCachedTokens: {math.floor(threshold_tokens or 0)}\n"
        + "- type: disagg-profile-handler\n"
        + "  parameters:\n"
        + "    deciders:\n"
        + f"      prefill: {_DECIDER}\n"
    )


def _replicas(prefill: int, decode: int) -> str:
    return f"prefill:\n  replicas: {prefill}\ndecode:\n  replicas: {decode}\n"


def _comment(*lines: str) -> str:
    return "".join(f"# {line}\n" for line in lines)
