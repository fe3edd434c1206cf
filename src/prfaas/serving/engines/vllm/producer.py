"""The connector inside a prefill worker: KV leaves while the prompt is still being computed."""

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.page_digests import DigestSource
from prfaas.serving.engines.vllm.layout import KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun, CheckpointPlace, SendOrder
from prfaas.serving.engines.vllm.pages import PagedSource
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import WireLayout, WireRegion
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.ticket import part_id

logger = logging.getLogger(__name__)

# A preemption waits that long for chunks that are being sent: about as long as one takes on a paced link.
_RECALL_TIMEOUT_S = 0.05
# Enough to connect over a long path, encrypted. After that a transfer is opened as if the engine were alike: the
# transport says what is wrong with the path.
MEET_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Postponed:
    """The orders of one request, in the order in which they came."""

    consumer: str
    until_s: float
    orders: list[SendOrder]


class PostponedSends:
    """Sends to an engine that has not told yet how it keeps KV: they are laid out once it has.

    Nothing is copied: a request's blocks stay as they are while vLLM leaves them to it.
    """

    def __init__(self, sender: Sender, now_s: Callable[[], float] = time.monotonic) -> None:
        """`sender`: connects. `now_s`: the clock."""
        self._sender = sender
        self._now_s = now_s
        self._waiting: dict[str, _Postponed] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def is_needed(self, send: SendOrder) -> bool:
        """True if the consumer of an order is not met; from then on its request's orders are kept."""
        if send.request_id not in self._waiting:
            consumer = send.ticket.consumer
            if self._sender.meet(consumer):
                return False
            self._waiting[send.request_id] = _Postponed(consumer, self._now_s() + MEET_TIMEOUT_S, [])
        return True

    def add(self, send: SendOrder) -> None:
        """Keep for later what is to be done of a step, at its end."""
        if send.checkpoint_tokens:
            # By then the states are those of another chunk. Where it was ordered is still told.
            send = replace(send, checkpoint=())
        self._waiting[send.request_id].orders.append(send)

    def due(self) -> Iterator[str]:
        """Requests whose orders can be taken, since their consumer is met, or late."""
        return (request_id for request_id in tuple(self._waiting) if self.is_due(request_id))

    def is_due(self, request_id: str) -> bool:
        """True if the orders of one request can be taken; False if nothing of it is kept."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and (
            self._sender.meet(waiting.consumer) or self._now_s() >= waiting.until_s
        )

    def take(self, request_id: str, *, wait: bool = False) -> list[SendOrder]:
        """The orders that are kept of a request. They are kept no more.

        `wait`: first wait for the consumer, as long as it may take.
        """
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return []
        if wait:
            self._sender.meet(waiting.consumer, max(0.0, waiting.until_s - self._now_s()))
        return waiting.orders


@dataclass(slots=True)
class _OpenSend:
    """One outgoing transfer to one rank of a consumer, and the sources that may still read the engine's blocks."""

    transfer: SentTransfer
    wire: WireLayout
    """As it was agreed with that rank when the transfer was opened."""
    first_blocks: Sequence[int]
    """The wire page at which each region begins."""
    kv_bytes: int
    """Of the transfer's regions, without the digests of their pages."""
    digests: DigestSource
    sources: "list[weakref.ref[PagedSource]]" = field(default_factory=list)
    queued_layers: set[str] = field(default_factory=set)
    """Of which all that the running step has completed is in the queue."""
    peer: str = ""
    """To whom it goes."""
    checkpoint: "_OpenSend | None" = None
    """The newest one."""


