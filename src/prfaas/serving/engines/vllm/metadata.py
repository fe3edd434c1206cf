"""Orders of the connector's scheduler side to its worker side at every step, and the reports that come back."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import Ticket

if TYPE_CHECKING:
    from prfaas.serving.pool.protocol import PageRef


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one KV cache group of a request."""

    group: int
    """Index of the group."""
    first_block: int
    """Index of the first of them in the request's block table."""
    block_ids: tuple[int, ...]
    """Where they lie in the engine's memory."""


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Order to send what one prefill chunk completes of a request that is prefilled for another engine."""

    request_id: str
    ticket: Ticket
    sealed: str
    """The same ticket as the other engine checks it."""
    streamed: tuple[BlockRun, ...]
    """Full attention, and of windows what they hold after the whole prompt: they leave layer by layer meanwhile."""
    closing: tuple[BlockRun, ...]
    """Linear states: they leave layer by layer while the last chunk is computed."""
    final: bool
    """It is the last chunk: the end mark leaves too."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed for this request; None: not told."""
    decodes_on: bool = False
    """The engine decodes the request after its prompt: it writes over states, and gives up what leaves a window."""
    checkpoint_tokens: int = 0
    """What states and windows hold after so many tokens, the chunk's last, leaves as a checkpoint; 0: nothing does."""
    checkpoint: tuple[BlockRun, ...] = ()
    """Where they hold it."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A decode request whose KV comes out of staging."""

    request_id: str
    ticket: Ticket
    local_tokens: int
    """Tokens whose KV the engine holds already."""
    runs: tuple[BlockRun, ...]
    """Blocks to fill, of every group: the KV of tokens [local_tokens, ticket.num_tokens)."""
    usable_tokens: int = 0
    """The transfer broke, and only so many tokens of it are to be loaded; 0: all."""


@dataclass(frozen=True, slots=True)
class NixlRead:
    """A request whose KV vLLM's NIXL connector loads; our part is to tell the gateway what becomes of it."""

    request_id: str
    transfer_id: bytes
    num_tokens: int
    """NIXL brings the KV of tokens [local_tokens, num_tokens)."""
    local_tokens: int
    """Tokens whose KV the engine holds already."""
    expires_at_s: float
    """Unix time at which the producer may give the blocks to others."""
    refused: bool = False
    """Nothing is loaded: the engine computes the prompt."""

    @property
    def loads(self) -> bool:
        """True if there is something to wait for."""
        return not self.refused and self.num_tokens > self.local_tokens


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Consecutive blocks of one KV cache group of a request, and the pool's pages of them."""

    group: int
    """Index of the group."""
    first_block: int
    """Index of the first of them in the request's block table."""
    block_ids: tuple[int, ...]
    """Where they lie in the engine's memory."""
    pages: "tuple[PageRef, ...]"
    """Where they lie in the pool's, one for each block."""

    def cut(self, first: int, end: int | None = None) -> "PoolPages":
        """Some of them: from the one at place `first` to that before `end`, or to the last."""
        return PoolPages(
            self.group, self.first_block + first, self.block_ids[first:end], self.pages[first:end]
        )


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Blocks of a request to fill from the pool."""

    request_id: str
    pin: int
    """Keeps the pages where they are; the scheduler side gives it back when the load has ended."""
    epoch: int
    """Of the daemon's start in which the pages were pinned."""
    parts: tuple[PoolPages, ...]


@dataclass(frozen=True, slots=True)
class PoolStore:
    """Blocks of a request that are complete after this step and go into reserved pages of the pool."""

    request_id: str
    epoch: int
    """Of the daemon's start in which the pages were reserved."""
    parts: tuple[PoolPages, ...]
    urgent: bool
    """Linear states and sliding windows, which vLLM may free after this step: copied before the next one computes."""


@dataclass(slots=True)
class TransferMetadata(KVConnectorMetadata):
    """One step's orders."""

    sends: list[SendOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    pool_loads: list[PoolLoad] = field(default_factory=list)
    pool_stores: list[PoolStore] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests that send or store, and whose blocks are about to be reused."""
    held: dict[str, bool] = field(default_factory=dict)
    """Finished requests whose blocks wait for our `finished_sending`; True: the prefill was aborted.

    They wait for a transfer to another engine, for copies into the pool, or for both.
    """
    drops: list[tuple[bytes, str]] = field(default_factory=list)
    """Transfers that no request here will take, with the reason."""
    is_idle: bool = False
    """Nothing is computed in this step: the engine looks what has become of transfers."""


@dataclass(frozen=True, slots=True)
class PoolLoadTime:
    """Time and bytes of loading one request's pages from the pool."""

    loaded_bytes: int
    """0: the load failed."""
    wait_s: float
    """Of the time, how long it stood still for pages that came from the SSD."""
    copy_s: float
    """How long it copied."""
    elapsed_s: float
    """From the order to its end; other loads may have been before it."""

    def joined(self, other: "PoolLoadTime") -> "PoolLoadTime":
        """Join the times of two ranks, which load at the same time."""
        failed = not self.loaded_bytes or not other.loaded_bytes
        return PoolLoadTime(
            loaded_bytes=0 if failed else self.loaded_bytes + other.loaded_bytes,
            wait_s=max(self.wait_s, other.wait_s),
            copy_s=max(self.copy_s, other.copy_s),
            elapsed_s=max(self.elapsed_s, other.elapsed_s),
        )


CheckpointPlace = tuple[str, int]
"""A request, and after how many of its tokens its last checkpoint was ordered; 0: none was."""


@dataclass(slots=True)
class StepReports(KVConnectorWorkerMetadata):
    """Reports of the worker side at the end of a step: on loads that have ended, and on sends."""

    loads: dict[str, PoolLoadTime] = field(default_factory=dict)
    """What those from the pool took."""
    usable: dict[str, ResumePoints] = field(default_factory=dict)
    """Of those whose transfer broke: after how many tokens the engine can go on with what has come."""
    ready: Counter[CheckpointPlace] = field(default_factory=Counter)
    """How many ranks could send another checkpoint of a request now."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReports":
        """Both ranks' figures."""
        if not isinstance(other, StepReports):
            raise TypeError(f"worker metadata of another connector: {type(other).__name__}")
        joined = dict(self.loads)
        for request_id, time in other.loads.items():
            known = joined.get(request_id)
            joined[request_id] = time if known is None else known.joined(time)
        usable = dict(self.usable)
        for request_id, points in other.usable.items():
            usable[request_id] = usable.get(request_id, points) & points
        return StepReports(joined, usable, self.ready + other.ready)
