"""The connector inside vLLM's scheduler: which blocks leave with each prefill chunk, which are to be loaded."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.kv.groups import GroupKind, KvGroup, checkpoint_step_tokens
from prfaas.core.link.checkpoints import is_checkpoint_due
from prfaas.core.prefix.hashing import MediaItem
from prfaas.serving.engines.vllm.metadata import (
    BlockRun,
    LoadOrder,
    SendOrder,
    StepReports,
    TransferMetadata,
)
from prfaas.serving.engines.vllm.pool_scheduler import PoolScheduler
from prfaas.serving.transport.protocol.ticket import (
    KEPT_PARAMETER,
    PREFIX_TICKET_PARAMETER,
    TICKET_PARAMETER,
    Ticket,
    TicketError,
    prompt_digest,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

BlockIds = Sequence[Sequence[int]]


@dataclass(slots=True)
class ProducingRequest:
    """A request that this engine prefills for another one."""

    request: "Request"
    ticket: Ticket
    sealed: str
    """The same ticket as the other engine checks it."""
    sent_blocks: dict[int, int]
    """Index of the first unsent block of each group of attention or windows, by the group's index.

    It only grows: after a preemption the chunks come again from token 0 with other blocks, and what was sent
    stays sent.
    """
    cached_tokens: int = 0
    """Tokens that its first chunk found computed: the engine's own hit, and a prefix that was moved here."""
    started: bool = False
    """Some chunk was ordered to be sent."""
    ended: bool = False
    """The last chunk was."""
    checkpoint_tokens: int = 0
    """Where the last checkpoint was ordered; 0: none was."""
    ready_ranks: int = 0
    """So many ranks could have sent another one since, by what they last told."""


@dataclass(slots=True)
class ConsumingRequest:
    """A request whose KV comes by a transfer."""

    ticket: Ticket
    settled: bool = False
    """The load was ordered, or turned out to be impossible."""
    local_tokens: int | None = None
    """The engine's own hit when it was last decided to load the transfer; None: not to."""
    lacked_behind: int = -1
    """With an own hit of so many tokens, the pool lacked what the transfer leaves out."""
    usable_tokens: int = 0
    """The transfer broke, and the KV of so many tokens can still be loaded; 0: it has not broken."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the transfer gives."""
        return self.usable_tokens or self.ticket.num_tokens


