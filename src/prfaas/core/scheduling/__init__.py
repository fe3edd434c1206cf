"""Pure decisions: a request and a view of the deployment in, a decision out. No clock, no I/O."""

from prfaas.core.scheduling.decision import (
    NOTHING,
    CacheTransfer,
    Decision,
    HitTokens,
    KvFacts,
    PoolCopy,
    PoolHit,
    PrefixHit,
    Route,
    RoutingRequest,
)
from prfaas.core.scheduling.link_choice import AbundanceMarks
from prfaas.core.scheduling.policy import POLICIES, Policy, policy_named
from prfaas.core.scheduling.tiers import with_pools
from prfaas.core.scheduling.view import (
    ClusterKind,
    ClusterView,
    InstanceView,
    LinkView,
    NoDecodeInstanceError,
    PoolView,
    View,
)

__all__ = [
    "NOTHING",
    "POLICIES",
    "AbundanceMarks",
    "CacheTransfer",
    "ClusterKind",
    "ClusterView",
    "Decision",
    "HitTokens",
    "InstanceView",
    "KvFacts",
    "LinkView",
    "NoDecodeInstanceError",
    "Policy",
    "PoolCopy",
    "PoolHit",
    "PoolView",
    "PrefixHit",
    "Route",
    "RoutingRequest",
    "View",
    "policy_named",
    "with_pools",
]
