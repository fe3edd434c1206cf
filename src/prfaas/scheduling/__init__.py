"""Pure decisions: a request and a view of the deployment in, a decision out. No clock, no I/O."""

from prfaas.scheduling.decision import CacheTransfer, Decision, Route
from prfaas.scheduling.links import AbundanceMarks
from prfaas.scheduling.policy import POLICIES, Policy, policy_named
from prfaas.scheduling.request import NOTHING, Held, RoutingRequest
from prfaas.scheduling.view import (
    ClusterKind,
    ClusterView,
    InstanceView,
    KvFacts,
    LinkView,
    NoDecodeInstanceError,
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
    "Held",
    "InstanceView",
    "KvFacts",
    "LinkView",
    "NoDecodeInstanceError",
    "Policy",
    "Route",
    "RoutingRequest",
    "View",
    "policy_named",
]
