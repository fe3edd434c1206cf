"""Steady state: what a deployment can do, the best split of its roles and requests, and what limits it.

Which function answers which question:

| question | function |
|---|---|
| What can it do, what limits it, is it worth it? | `make_plan` |
| Its best roles and routes alone, within the TTFT target if there is one? | `best_operation` |
| The same with its waits at any rate? | `ttft_target.best_within_target` |
| What is left when something is gone, and what would keep all? | `survival.losses`, `survival.reserve_for` |
| With these roles, which rate do the best routes carry? | `fixed_roles.rate_with_roles` |
| With these roles and this threshold? | `two_clusters.evaluate` |
| Which thresholds and roles are best for a running deployment? | `fixed_roles.prefill_sides`, `best_roles` |

A stage's time is E[T(L)], which is what queues feel; plans can be asked for the paper's T(E[L]) as well.
"""

from prfaas.core.planner.comparisons import Baseline, ShadowPrice
from prfaas.core.planner.cost import Cost
from prfaas.core.planner.equations import KvSize, egress
from prfaas.core.planner.from_deployment import problem_of, problem_of_trace, range_tokens
from prfaas.core.planner.operating_point import LinkUse, OperatingPoint, Roles, RouteUse, ServiceModel, Stage
from prfaas.core.planner.plan import Plan, best_operation, make_plan
from prfaas.core.planner.problem import (
    PdCluster,
    PlanError,
    PlanLink,
    PlanProblem,
    PrfaasCluster,
    TtftTarget,
)
from prfaas.core.planner.ttft import TtftEstimate

__all__ = [
    "Baseline",
    "Cost",
    "KvSize",
    "LinkUse",
    "OperatingPoint",
    "PdCluster",
    "Plan",
    "PlanError",
    "PlanLink",
    "PlanProblem",
    "PrfaasCluster",
    "Roles",
    "RouteUse",
    "ServiceModel",
    "ShadowPrice",
    "Stage",
    "TtftEstimate",
    "TtftTarget",
    "best_operation",
    "egress",
    "make_plan",
    "problem_of",
    "problem_of_trace",
    "range_tokens",
]
