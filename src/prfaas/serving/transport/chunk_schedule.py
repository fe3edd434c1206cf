"""The order in which the chunks of one peer's transfers leave. Not thread-safe: the peer queue's lock guards it."""

import heapq
import itertools
from dataclasses import dataclass, field

from prfaas.serving.transport.outgoing import Chunk, OutgoingTransfer, SendPhase

# A tenant with nothing to send counts while it is ahead of the others. From so many on it is looked who does not.
_FORGET_ABOVE = 64
# Smaller chunks would cost more than an even share of the last bytes gains.
_MIN_SHARE_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class _Flow:
    """What one tenant has to send in one class."""

    weight: int
    start: float = 0.0
    """Virtual time at which its next chunk starts: its bytes over its weight, so far."""
    active: bool = False
    """It has an entry among those that have something to send."""
    transfers: "list[tuple[tuple[int, float, int], OutgoingTransfer]]" = field(default_factory=list)
    """A heap by place. A transfer's place only moves forward: behind its newest entry it may have an older one."""

    def first(self) -> OutgoingTransfer | None:
        """The transfer whose turn it is; None: it has nothing to send."""
        while self.transfers:
            place, transfer = self.transfers[0]
            if transfer.queued:
                return transfer
            heapq.heappop(self.transfers)
            if transfer.listed_at == place:
                transfer.listed_at = None
        return None


class _FairQueue:
    """Transfers of one class, fair between tenants.

    Start-time fair queueing (P. Goyal, H. Vin and H. Cheng, "Start-time fair queuing", SIGCOMM 1996). Whoever has sent
    least for its weight is next. What two tenants with something to send get over any time, each divided by its weight,
    differs by one chunk of each at most. A tenant that comes back starts where the others are, so it owes nothing and
    is owed nothing.
    """

    def __init__(self) -> None:
        self._flows: dict[bytes, _Flow] = {}
        self._active: list[tuple[float, int, _Flow]] = []
        self._number = itertools.count()
        self._virtual = 0.0

    def add(self, transfer: OutgoingTransfer) -> None:
        flow = self._flows.setdefault(transfer.service.tenant, _Flow(transfer.service.weight))
        flow.weight = transfer.service.weight
        transfer.listed_at = transfer.place
        heapq.heappush(flow.transfers, (transfer.place, transfer))
        if not flow.active:
            flow.active = True
            flow.start = max(flow.start, self._virtual)
            heapq.heappush(self._active, (flow.start, next(self._number), flow))

    def take(self, nbytes: int, sharing: int) -> Chunk | None:
        while self._active:
            _, number, flow = self._active[0]
            transfer = flow.first()
            if transfer is None:
                heapq.heappop(self._active)
                flow.active = False
                continue
            unacked_bytes = transfer.put_bytes - transfer.acked_bytes
            chunk = transfer.queued[0].cut(min(nbytes, max(_MIN_SHARE_BYTES, unacked_bytes // sharing)))
            if chunk is transfer.queued[0]:
                heapq.heappop(transfer.queued)
            self._virtual = flow.start
            flow.start += chunk.nbytes / flow.weight
            heapq.heapreplace(self._active, (flow.start, number, flow))
            if len(self._flows) > _FORGET_ABOVE + 2 * len(self._active):
                self._forget()
            return chunk
        self._flows.clear()
        self._virtual = 0.0
        return None

    def _forget(self) -> None:
        self._flows = {
            tenant: flow for tenant, flow in self._flows.items() if flow.active or flow.start > self._virtual
        }


class ChunkSchedule:
    """Chunks that may leave now; O(log n) each.

    1. Transfers in the background leave when no other has anything to send.
    2. Tenants share by their weights.
    3. Of one tenant, a transfer whose prefill has ended leaves before one whose prefill goes on: its request waits for
       nothing else. Those that have ended leave by when they are due (`OutgoingTransfer.ends`), the others in the order
       in which they were opened, which is that of their prefills.
    4. Of one transfer, urgent chunks leave first, then in the order of `put`.
    """

    def __init__(self) -> None:
        self._foreground = _FairQueue()
        self._background = _FairQueue()

    def add(self, chunk: Chunk) -> None:
        """A chunk is to leave: a new one, or one that is sent again."""
        transfer = chunk.transfer
        heapq.heappush(transfer.queued, chunk)
        self.place(transfer)

    def place(self, transfer: OutgoingTransfer) -> None:
        """The consumer has accepted it, it has something to send, or its place has changed."""
        if transfer.queued and transfer.phase is SendPhase.SENDING and transfer.listed_at != transfer.place:
            (self._background if transfer.service.background else self._foreground).add(transfer)

    def take(self, nbytes: int, sharing: int = 1) -> Chunk | None:
        """The next chunk of at most `nbytes`, or one that is sent again as it was; None: nothing waits.

        `sharing`: so many connections take chunks. What is left of a transfer is cut so that each has a share.
        """
        return self._foreground.take(nbytes, sharing) or self._background.take(nbytes, sharing)
