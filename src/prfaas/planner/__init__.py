"""Steady state: what a deployment can do, the best split of its roles and requests, and what limits it."""

from prfaas.planner.errors import PlanError
from prfaas.planner.kv_size import KvSize
from prfaas.planner.plan import Baseline, Cost, Plan, ShadowPrice, TtftEstimate
from prfaas.planner.plan_problem import PdCluster, PlanLink, PlanProblem, PrfaasCluster
from prfaas.planner.planning import best_operation, make_plan
from prfaas.planner.point import LinkUse, OperatingPoint, Roles, RouteUse, ServiceModel, Stage
from prfaas.planner.problem import problem_of
from prfaas.planner.sizing import Egress, egress

__all__ = [
    "Baseline",
    "Cost",
    "Egress",
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
    "best_operation",
    "egress",
    "make_plan",
    "problem_of",
]
