"""Parts that make up the control plane, each with a loop, a state of its own, and connections of its own."""

from contextlib import AbstractContextManager
from typing import Any

from prfaas.core.deployment import AppliedDeployment, Instance
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.tasks import LoopFailures

Json = dict[str, Any]


class Part:
    """One part of a control plane. It overrides what it has, and belongs to the plane's event loop.

    Settings are no reason to override `join`, `leave` or `follow`: a part reads them from its `RunningDeployment` when
    it needs them. These are for connections, and for what is kept per instance, link or cluster. When a file is taken
    on, all of it happens in one step of the event loop, in this order: the view gets clusters and links; who is new
    joins the view and every part; every part follows; who has left leaves the parts, last first, and then the view.
    """

    loop_failures = LoopFailures()
    """Its plane's, as soon as that runs."""

    def spared(self, member: str) -> AbstractContextManager[None]:
        """Go on without one member of a round for which it fails."""
        return self.loop_failures.spared(type(self).__name__, member)

    async def run(self) -> None:
        """The part's loop, until cancelled. It ends at once where there is none. If it raises, it is begun again."""

    def join(self, instance: Instance) -> None:
        """An instance takes part from now on; it is in the view already."""

    def leave(self, name: str) -> None:
        """An instance is none any more, and nothing is open there; it is still in the view."""

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """The deployment that runs has moved. Raises where that can't be followed, before anything has changed."""

    async def close(self) -> None:
        """Give back connections, after `run` has ended."""

    def state(self, _now_s: float) -> Json:
        """Its share of `GET /prfaas/state`, by the fields of the whole."""
        return {}

    def state_of(self, _name: str, _now_s: float) -> Json:
        """Its share of one instance or pool there."""
        return {}

    def write_gauges(self, metrics: ControlMetrics, now_s: float) -> None:
        """Set its gauges to what is now."""