class ConnectorScheduler:
    """Callbacks of `KVConnectorBase_V1` that run in the scheduler process.

    A request carries nothing but sealed tickets. Whatever is wrong with one (another engine's, expired,
    another prompt's, forged) makes the request an ordinary local one.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        groups: Sequence[KvGroup],
        pool: PoolScheduler | None = None,
        now_s: Callable[[], float] = time.time,
        *,
        ranks: int = 1,
    ) -> None:
        """
        Args:
            name: the engine's.
            key: seals tickets.
            groups: its KV.
            pool: None where the machine has none.
            now_s: the clock, in Unix time.
            ranks: how many workers the engine has.
        """
        self._name = name
        self._key = key
        self._groups = groups
        # Tokens between places where a checkpoint may be; 0: nowhere.
        self._checkpoint_step = checkpoint_step_tokens(groups) if self._cut_groups() else 0
        self.pool = pool
        self._now_s = now_s
        self._ranks = ranks
        self._producing: dict[str, ProducingRequest] = {}
        self._consuming: dict[str, ConsumingRequest] = {}
        self._orders = TransferMetadata()

    def on_new_request(self, request: "Request") -> None:
        """Read the request's tickets and take the roles that they give this engine: one sends, one loads."""
        # "full" announces cache hits as if they were new blocks; who reaches the engine could ask for it.
        request.kv_cache_report_mode = "incremental"
        if self.pool is not None:
            self.pool.on_new_request(request)
        # No ticket knows what embeddings a prompt has.
        params = request.kv_transfer_params
        if not isinstance(params, dict) or request.prompt_embeds is not None:
            return
        for parameter in (TICKET_PARAMETER, PREFIX_TICKET_PARAMETER):
            sealed = params.get(parameter)
            if isinstance(sealed, str):
                self._take_role(request, sealed)

    def _take_role(self, request: "Request", sealed: str) -> None:
        try:
            ticket = Ticket.unseal(sealed, self._key, self._now_s())
        except TicketError as error:
            logger.warning("request %s prefills locally: %s", request.request_id, error)
            return
        if ticket.producer == self._name:
            self._start_producing(request, ticket, sealed)
        elif ticket.consumer == self._name:
            self._start_consuming(request, ticket)
        else:
            logger.warning(
                "request %s prefills locally: its ticket is for %s and %s, this engine is %s",
                request.request_id,
                ticket.producer,
                ticket.consumer,
                self._name,
            )

    def _start_producing(self, request: "Request", ticket: Ticket, sealed: str) -> None:
        prompt = request.prompt_token_ids
        # A prompt with media comes as its client wrote it, with the last token. What layers hold after exactly so many
        # tokens is lost by then.
        goes_on = bool(request.mm_features) and not self._cut_groups()
        if (
            prompt is None
            or len(prompt) < ticket.num_tokens
            or (len(prompt) > ticket.num_tokens and not goes_on)
            or digest_of(request, prompt[: ticket.num_tokens]) != ticket.prompt_digest
        ):
            logger.warning("request %s: its prompt is not the one of its ticket", request.request_id)
            return
        groups = self._groups_of(GroupKind.FULL, GroupKind.WINDOW)
        sent = {group.index: group.first_block(ticket.num_tokens, ticket.skip_tokens) for group in groups}
        self._producing[request.request_id] = ProducingRequest(request, ticket, sealed, sent)

    def _start_consuming(self, request: "Request", ticket: Ticket) -> None:
        prompt = request.prompt_token_ids
        if (
            prompt is None
            or len(prompt) <= ticket.num_tokens
            or digest_of(request, prompt[: ticket.num_tokens]) != ticket.prompt_digest
        ):
            # vLLM announces a request that it rejected, or that its client left early, once more with the same
            # parameters and another prompt: the staging must not wait for its time to live.
            self._orders.drops.append((ticket.transfer_id, "the decode request has another prompt"))
            return
        self._consuming[request.request_id] = ConsumingRequest(
            ticket, usable_tokens=self._kept_tokens(request, ticket)
        )

    def _kept_tokens(self, request: "Request", ticket: Ticket) -> int:
        """What the gateway says that all ranks have of a transfer that broke; 0: nothing, or what can't be.

        Without it they would learn by a load that fails, and a rank that has all could not go back to what others have.
        """
        tokens = (request.kv_transfer_params or {}).get(KEPT_PARAMETER)
        if type(tokens) is not int or not ticket.skip_tokens < tokens < ticket.num_tokens:
            return 0
        return tokens if tokens % checkpoint_step_tokens(self._groups) == 0 else 0

    def num_external_tokens(self, request: "Request", local_tokens: int) -> int | None:
        """Tokens that staging or the pool add to the local prefix hit.

        Called at every step while the request waits for blocks: nothing is ordered here. Linear state can only be
        continued at the exact length, so a hit that already covers all the ticket's tokens adds nothing.

        Returns:
            0: a local prefill. None: to be asked again at the next step.
        """
        consuming = self._consuming.get(request.request_id)
        if consuming is not None and not consuming.settled:
            if consuming.num_tokens <= local_tokens:
                return 0
            if self._can_load(request, consuming, local_tokens):
                consuming.local_tokens = local_tokens
                return consuming.num_tokens - local_tokens
            consuming.local_tokens = None
        return self.pool.hit_tokens(request, local_tokens) if self.pool is not None else 0

    def _can_load(self, request: "Request", consuming: ConsumingRequest, local_tokens: int) -> bool:
        """Whether the tokens that the transfer leaves out are here: in the engine's blocks, the rest in the pool."""
        skip_tokens = consuming.ticket.skip_tokens
        if local_tokens >= skip_tokens:
            return True
        if self.pool is None or consuming.lacked_behind == local_tokens:
            return False
        if any(skip_tokens % group.block_tokens for group in self._groups_of(GroupKind.FULL)):
            # An engine with other blocks begins inside one of these, and a pool has only whole ones.
            return False
        if self.pool.has_attention(request, local_tokens, skip_tokens):
            return True
        consuming.lacked_behind = local_tokens
        return False

    def update_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Order the load into the blocks that vLLM has just given the request, or give the staging up."""
        consuming = self._consuming.get(request.request_id)
        if consuming is not None and not consuming.settled:
            consuming.settled = True
            ticket, local_tokens = consuming.ticket, consuming.local_tokens
            if external_tokens and local_tokens is not None:
                self._load_transfer(request, blocks, consuming, local_tokens)
                return
            self._orders.drops.append(
                (
                    ticket.transfer_id,
                    f"the decode engine and its pool lack some of the first {ticket.skip_tokens} tokens, "
                    "or the engine holds the whole prompt by itself",
                )
            )
        if self.pool is not None:
            if external_tokens:
                self.pool.load(request, blocks.get_block_ids())
            else:
                self.pool.give_up(request.request_id)

    def update(self, output: "KVConnectorOutput") -> None:
        """Take in what the workers tell.

        Where a load has failed since its transfer broke, vLLM asks for its request again, and is offered what has come.
        """
        reports = output.kv_connector_worker_meta
        if isinstance(reports, StepReports):
            for (request_id, last_tokens), ranks in reports.ready.items():
                producing = self._producing.get(request_id)
                # What was told before the last order came is of no use.
                if producing is not None and producing.checkpoint_tokens == last_tokens:
                    producing.ready_ranks = ranks
            for request_id, usable in reports.usable.items():
                consuming = self._consuming.get(request_id)
                if consuming is not None and usable.tokens:
                    consuming.usable_tokens = min(usable.tokens, consuming.num_tokens)
                    consuming.settled = False

    def _load_transfer(
        self, request: "Request", blocks: "KVCacheBlocks", consuming: ConsumingRequest, local_tokens: int
    ) -> None:
        """Order the load of a transfer, and of what it leaves out and only the pool has."""
        table, ticket = blocks.get_block_ids(), consuming.ticket
        held_tokens = max(local_tokens, ticket.skip_tokens)
        if self.pool is not None:
            if local_tokens < ticket.skip_tokens:
                self.pool.load(request, table)
            self.pool.begin_behind(request, held_tokens)
        runs = self._runs(self._groups, table, consuming.num_tokens, held_tokens)
        order = LoadOrder(request.request_id, ticket, held_tokens, runs, consuming.usable_tokens)
        self._orders.loads.append(order)

    def build_metadata(self, output: "SchedulerOutput") -> TransferMetadata:
        """This step's orders; runs before vLLM advances `num_computed_tokens`."""
        orders, self._orders = self._orders, TransferMetadata()
        orders.is_idle = not output.num_scheduled_tokens
        orders.preempted = [
            request_id
            for request_id in output.preempted_req_ids or ()
            if request_id in self._producing or (self.pool is not None and self.pool.is_storing(request_id))
        ]
        if self.pool is not None:
            orders.pool_loads, orders.pool_stores = self.pool.orders(output)
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            producing = self._producing.get(request_id)
            if producing is None:
                continue
            block_state = output.kv_connector_block_state
            block_ids = block_state.get_block_ids(request_id) if block_state is not None else None
            if block_ids is not None:
                send = self._next_send(producing, scheduled_tokens, block_ids)
                if send is not None:
                    orders.sends.append(send)
        return orders

    def _next_send(
        self, producing: ProducingRequest, scheduled_tokens: int, block_ids: BlockIds
    ) -> SendOrder | None:
        ticket, request = producing.ticket, producing.request
        start_tokens = request.num_computed_tokens
        # One whose cache holds all that moves sends it with its first chunk.
        if producing.ended:
            return None
        end_tokens = start_tokens + scheduled_tokens
        final = end_tokens >= ticket.num_tokens
        if not producing.started:
            producing.cached_tokens = start_tokens
        producing.started, producing.ended = True, final
        streamed = []
        # vLLM frees no block of a window that moves before the prompt's end.
        for group in self._groups_of(GroupKind.FULL, GroupKind.WINDOW):
            end = group.ready_block(ticket.num_tokens, end_tokens)
            first = producing.sent_blocks[group.index]
            if end > first:
                streamed.append(BlockRun(group.index, first, tuple(block_ids[group.index][first:end])))
                producing.sent_blocks[group.index] = end
        states = self._groups_of(GroupKind.STATE) if final else ()
        closing = self._runs(states, block_ids, ticket.num_tokens, 0)
        is_due = not final and self._is_checkpoint_due(producing, end_tokens)
        return SendOrder(
            request.request_id,
            ticket,
            producing.sealed,
            tuple(streamed),
            closing,
            final=final,
            cached_tokens=producing.cached_tokens,
            decodes_on=request.max_tokens > 1,
            checkpoint_tokens=end_tokens if is_due else 0,
            checkpoint=self._runs(self._cut_groups(), block_ids, end_tokens, 0) if is_due else (),
        )

    def _is_checkpoint_due(self, producing: ProducingRequest, end_tokens: int) -> bool:
        """Whether a chunk that is not the last ends where the other engine could go on, and that pays."""
        ticket = producing.ticket
        if not self._checkpoint_step or end_tokens % self._checkpoint_step:
            return False
        last = max(producing.checkpoint_tokens, ticket.skip_tokens)
        is_due = is_checkpoint_due(ticket.attributes.checkpoint_tokens, last, end_tokens, ticket.num_tokens)
        # The other engine goes on from a checkpoint that it has of all ranks. The first one nothing can be in the way
        # of, and a single rank looks for itself.
        needs_ranks = self._ranks if self._ranks > 1 and producing.checkpoint_tokens else 0
        if not is_due or producing.ready_ranks < needs_ranks:
            return False
        producing.checkpoint_tokens, producing.ready_ranks = end_tokens, 0
        return True

    def request_finished(self, request: "Request", *, aborted: bool) -> bool:
        """True where the engine must keep the blocks until the worker side reports the send as finished.

        An aborted prefill's blocks are kept too, until no writer thread reads them any more. Behind the prompt's last
        chunk an abort ends the decoding alone: all KV is computed, and the transfer goes on.
        """
        consuming = self._consuming.pop(request.request_id, None)
        if consuming is not None and not consuming.settled:
            self._orders.drops.append(
                (consuming.ticket.transfer_id, "the decode request ended before its load")
            )
        producing = self._producing.pop(request.request_id, None)
        is_storing = self.pool is not None and self.pool.request_finished(request.request_id)
        if not is_storing and (producing is None or not producing.started):
            return False
        self._orders.held[request.request_id] = aborted and not (producing is not None and producing.ended)
        return True

    def _groups_of(self, *kinds: GroupKind) -> list[KvGroup]:
        return [group for group in self._groups if group.kind in kinds]

    def _cut_groups(self) -> list[KvGroup]:
        """Of which a request needs what they hold after exactly so many tokens."""
        return self._groups_of(GroupKind.STATE, GroupKind.WINDOW)

    @staticmethod
    def _runs(
        groups: Sequence[KvGroup], block_ids: BlockIds, num_tokens: int, skip_tokens: int
    ) -> tuple[BlockRun, ...]:
        runs = []
        for group in groups:
            moving = group.moving_blocks(num_tokens, skip_tokens)
            ids = block_ids[group.index][moving.start : moving.stop]
            runs.append(BlockRun(group.index, moving.start, tuple(ids)))
        return tuple(runs)


def digest_of(request: "Request", prompt: Sequence[int]) -> bytes:
    """The digest of ids of a request's prompt, under its tenant's salt and its adapter."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return prompt_digest(prompt, request.cache_salt or "", adapter, media_of(request))


def media_of(request: "Request") -> list[MediaItem]:
    """The media in a request's prompt, in the order of their offsets."""
    return [
        MediaItem(each.identifier, each.mm_position.offset, each.mm_position.length)
        for each in request.mm_features or ()
    ]
