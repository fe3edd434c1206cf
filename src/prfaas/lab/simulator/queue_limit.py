"""The longest wait that a simulated gateway lets a request in for."""

import math

from prfaas.core.scheduling import Decision, View
from prfaas.core.scheduling.decoders import slot_free_s
from prfaas.core.scheduling.waits import work_wait_s
from prfaas.lab.simulator.instance import Engine


class QueueLimit:
    """Says which requests are refused as they come, as `gateway.limits.queue_s` does live.

    Live the wait for a decode slot is that of the engine's seats; here it is that of the slots which keep the SLO, for
    no more decode here.
    """

    __slots__ = ("_limit_s", "_view")

    def __init__(self, limit_s: float, view: View) -> None:
        """`limit_s`: seconds that a request may wait for its prefill, its link or its decode slot."""
        self._limit_s = limit_s
        self._view = view

    @classmethod
    def of(cls, limit_s: float, view: View) -> "QueueLimit | None":
        """None where any wait is let in."""
        return cls(limit_s, view) if limit_s < math.inf else None

    def refuses(self, decision: Decision, engine: Engine, target: Engine) -> bool:
        """Whether a request would wait longer where `decision` puts it.

        Args:
            decision: Of the policy.
            engine: That it prefills on.
            target: That it decodes on.
        """
        view = self._view
        link = view.links.get((engine.cluster.name, target.cluster.name))
        work_s = work_wait_s(decision, engine.view, engine.cluster, link, view.now_s)
        return max(work_s, slot_free_s(target.view, target.cluster.slot_s)) > self._limit_s
