"""One simulated instance: its place on the board, its prefill queue, its decode batch."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from prfaas.scheduling import ClusterView, InstanceView
from prfaas.scheduling.prefill_pool import PrefillPool
from prfaas.simulator.token_clock import TokenClock

if TYPE_CHECKING:
    from prfaas.simulator.job import Job


class Engine:
    """`at_work`: prefills that have begun, done at `free_at_s`; at most `prefill_slots`, which share the instance's
    time evenly by `sharing` (None where there is only one). `queue` waits in the order of arrival; `waiting_s`:
    seconds of work that only this instance may do and that hasn't begun. `pool`: what any of its cluster may do.

    `clock` and `step_s` (seconds of a step over the batch) of instances that can decode. `prefilled_s`: seconds of
    prefill begun so far.
    """

    __slots__ = (
        "at_work",
        "clock",
        "cluster",
        "free_at_s",
        "name",
        "pool",
        "prefill_s",
        "prefill_slots",
        "prefilled_s",
        "queue",
        "sharing",
        "step_s",
        "view",
        "waiting_s",
    )

    def __init__(
        self,
        view: InstanceView,
        cluster: ClusterView,
        pool: "PrefillPool[Job]",
        clock: TokenClock | None,
        step_s: Callable[[int], float] | None,
        prefill_slots: int = 1,
        sharing: TokenClock | None = None,
    ) -> None:
        self.view = view
        self.name = view.name
        self.cluster = cluster
        self.prefill_s = cluster.prefill_s
        self.pool = pool
        self.clock = clock
        self.step_s = step_s
        self.queue: deque[Job] = deque()
        self.prefill_slots = prefill_slots
        self.sharing = sharing
        self.at_work = 0
        self.free_at_s = 0.0
        self.waiting_s = 0.0
        self.prefilled_s = 0.0

    def accept(self, service_s: float, now_s: float) -> None:
        """Work that will wait here."""
        self.waiting_s += service_s
        busy_until_s = self.view.busy_until_s
        self.view.busy_until_s = (busy_until_s if busy_until_s > now_s else now_s) + service_s

    def withdraw(self, service_s: float, now_s: float) -> None:
        """Work that waited here won't be done."""
        self.waiting_s = max(self.waiting_s - service_s, 0.0)
        self.view.busy_until_s = max(self.view.busy_until_s - service_s, now_s)

    def busy_s(self, now_s: float) -> float:
        """Seconds of prefill done so far."""
        return self.prefilled_s - max(self.free_at_s - now_s, 0.0) if self.at_work else self.prefilled_s