class KvProducer:
    """Puts finished pages in the transport's queue, layer by layer and chunk by chunk.

    The engine's blocks are the send buffer. vLLM keeps those of a held request until `finished` names it. That
    happens once the other side has everything, or the transfer has failed, or the lease is over, and in each
    case no writer thread reads the blocks any more.
    """

    def __init__(
        self,
        layout: KvLayout,
        wires: PeerLayouts[WireLayout],
        sender: Sender,
        lease_s: float,
        stats: ConnectorStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            layout: of the engine's KV.
            wires: what travels to each consumer.
            sender: sends it.
            lease_s: a finished request keeps its blocks that long at most.
            stats: counts what was sent.
            now_s: the clock.
        """
        self._layout = layout
        self._wires = wires
        self._sender = sender
        self._lease_s = lease_s
        self.stats = stats
        self._now_s = now_s
        # To each rank of the consumer that shares heads with this one.
        self._open_sends: dict[str, tuple[_OpenSend, ...]] = {}
        self._postponed = PostponedSends(sender, now_s)
        self._held_since_s: dict[str, float] = {}
        # Of requests that send checkpoints: after how many tokens the last one was ordered.
        self._checkpoint_tokens: dict[str, int] = {}

    def save_layer(self, sends: Sequence[SendOrder], layer_name: str) -> None:
        """Queue what this step has completed of one attention layer, for every request that sends.

        vLLM calls this for most attention modules, where no graph is replayed whole; a drafter's layer may come several
        times in a step. What does not come leaves in `end_step`. Layers are computed in order: what a last chunk leaves
        in the layers of states and windows before this one is final, on a device in what the compute stream has queued.
        """
        before = self._layout.closing_before.get(layer_name, ())
        for send in sends:
            if not self._is_postponed(send):
                self._queue_layers(send, (*before, layer_name) if send.final else (layer_name,))

    def _is_postponed(self, send: SendOrder) -> bool:
        """Whether it is not known yet what travels to its consumer."""
        if send.request_id in self._open_sends:
            return False
        if self._postponed.is_due(send.request_id):
            self._resume(send.request_id)
            return False
        return self._postponed.is_needed(send)

    def _resume(self, request_id: str, *, wait: bool = False) -> None:
        """Do what was postponed of a request; `wait`: its blocks are about to change."""
        for send in self._postponed.take(request_id, wait=wait):
            self._end_chunk(send)

    def _queue_layers(self, send: SendOrder, layer_names: Iterable[str]) -> None:
        """Queue what the step has completed of some layers, as far as it is not in the queue."""
        try:
            # The first layer of the first chunk opens the request's transfers.
            for open_send in self._open_sends.get(send.request_id) or self._open(send):
                for layer_name in layer_names:
                    if layer_name not in open_send.queued_layers:
                        open_send.queued_layers.add(layer_name)
                        self._queue_layer(send, open_send, (*send.streamed, *send.closing), layer_name)
        except Exception:
            self._abort_unreadable(send)

    def _queue_layer(
        self, send: SendOrder, open_send: _OpenSend, runs: Sequence[BlockRun], layer_name: str
    ) -> None:
        """KV of one layer from the engine's blocks into the queue to a peer; states and windows overtake the rest.

        The way to the wire goes on in a thread of the transport, as soon as a connection is free:
        `SenderConnection._send_chunk`.
        """
        # 1. What this peer gets of the layer.
        ticket = send.ticket
        for region in open_send.wire.regions_of_layer.get(layer_name, ()):
            urgent = region.group.kind is not GroupKind.FULL
            for ordered in runs:
                # 2. The blocks of this layer that the step has completed, as the wire pages that the transfer moves.
                if ordered.group != region.group.index:
                    continue
                run = region.run(ordered, ticket.num_tokens, ticket.skip_tokens)
                if not run.block_ids:
                    continue
                # 3. Their pages as a source. Nothing is copied yet but a page with room behind the prompt, which
                #    the engine may go on filling, and states and windows of a request that it decodes itself; what
                #    is read later is what the compute stream has queued to write until now.
                region.pages.mark_written()
                if urgent and send.decodes_on:
                    sources = _copies(region, run)
                else:
                    is_written_on = not open_send.digests.is_empty or send.decodes_on
                    partial = is_written_on and _ends_partial(send, region, run)
                    last_page = region.pages.copied(run.block_ids[-1]) if partial else None
                    sources = [PagedSource(region.pages, run.block_ids, last_page)]
                # 4. Their digests, of the same moment. A device computes them behind what it writes, and nobody
                #    waits for them before they are sent.
                if not open_send.digests.is_empty:
                    sums = region.pages.sums(run.block_ids)
                    open_send.digests.add(region.index, run.first_block, sums, len(run.block_ids))
                # 5. Into the queue, at their place in the layer's region.
                offset = (run.first_block - open_send.first_blocks[region.index]) * region.page_bytes
                for source in sources:
                    open_send.sources.append(weakref.ref(source))
                    open_send.transfer.put(region.index, offset, source, urgent=urgent)
                    offset += source.nbytes
        open_send.sources = [ref for ref in open_send.sources if ref() is not None]

    def _open(self, send: SendOrder) -> tuple[_OpenSend, ...]:
        opened = tuple(self._open_to(send, peer) for peer in self._sender.ranks_of(send.ticket.consumer))
        self._open_sends[send.request_id] = opened
        if send.ticket.attributes.checkpoint_tokens:
            self._checkpoint_tokens[send.request_id] = 0
        return opened

    def _open_to(self, send: SendOrder, peer: str) -> _OpenSend:
        ticket = send.ticket
        extent = (ticket.num_tokens, ticket.skip_tokens)
        wire = self._wires.agreed(peer, is_sent=True)
        transfer_id = part_id(ticket.transfer_id, wire.part)
        digests = DigestSource(wire.digest_plan.of_transfer(transfer_id, *extent))
        region_bytes = wire.region_bytes(*extent)
        transfer = self._sender.open(
            ticket,
            send.sealed,
            region_bytes,
            peer,
            cached_tokens=send.cached_tokens,
            form=wire.mark,
            part=wire.part,
        )
        first_blocks = [region.group.first_block(*extent) for region in wire.regions]
        kv_bytes = sum(region_bytes) - digests.nbytes
        return _OpenSend(transfer, wire, first_blocks, kv_bytes, digests, peer=peer)

    def end_step(self, sends: Sequence[SendOrder]) -> None:
        """Queue what the step has completed and no hook has told of; mark the end of the prefill."""
        for send in sends:
            if not self._is_postponed(send):
                self._end_chunk(send)
                continue
            self._postponed.add(send)
            if send.final and send.decodes_on:
                # The next step writes over states, and gives away what leaves a window.
                self._resume(send.request_id, wait=True)

    def _end_chunk(self, send: SendOrder) -> None:
        self._queue_layers(send, self._layout.layer_names)
        try:
            for open_send in self._open_sends.get(send.request_id, ()):
                open_send.queued_layers.clear()
                if send.final:
                    open_send.transfer.end()
            self._put_digests(send)
            if not send.final:
                self._put_checkpoints(send)
        except Exception:
            self._abort_unreadable(send)

    def _put_digests(self, send: SendOrder) -> None:
        """Queue the digests of a chunk's pages behind them; the last ones, after the end mark, overtake what waits."""
        for open_send in self._open_sends.get(send.request_id, ()):
            # A rank that has only what others send too sends no page.
            if open_send.wire.regions:
                for run in open_send.digests.take(final=send.final):
                    open_send.transfer.put(open_send.digests.region, run.offset, run, urgent=send.final)

    def ready_for_checkpoints(self) -> Counter[CheckpointPlace]:
        """Requests of which this rank could send another checkpoint, with the place of their last one."""
        places = self._checkpoint_tokens.items()
        return Counter(place for place in places if all(map(_is_ready, self._open_sends.get(place[0], ()))))

    def _put_checkpoints(self, send: SendOrder) -> None:
        """Have states and windows leave as they are after this chunk: copies, since the next one writes over them."""
        if not send.checkpoint_tokens:
            return
        self._checkpoint_tokens[send.request_id] = send.checkpoint_tokens
        open_sends = self._open_sends.get(send.request_id, ()) if send.checkpoint else ()
        # The other engine goes on from one that all its ranks have.
        for open_send in open_sends if all(map(_is_ready, open_sends)) else ():
            if open_send.wire.checkpoint is not None:
                self._put_checkpoint(send, open_send, open_send.wire.checkpoint)

    def _put_checkpoint(self, send: SendOrder, open_send: _OpenSend, wire: WireLayout) -> None:
        ticket = replace(send.ticket, num_tokens=send.checkpoint_tokens, skip_tokens=0)
        extent = (ticket.num_tokens, 0)
        transfer = self._sender.open_checkpoint(
            open_send.transfer, ticket.num_tokens, wire.region_bytes(*extent), open_send.peer
        )
        digests = DigestSource(wire.digest_plan.of_transfer(transfer.transfer_id, *extent))
        first_blocks = [region.group.first_block(*extent) for region in wire.regions]
        open_send.checkpoint = checkpoint = _OpenSend(transfer, wire, first_blocks, 0, digests)
        try:
            for layer_name in self._layout.closing_layers:
                order = replace(send, ticket=ticket, decodes_on=True)
                self._queue_layer(order, checkpoint, send.checkpoint, layer_name)
            for run in digests.take(final=True):
                transfer.put(digests.region, run.offset, run)
            transfer.end()
            self.stats.add("checkpoints_sent")
        except Exception:
            # It is of use only if this engine dies: the transfer goes on without.
            logger.exception("request %s sends no checkpoint", send.request_id)
            transfer.abort("the prefill engine could not read it")

    def _abort_unreadable(self, send: SendOrder) -> None:
        """In an except clause: the exception must cost one request's transfers, not the engine."""
        logger.exception("sending the KV of request %s failed", send.request_id)
        for open_send in self._open_sends.get(send.request_id, ()):
            open_send.transfer.abort("the prefill engine could not read its KV")

    def detach(self, request_ids: Sequence[str]) -> None:
        """Copy out what is unsent of preempted requests before vLLM overwrites their blocks."""
        for request_id in request_ids:
            self._resume(request_id, wait=True)
            for open_send in self._open_sends.get(request_id, ()):
                for ref in open_send.sources:
                    source = ref()
                    if source is not None:
                        source.detach()
                open_send.transfer.recall(_RECALL_TIMEOUT_S)

    def hold(self, held: Mapping[str, bool]) -> None:
        """Take note of finished requests whose blocks wait for us; give up those that were aborted (True)."""
        for request_id, aborted in held.items():
            self._held_since_s[request_id] = self._now_s()
            if aborted:
                # What was not opened has nobody to be told of its end.
                self._postponed.take(request_id)
                for open_send in self._open_sends.get(request_id, ()):
                    open_send.transfer.abort("the prefill was cancelled")

    def finished(self) -> set[str]:
        """Requests whose blocks vLLM may free now; each is named once."""
        for request_id in self._postponed.due():
            self._resume(request_id)
        done: set[str] = set()
        for request_id, since_s in list(self._held_since_s.items()):
            if request_id in self._postponed:
                continue
            open_sends = self._open_sends.get(request_id, ())
            # Each is looked at: a lease that is over ends all of them.
            ended = [self._has_ended(each, since_s) for each in open_sends]
            if all(ended):
                done.add(request_id)
                del self._held_since_s[request_id]
                self._open_sends.pop(request_id, None)
                self._checkpoint_tokens.pop(request_id, None)
                for each in open_sends:
                    self._count(each)
                    if each.checkpoint is not None:
                        each.checkpoint.transfer.abort("its transfer is over")
        return done

    def _has_ended(self, open_send: _OpenSend, held_since_s: float) -> bool:
        transfer = open_send.transfer
        if not transfer.phase.terminal:
            if self._now_s() - held_since_s < self._lease_s:
                return False
            transfer.abort(f"not acknowledged within the lease of {self._lease_s:g} s")
            self.stats.add("leases_expired")
        return transfer.idle()  # the step loop looks whether readers are gone, it never waits for them

    def _count(self, open_send: _OpenSend) -> None:
        if open_send.transfer.phase is SendPhase.COMPLETE:
            self.stats.add("sends_completed")
            self.stats.add("bytes_sent", open_send.kv_bytes)
        else:
            self.stats.add("sends_failed")
            logger.warning("KV transfer failed: %s", open_send.transfer.reason)


def _is_ready(open_send: _OpenSend) -> bool:
    """Whether a checkpoint may follow, where there are any."""
    if open_send.wire.checkpoint is None:
        return True
    # One that has not left by now says that the link has no room for more.
    before = open_send.checkpoint
    return not open_send.transfer.phase.terminal and (before is None or before.transfer.phase.terminal)


def _copies(region: WireRegion, run: BlockRun) -> list[PagedSource]:
    """Each page as it is now: the next steps write over linear states, and windows leave their blocks behind."""
    return [PagedSource(region.pages, (block,), region.pages.copied(block)) for block in run.block_ids]


def _ends_partial(send: SendOrder, region: WireRegion, run: BlockRun) -> bool:
    """Whether the last block of a run has slots behind the prompt's last token."""
    group = region.group
    if group.kind is GroupKind.STATE:
        return False
    return (run.first_block + len(run.block_ids)) * group.block_tokens > send.ticket.num_tokens
