"""One request on its way through the simulated deployment."""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prfaas.scheduling import Decision
    from prfaas.simulator.engine import Engine
    from prfaas.simulator.lane import Lane
    from prfaas.simulator.link import Transfer


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
