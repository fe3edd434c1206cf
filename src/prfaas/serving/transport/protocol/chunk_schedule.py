"""Order in which the chunks of one peer's transfers leave."""

import heapq
import itertools
from dataclasses import dataclass, field

from prfaas.serving.transport.protocol.outgoing import Chunk, OutgoingTransfer, SendPhase

# An idle tenant is remembered while it is ahead of the others. Above this many tenants the rest are dropped.
_FORGET_ABOVE = 64
# Smaller chunks would cost more than an even share of the last bytes gains.
_MIN_SHARE_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class _Flow:
    """Transfers of one tenant in one class."""

    weight: int
    start: float = 0.0
    """Virtual time at which its next chunk starts: its bytes over its weight, so far."""
    active: bool = False
    """It has an entry among those that have something to send."""
    transfers: "list[tuple[tuple[int, float, int], OutgoingTransfer]]" = field(default_factory=list)
    """A heap by place. A transfer's place only moves forward: behind its newest entry it may have an older one."""

    def first(self) -> OutgoingTransfer | None:
        """The next transfer with something to send; None: there is none."""
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

    Start-time fair queueing (P. Goyal, H. Vin and H. Cheng, "Start-time fair queuing", SIGCOMM 1996). The tenant
    that has sent least for its weight is next. Over any time, what two busy tenants get for their weights differs by at
    most one chunk of each. A tenant that comes back starts where the others are, so it neither owes nor is owed.
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
    3. Within a tenant, transfers whose prefill has ended leave first, since their requests wait for nothing else, in
       the order in which they are due (`OutgoingTransfer.ends`). The others leave in the order of opening.
    4. Within a transfer, urgent chunks leave first, then in the order of `put`.
    """

    def __init__(self) -> None:
        self._foreground = _FairQueue()
        self._background = _FairQueue()

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk: a new one, or one to be sent again."""
        transfer = chunk.transfer
        heapq.heappush(transfer.queued, chunk)
        self.place(transfer)

    def place(self, transfer: OutgoingTransfer) -> None:
        """List a transfer that was accepted, has something to send, or has a new place."""
        if transfer.queued and transfer.phase is SendPhase.SENDING and transfer.listed_at != transfer.place:
            (self._background if transfer.service.background else self._foreground).add(transfer)

    def take(self, nbytes: int, sharing: int = 1) -> Chunk | None:
        """The next chunk, of at most `nbytes` unless it is sent again as it was; None: nothing waits.

        `sharing`: the number of connections that take chunks. The last bytes of a transfer are cut into shares for all.
        """
        return self._foreground.take(nbytes, sharing) or self._background.take(nbytes, sharing)
