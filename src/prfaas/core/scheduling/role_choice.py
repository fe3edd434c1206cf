"""What is predicted for the roles that could be chosen, and the best of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.core.deployment import Role
from prfaas.core.planner import PlanError, PlanProblem
from prfaas.core.planner.role_latency import QueueingModel, RoleLatency, latency_of_work, latency_with_roles
from prfaas.core.planner.role_works import works_with_prefill

# A TTFT counts as this many times its prefill at most, so that a stage that is full for a moment can be forgotten.
_MOST_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """What arrives while the roles are those that are chosen now."""

    requests_per_s: float
    queues: QueueingModel = field(default_factory=QueueingModel)
    is_forecast: bool = False
    """Whether it is a forecast, not what was measured."""


@dataclass(frozen=True, slots=True)
class RoleOutlook:
    """What an evaluation of the roles found."""

    aim: Literal["latency", "throughput"]
    """Throughput where the expected traffic is more than any roles can carry with a margin, or is not known."""
    now: RoleLatency | None = None
    """Predicted with the roles as they are."""
    best: RoleLatency | None = None
    """Of those that were looked at, the eligible roles with the shortest TTFT; None without any."""
    is_forecast: bool = False


def latency_of(problem: PlanProblem, roles: Mapping[str, int], expected: ExpectedLoad) -> RoleLatency:
    """What is predicted for these roles; an infinite wait where no request gets through."""
    try:
        return latency_with_roles(problem, roles, expected.requests_per_s, expected.queues)
    except PlanError:
        return RoleLatency(roles, expected.requests_per_s, math.inf, 0.0, math.inf, decode_wait_s=math.inf)


def latencies_of(
    problem: PlanProblem, options: Sequence[Mapping[str, int]], expected: ExpectedLoad
) -> list[RoleLatency]:
    """`latency_of` each of these roles. What they have in common is worked out once."""
    if not problem.is_two_cluster:
        return [latency_of(problem, roles, expected) for roles in options]
    name = problem.pd[0].name
    works = works_with_prefill(problem, [roles[name] for roles in options])
    return [
        latency_of_work(problem, roles, expected.requests_per_s, expected.queues, works[roles[name]])
        for roles in options
    ]


@dataclass(frozen=True, slots=True)
class RolePrediction:
    """What is predicted for some roles: now, or on average of late."""

    latency: RoleLatency
    """Now."""
    ttft_s: float
    utilisation: float
    count: int = 1
    """Evaluations in the average."""

    @classmethod
    def of(cls, latency: RoleLatency) -> "RolePrediction":
        return cls(latency, min(latency.ttft_s, _MOST_WAIT * latency.prefill_s), latency.utilisation)

    def after(self, before: "RolePrediction | None", memory: int) -> "RolePrediction":
        """The average over this one and those before, the last `memory` of them above all."""
        if before is None:
            return self
        count = min(before.count + 1, memory)
        part = 1 / count
        ttft_s = before.ttft_s + part * (self.ttft_s - before.ttft_s)
        utilisation = before.utilisation + part * (self.utilisation - before.utilisation)
        if not math.isfinite(utilisation):
            utilisation = self.utilisation
        return RolePrediction(self.latency, ttft_s, utilisation, count)


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """The present roles and the best of those that are eligible; None without any."""

    now: RolePrediction
    best: RolePrediction | None
    is_short: bool
    """Whether the present roles are short of twice the reserve."""

    @property
    def gain(self) -> float:
        """The part of the TTFT that the best roles spare."""
        return 0.0 if self.best is None else 1 - self.best.ttft_s / self.now.ttft_s

    def role(self, cluster: str) -> Role | None:
        """Where an instance of this cluster should go."""
        if self.best is None:
            return None
        missing = self.best.latency.prefill[cluster] - self.now.latency.prefill[cluster]
        return None if missing == 0 else "prefill" if missing > 0 else "decode"

    def missing(self, cluster: str) -> int:
        """How many instances of this cluster should go there."""
        if self.best is None:
            return 0
        return abs(self.best.latency.prefill[cluster] - self.now.latency.prefill[cluster])
