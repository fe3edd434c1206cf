"""How an instance changes its role without losing or slowing a request: it drains, then it gets the new role."""

from dataclasses import dataclass
from typing import Literal

from prfaas.core.deployment import Role
from prfaas.core.scheduling.view import InstanceView

DRAIN_LIMIT_S = 60.0
"""After so long an instance has its new role, even if old work is still there."""
DRAIN_CHECK_S = 0.25
"""How often a drain should be looked at."""

DrainResult = Literal["done", "done-with-old-work", "abandoned"]
"""How a drain ended: the old work is done; it took too long, and both kinds of work are there for a while; the
instance failed and keeps its role."""


@dataclass(frozen=True, slots=True)
class RoleDrain:
    """One instance that finishes its old work and gets nothing new."""

    instance: InstanceView
    to_role: Role
    since_s: float

    @classmethod
    def begin(cls, instance: InstanceView, to_role: Role, now_s: float) -> "RoleDrain":
        """Let nothing new go to `instance`: it is draining from now on."""
        instance.draining = True
        return cls(instance, to_role, now_s)

    def conclude(self, now_s: float) -> DrainResult | None:
        """End the drain if it is over; None if it is not. The caller gives the role, unless it was abandoned."""
        if not self.instance.healthy:
            result: DrainResult = "abandoned"
        elif self.instance.in_flight == 0:
            result = "done"
        elif now_s - self.since_s >= DRAIN_LIMIT_S:
            result = "done-with-old-work"
        else:
            return None
        self.instance.draining = False
        return result
