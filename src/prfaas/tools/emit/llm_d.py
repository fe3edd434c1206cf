"""A plan as values for llm-d, for those who keep its router."""

from typing import TYPE_CHECKING

from prfaas.core.deployment import PlannedDeployment
from prfaas.tools.emit.template import rendered

if TYPE_CHECKING:
    # Its packages are an extra's, and other files are emitted without them.
    from prfaas.core.planner import Plan


def llm_d_values(deployment: PlannedDeployment, plan: "Plan") -> str:
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
    return rendered(
        "llm-d.yaml.jinja", deployment=deployment, point=point, threshold_tokens=threshold_tokens or 0
    )
