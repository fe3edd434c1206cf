"""Pure decisions: a request and a view of the deployment in, a decision out. No clock, no I/O."""

from prfaas.core.scheduling.checked_policy import CheckedPolicy
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
from prfaas.core.scheduling.options import PrefillOption, options
from prfaas.core.scheduling.parameters import Bounds, Parameter, PolicyError, Setting, parameters_of
from prfaas.core.scheduling.policy import (
    POLICIES,
    Policy,
    known_policies,
    make_policy,
    policy_class,
    policy_named,
)
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
    "Bounds",
    "CacheTransfer",
    "CheckedPolicy",
    "ClusterKind",
    "ClusterView",
    "Decision",
    "HitTokens",
    "InstanceView",
    "KvFacts",
    "LinkView",
    "NoDecodeInstanceError",
    "Parameter",
    "Policy",
    "PolicyError",
    "PoolCopy",
    "PoolHit",
    "PoolView",
    "PrefillOption",
    "PrefixHit",
    "Route",
    "RoutingRequest",
    "Setting",
    "View",
    "known_policies",
    "make_policy",
    "options",
    "parameters_of",
    "policy_class",
    "policy_named",
    "with_pools",
]
