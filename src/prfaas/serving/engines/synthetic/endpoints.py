"""A stand-in's ends of the transport: it sends to peers and receives into staging, as one for all of its ranks."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.kv.groups import GroupKind
from prfaas.core.link.checkpoints import is_checkpoint_due
from prfaas.core.prefix.hashing import seed_of
from prfaas.serving.engines.page_digests import DigestPlan, DigestSource, PageDigestError, TransferDigests
from prfaas.serving.engines.synthetic.cache import Context, Deviations
from prfaas.serving.engines.synthetic.content import (
    PageSource,
    Words,
    held_sums,
    join,
    page_digests,
    reduce_page,
)
from prfaas.serving.engines.synthetic.layout import SyntheticGroup, SyntheticLayout, SyntheticRegion
from prfaas.serving.engines.transfer_counters import COUNTERS
from prfaas.serving.transport.io.endpoint import KvEndpoint
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.event_log import EventLog
from prfaas.serving.transport.protocol.options import ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.peer_list import peer_list_of, ranked
from prfaas.serving.transport.protocol.requests import FollowOrder, PeerRequest, refuse_request
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.wire import TransferPhase, load_obstacle

logger = logging.getLogger(__name__)

# Each open connection has a buffer of this size: there are many in one process.
_CHUNK_BYTES = 256 << 10
_POLL_S = 0.01
_SWEEP_S = 0.1
# Stand-ins have no others.
_RANK = 0


class PrefillSend:
    """One outgoing transfer while its prefill goes on: layers leave as they are done, chunk by chunk."""

    def __init__(
        self,
        layout: SyntheticLayout,
        transfer: SentTransfer,
        ticket: Ticket,
        context: Context,
        digests: DigestSource,
    ) -> None:
        self.transfer = transfer
        self.ticket = ticket
        self.context = context
        self.checkpoint_tokens = ticket.skip_tokens
        """Where the last checkpoint was."""
        self._digests = digests
        self._layout = layout
        self._sent_blocks = {
            group.index: group.first_block(ticket.num_tokens, ticket.skip_tokens) for group in layout.groups
        }

    def layers_done(self, layers: range, end_tokens: int) -> None:
        """The full-attention layers of these positions (in the order of regions) have come to `end_tokens`.

        So have those of windows and states that lie evenly among them: what they have to send leaves too.
        """
        full = len(self._layout.full.layers)
        others = len(self._layout.regions) - full
        self._put_ready(layers, end_tokens)
        self._put_ready(
            range(full + others * layers.start // full, full + others * layers.stop // full), end_tokens
        )

    def chunk_done(self, end_tokens: int) -> None:
        """All layers have come to `end_tokens`."""
        for group in self._layout.groups:
            ready = group.ready_block(self.ticket.num_tokens, end_tokens)
            self._sent_blocks[group.index] = max(self._sent_blocks[group.index], ready)
        final = end_tokens >= self.ticket.num_tokens
        if final:
            self.transfer.end()
        for run in self._digests.take(final=final):
            self.transfer.put(self._digests.region, run.offset, run, urgent=final)

    def _put_ready(self, regions: range, end_tokens: int) -> None:
        for index in regions:
            group = self._layout.regions[index].group
            ready = group.ready_block(self.ticket.num_tokens, end_tokens)
            is_urgent = group.kind is not GroupKind.FULL
            self._put(index, self._sent_blocks[group.index], ready, urgent=is_urgent)

    def _put(self, index: int, first: int, end: int, *, urgent: bool = False) -> None:
        region, ticket = self._layout.regions[index], self.ticket
        if end > first:
            digests = _page_digests(region, self.context, range(first, end), ticket.num_tokens)
            skipped = region.group.first_block(ticket.num_tokens, ticket.skip_tokens)
            offset = (first - skipped) * region.page_bytes
            self._digests.add(index, first, held_sums(digests), end - first)
            self.transfer.put(index, offset, PageSource(digests, region.page_bytes), urgent=urgent)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A transfer that was opened and has not been counted."""

    since_s: float
    """When it was opened, as time.monotonic()."""
    kv_bytes: int
    """Of its pages, without their digests."""


