"""What the scheduler side of the connector tells the worker side at every step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from prfaas.serving.transport.ticket import Ticket


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
    """What one prefill chunk completes of a request that this engine prefills for another."""

    request_id: str
    ticket: Ticket
    sealed: str
    """The same ticket as the other engine checks it."""
    streamed: tuple[BlockRun, ...]
    """Full attention: they leave layer by layer while the chunk is computed."""
    closing: tuple[BlockRun, ...]
    """Linear state and sliding windows: they leave layer by layer while the last chunk is computed."""
    final: bool
    """It is the last chunk: the end mark leaves too."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed for this request; None: not told."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A decode request whose KV comes out of staging."""

    request_id: str
    ticket: Ticket
    local_tokens: int
    """Tokens whose KV the engine holds already."""
    runs: tuple[BlockRun, ...]
    """Blocks to fill, of every group: the KV of tokens [local_tokens, ticket.num_tokens)."""


@dataclass(slots=True)
class TransferMetadata(KVConnectorMetadata):
    """One step's orders."""

    sends: list[SendOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Producing requests whose blocks are about to be reused."""
    held: dict[str, bool] = field(default_factory=dict)
    """Finished requests whose blocks wait for our `finished_sending`; True: the prefill was aborted."""
    drops: list[tuple[bytes, str]] = field(default_factory=list)
    """Transfers that no request here will take, with the reason."""
