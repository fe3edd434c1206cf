"""The connector inside a prefill worker: KV leaves while the prompt is still being computed."""

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.serving.engines.vllm.layout import KVLayout
from prfaas.serving.engines.vllm.metadata import BlockRun, Send, TransferMetadata
from prfaas.serving.engines.vllm.pages import PagedSource
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.transport.outgoing import OutgoingTransfer, SendPhase
from prfaas.serving.transport.sender import Sender

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sending:
    """One outgoing transfer and the sources that may still read the engine's blocks."""

    transfer: OutgoingTransfer
    first_blocks: dict[int, int]
    sources: "list[weakref.ref[PagedSource]]" = field(default_factory=list)

    def live_sources(self) -> list[PagedSource]:
        return [source for ref in self.sources if (source := ref()) is not None]


class ProducingSide:
    """Puts finished pages in the transport's queue, layer by layer and chunk by chunk.

    The engine's blocks are the send buffer. vLLM keeps them (`held` orders) until `finished` names the
    request, which happens once the other side has everything, or the transfer has failed, or the lease ran
    out, and in each case no writer thread reads the blocks any more.
    """

    def __init__(
        self,
        layout: KVLayout,
        sender: Sender,
        lease_s: float,
        stats: ConnectorStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._sender = sender
        self._lease_s = lease_s
        self.stats = stats
        self._now_s = now_s
        self._sending: dict[str, _Sending] = {}
        self._held: dict[str, float] = {}

    def save_layer(self, orders: TransferMetadata, layer_name: str) -> None:
        """Queue what this step has completed of one full-attention layer."""
        for send in orders.sends:
            self._guarded(self._queue_layer, send, send.streamed, layer_name)

    def end_step(self, orders: TransferMetadata) -> None:
        """Queue linear and sliding-window state after a last chunk, and mark the end of the prefill."""
        for send in orders.sends:
            if send.final:
                self._guarded(self._close, send)

    def detach(self, request_ids: list[str]) -> None:
        """Copy out what is unsent of preempted requests before vLLM overwrites their blocks."""
        for request_id in request_ids:
            sending = self._sending.get(request_id)
            for source in sending.live_sources() if sending is not None else ():
                source.detach()

    def hold(self, held: dict[str, bool]) -> None:
        """Take note of finished requests whose blocks wait for us; give up those that were aborted."""
        for request_id, aborted in held.items():
            self._held[request_id] = self._now_s()
            sending = self._sending.get(request_id)
            if aborted and sending is not None:
                sending.transfer.abort("the prefill was cancelled")

    def finished(self) -> set[str]:
        """Requests whose blocks vLLM may free now; each is named once."""
        done: set[str] = set()
        for request_id, since_s in list(self._held.items()):
            sending = self._sending.get(request_id)
            if sending is None or self._has_ended(sending, since_s):
                done.add(request_id)
                del self._held[request_id]
                self._sending.pop(request_id, None)
        return done

    def live_transfers(self) -> int:
        """Transfers whose request still holds blocks."""
        return len(self._sending)

    def _has_ended(self, sending: _Sending, held_since_s: float) -> bool:
        transfer = sending.transfer
        if not transfer.phase.terminal:
            if self._now_s() - held_since_s < self._lease_s:
                return False
            transfer.abort(f"not acknowledged within the lease of {self._lease_s:g} s")
            self.stats.add("leases_expired")
        if not transfer.idle():  # the step loop looks whether readers are gone, it never waits for them
            return False
        self._count(transfer)
        return True

    def _count(self, transfer: OutgoingTransfer) -> None:
        if transfer.phase is SendPhase.COMPLETE:
            self.stats.add("sends_completed")
            self.stats.add("bytes_sent", transfer.total_bytes)
        else:
            self.stats.add("sends_failed")
            logger.warning("KV transfer failed: %s", transfer.reason)

    def _guarded(self, step: Callable[..., None], send: Send, *rest: object) -> None:
        """An exception here must cost one transfer, not the engine."""
        try:
            step(send, *rest)
        except Exception:
            logger.exception("sending the KV of request %s failed", send.request_id)
            sending = self._sending.get(send.request_id)
            if sending is not None:
                sending.transfer.abort("the prefill engine could not read its KV")

    def _queue_layer(self, send: Send, runs: tuple[BlockRun, ...], layer_name: str) -> None:
        sending = self._open(send)
        for index in self._layout.regions_of_layer.get(layer_name, ()):
            region = self._layout.regions[index]
            pages = self._layout.pages[index]
            for run in runs:
                if run.group != region.group.index or not run.block_ids:
                    continue
                if 0 in run.block_ids:
                    raise RuntimeError(f"layer {layer_name}: a block to send is vLLM's null block")
                pages.mark_written()
                source = PagedSource(pages, run.block_ids)
                offset = (run.first_block - sending.first_blocks[region.group.index]) * region.page_bytes
                sending.sources.append(weakref.ref(source))
                sending.transfer.put(index, offset, source)
        sending.sources = [ref for ref in sending.sources if ref() is not None]

    def _close(self, send: Send) -> None:
        groups = {run.group for run in send.closing}
        for layer_name, indices in self._layout.regions_of_layer.items():
            if self._layout.regions[indices[0]].group.index in groups:
                self._queue_layer(send, send.closing, layer_name)
        self._open(send).transfer.end()

    def _open(self, send: Send) -> _Sending:
        sending = self._sending.get(send.request_id)
        if sending is None:
            ticket = send.ticket
            transfer = self._sender.open(
                ticket,
                send.sealed,
                self._layout.region_bytes(ticket.num_tokens, ticket.skip_tokens),
            )
            groups = {region.group for region in self._layout.regions}
            firsts = {g.index: g.first_block(ticket.num_tokens, ticket.skip_tokens) for g in groups}
            sending = self._sending[send.request_id] = _Sending(transfer, firsts)
        return sending