class Endpoints:
    """Sender and receiver of one instance, as its connector would have them."""

    def __init__(
        self,
        deployment: Deployment,
        instance: Instance,
        layout: SyntheticLayout,
        key: bytes,
        tls: TlsIdentity | None,
    ) -> None:
        limits = deployment.transfer
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        """Transfers by the names of `COUNTERS`."""
        self.key = key
        self._layout = layout
        self._lease_s = limits.lease_s
        self._load_wait_s = limits.load_wait_s
        self._sends: dict[SentTransfer, _Sending] = {}
        self._has_sends = asyncio.Event()
        self._digest_plan = layout.digest_plan(digested=limits.page_digests)
        staging_bytes = deployment.engine.staging_bytes * instance.tensor_parallel
        self.arena = StagingArena(staging_bytes, deployment.engine.transfer_block_bytes)
        self.events = EventLog(seed_of(key), partial(secrets.token_hex, 8))
        """What the cache holds, for those that follow it."""
        self._loop = asyncio.get_running_loop()
        endpoint = KvEndpoint.of(
            name=ranked(instance.name, _RANK),
            key=key,
            host=instance.host,
            port=instance.kv_port,
            fingerprint=layout.fingerprint(deployment.model.served_name, page_digests=limits.page_digests),
            tls=tls,
            peer_list=peer_list_of(deployment, instance, _RANK),
            arena=self.arena,
            layout=self._digest_plan,
            sender_options=SenderOptions(limits=limits, chunk_bytes=_CHUNK_BYTES),
            receiver_options=ReceiverOptions(limits=limits, uncounted_regions=int(limits.page_digests)),
            on_request=self._on_request,
        )
        self.sender, self.receiver = endpoint.sender, endpoint.receiver
        self._sweeper: asyncio.Task[None] | None = None

    def connect(self) -> None:
        """Connect to the peers, in the background; needs a running event loop."""
        self.sender.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="synthetic-sends")

    async def close(self) -> None:
        """End every thread and connection; observers that wait for a transfer find the connection lost."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.to_thread(self.sender.close)
        await asyncio.to_thread(self.receiver.close)

    def _on_request(self, request: PeerRequest) -> None:
        if isinstance(request.order, FollowOrder):
            self._loop.call_soon_threadsafe(self.events.answer, request)
        else:
            refuse_request(request)

    def open(self, ticket: Ticket, sealed: str, context: Context, cached_tokens: int) -> PrefillSend:
        """Begin sending what a prefill is about to compute, and the `cached_tokens` that it need not."""
        extent, plan = (ticket.num_tokens, ticket.skip_tokens), self._digest_plan
        digests = DigestSource(plan.of_transfer(ticket.transfer_id, *extent))
        transfer = self.sender.open(ticket, sealed, plan.region_bytes(*extent), cached_tokens=cached_tokens)
        self._sends[transfer] = _Sending(time.monotonic(), sum(self._layout.region_bytes(*extent)))
        self._has_sends.set()
        return PrefillSend(self._layout, transfer, ticket, context, digests)

    def put_checkpoint(self, sending: PrefillSend, end_tokens: int) -> None:
        """Send what states and windows hold after a chunk, if that is due."""
        ticket, regions = sending.ticket, self._layout.checkpoint_regions
        last = sending.checkpoint_tokens
        if not regions or not is_checkpoint_due(
            ticket.attributes.checkpoint_tokens, last, end_tokens, ticket.num_tokens
        ):
            return
        sending.checkpoint_tokens = end_tokens
        plan, peer = self._digest_plan.checkpoint(), self.sender.ranks_of(ticket.consumer)[0]
        sizes = plan.region_bytes(end_tokens, 0)
        transfer = self.sender.open_checkpoint(sending.transfer, end_tokens, sizes, peer)
        digests = DigestSource(plan.of_transfer(transfer.transfer_id, end_tokens, 0))
        for index, region in enumerate(regions):
            moving = region.group.moving_blocks(end_tokens, 0)
            words = _page_digests(region, sending.context, moving, end_tokens)
            digests.add(index, moving.start, held_sums(words), len(moving))
            transfer.put(index, 0, PageSource(words, region.page_bytes))
        for run in digests.take(final=True):
            transfer.put(digests.region, run.offset, run)
        transfer.end()
        self.counts["checkpoints_sent"] += 1

    async def arrival(self, ticket: Ticket) -> str:
        """Wait until a transfer is complete, or broken with something left; "" then, else why it will not be."""
        deadline_s = time.monotonic() + self._load_wait_s
        while True:
            status = self.receiver.transfers.state(ticket.transfer_id)
            if status is not None and status.usable_tokens:
                return ""
            obstacle = load_obstacle(status)
            if obstacle or (status is not None and status.phase is TransferPhase.COMPLETE):
                return obstacle
            if time.monotonic() > deadline_s:
                reason = f"KV still incomplete after {self._load_wait_s:g} s"
                self.receiver.transfers.drop(ticket.transfer_id, reason)
                return reason
            await asyncio.sleep(_POLL_S)

    def tokens_of(self, ticket: Ticket) -> int:
        """Tokens whose KV an ended transfer gives: fewer than its ticket says where it broke."""
        status = self.receiver.transfers.state(ticket.transfer_id)
        if status is None or status.phase is not TransferPhase.FAILED:
            return ticket.num_tokens
        return status.usable_tokens or ticket.num_tokens

    async def load(self, ticket: Ticket, context: Context, held_tokens: int, num_tokens: int) -> bool:
        """Read the first `num_tokens` tokens of a transfer into `context`, which holds `held_tokens`; frees its memory.

        False if the transfer is gone, or a page is not what the prefill engine computed.
        """
        staged = self.receiver.transfers.take(
            ticket.transfer_id, broken_tokens=num_tokens if num_tokens < ticket.num_tokens else 0
        )
        if staged is None:
            return False
        try:
            # Shielded: the thread owns the staging and frees it, also when the request is cancelled meanwhile.
            found = await asyncio.shield(
                asyncio.to_thread(
                    _read_pages,
                    staged,
                    self._layout,
                    context,
                    range(held_tokens, num_tokens),
                    self._digest_plan,
                )
            )
        except PageDigestError as error:
            logger.error("a request prefills locally: in its KV from %s, %s", ticket.producer, error)
            self.counts["digest_mismatches"] += 1
            return False
        except Exception:
            logger.exception("loading a transfer failed")
            return False
        for group, block, deviations in found:
            context.use(group, block, deviations)
        self.counts["bytes_loaded"] += sum(self._layout.region_bytes(num_tokens, held_tokens))
        return True

    def drop(self, ticket: Ticket, reason: str) -> None:
        """Free the staging of a transfer that no request here will load."""
        self.receiver.transfers.drop(ticket.transfer_id, reason)

    async def _sweep(self) -> None:
        while True:
            if not self._sends:
                self._has_sends.clear()
            await self._has_sends.wait()
            await asyncio.sleep(_SWEEP_S)
            now_s = time.monotonic()
            for transfer, sending in list(self._sends.items()):
                if not transfer.phase.terminal and now_s - sending.since_s > self._lease_s:
                    transfer.abort(f"not acknowledged within the lease of {self._lease_s:g} s")
                    self.counts["leases_expired"] += 1
                if transfer.phase.terminal:
                    del self._sends[transfer]
                    self._count(transfer, sending)

    def _count(self, transfer: SentTransfer, sending: _Sending) -> None:
        if transfer.phase is SendPhase.COMPLETE:
            self.counts["sends_completed"] += 1
            self.counts["bytes_sent"] += sending.kv_bytes
        else:
            self.counts["sends_failed"] += 1
            logger.warning("KV transfer failed: %s", transfer.reason)


def _read_pages(
    staged: StagedTransfer,
    layout: SyntheticLayout,
    context: Context,
    tokens: range,
    digest_plan: DigestPlan,
) -> list[tuple[SyntheticGroup, int, Deviations]]:
    """Every page of these `tokens` of a transfer, with its deviations; frees the staging.

    Raises:
        PageDigestError: a page is not what the prefill engine computed.
    """
    try:
        # What broke has its states and windows in a transfer of their own.
        wholes = [(layout.regions, staged, digest_plan)]
        if staged.checkpoint is not None:
            full, checkpoint = layout.regions[: len(layout.full.layers)], digest_plan.checkpoint()
            wholes = [(full, staged, digest_plan), (layout.checkpoint_regions, staged.checkpoint, checkpoint)]
        deviations: dict[tuple[int, int], list[int]] = {}
        for index, region, source, digests in _staged_regions(wholes):
            group, num_tokens = region.group, source.num_tokens
            staged_first = group.first_block(num_tokens, source.skip_tokens)
            blocks = group.moving_blocks(tokens.stop, tokens.start)
            loaded = np.empty(len(blocks), dtype=np.uint64)
            for position, block in enumerate(blocks):
                offset = (block - staged_first) * region.page_bytes
                loaded[position] = reduce_page(join(source.region_views(index, offset, region.page_bytes)))
            if len(loaded):
                digests.check(source, index, blocks.start, held_sums(loaded).wait())
            expected = _page_digests(region, context, blocks, num_tokens)
            for block, deviation in zip(blocks, (loaded ^ expected).tolist(), strict=True):
                deviations.setdefault((group.index, block), []).append(deviation)
    finally:
        staged.free()
    return [
        (layout.groups[group], block, tuple(layers) if any(layers) else ())
        for (group, block), layers in deviations.items()
    ]


def _staged_regions(
    wholes: Sequence[tuple[Sequence[SyntheticRegion], StagedTransfer, DigestPlan]],
) -> Iterator[tuple[int, SyntheticRegion, StagedTransfer, TransferDigests]]:
    """Each region with its number in the transfer that it came in."""
    for regions, staged, plan in wholes:
        digests = plan.of_transfer(staged.transfer_id, staged.num_tokens, staged.skip_tokens)
        for index, region in enumerate(regions):
            yield index, region, staged, digests


def _page_digests(region: SyntheticRegion, context: Context, blocks: Sequence[int], num_tokens: int) -> Words:
    """Digests of one layer's pages in a transfer of `num_tokens` tokens, as this engine has them."""
    group, chain = region.group, context.chain
    ends = [min((block + 1) * group.block_tokens, num_tokens) for block in blocks]
    digests = page_digests([chain.digest(end) for end in ends], region.layer)
    for position, block in enumerate(blocks):
        held = context.deviations.get((group.index, block))
        if held is not None:
            digests[position] ^= np.uint64(held[region.position])
    return digests
