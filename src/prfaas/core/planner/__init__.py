"""Steady state: what a deployment can do, the best split of its roles and requests, and what limits it."""

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
