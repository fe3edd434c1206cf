"""What the scheduler side of the connector tells the worker side at every step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from prfaas.serving.transport.ticket import Ticket


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks [first_block, first_block + len(block_ids)) of one KV cache group of a request."""

    group: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """What one prefill chunk completes of a request that this engine prefills for another.

    `streamed` runs (full attention) go out layer by layer while the chunk is computed; `closing` runs
    (linear state, sliding window) after the last chunk, together with the end mark, when `final`.
    """

    request_id: str
    ticket: Ticket
    sealed: str
    streamed: tuple[BlockRun, ...]
    closing: tuple[BlockRun, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A decode request whose KV of tokens [local_tokens, ticket.num_tokens) comes out of staging."""

    request_id: str
    ticket: Ticket
    local_tokens: int
    runs: tuple[BlockRun, ...]


@dataclass(slots=True)
class TransferMetadata(KVConnectorMetadata):
    """One step's orders.

    `preempted`: producing requests whose blocks are about to be reused. `held`: finished requests whose
    blocks wait for our `finished_sending`, with True where the prefill was aborted. `drops`: transfers
    that no request here will take, with the reason.
    """

    sends: list[Send] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    held: dict[str, bool] = field(default_factory=dict)
    drops: list[tuple[bytes, str]] = field(default_factory=list)
