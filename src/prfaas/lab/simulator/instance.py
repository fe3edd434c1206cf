"""One simulated instance: its place on the board, its prefill queue, its decode batch.

One request on its way through the simulated deployment.
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from prfaas.core.scheduling import ClusterView, InstanceView
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.lab.simulator.token_clock import TokenClock

if TYPE_CHECKING:
    from prfaas.core.scheduling import Decision
    from prfaas.lab.simulator.link import Transfer
    from prfaas.lab.simulator.link_view import Lane


class Stage(IntEnum):
    """What a job waits for: its prefix to come, its instance, any instance of its cluster, the end of its prefill,
    the rest of its KV, the end of its answer."""

    MOVING = 0
    QUEUED = 1
    POOLED = 2
    PREFILLING = 3
    SENDING = 4
    DECODING = 5


_QUEUED = Stage.QUEUED  # reading a member of an enum takes as long as a function call


class Job:
    """One attempt to serve a request. `number` counts arrivals, from 0.

    `tokens`: what must be in the KV cache before decoding; more than the prompt if an answer was cut off.
    `left_tokens`: of the answer. `has_first`: the client has its first token. `service_s`: of the prefill at `engine`.
    `target`: where it decodes. `lane`: between the two, None inside a cluster, with `promised_bytes` promised to it.
    `is_void`: given up; another attempt took its place. `is_lost`: its prefill was, with its instance. `is_sent`: all
    KV has arrived, by a pace that its prefill doesn't keep.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "decision",
        "engine",
        "has_first",
        "is_lost",
        "is_sent",
        "is_void",
        "lane",
        "left_tokens",
        "number",
        "place",
        "prefix_lane",
        "promised_bytes",
        "service_s",
        "stage",
        "target",
        "tokens",
        "transfer",
    )

    decision: "Decision"
    engine: "Engine"
    target: "Engine"
    service_s: float
    place: int

    def __init__(
        self, number: int, arrival_s: float, tokens: int, left_tokens: int, blocks: list[int]
    ) -> None:
        self.number = number
        self.arrival_s = arrival_s
        self.tokens = tokens
        self.left_tokens = left_tokens
        self.blocks = blocks
        self.has_first = False
        self.is_void = self.is_lost = self.is_sent = False
        self.promised_bytes = 0
        self.lane: Lane | None = None
        self.prefix_lane: Lane | None = None
        self.transfer: Transfer | None = None
        self.stage = _QUEUED

    @property
    def is_at_prefill(self) -> bool:
        """Whether it needs its prefill instance: until all KV has left it."""
        return self.stage is not Stage.DECODING and self.stage is not Stage.POOLED


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
