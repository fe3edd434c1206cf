"""One request's KV on its way from staging into the blocks that vLLM gave the request."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.page_digests import PendingSums
from prfaas.serving.engines.vllm.metadata import LoadOrder
from prfaas.serving.engines.vllm.wire_layout import WireLayout, WireRegion
from prfaas.serving.transport.io.received_transfers import Arrival
from prfaas.serving.transport.io.sibling_staging import LentTransfer
from prfaas.serving.transport.protocol.staging import StagedRegions, StagedTransfer


@dataclass(slots=True)
class _Part:
    """What is to be loaded of one layer."""

    region: WireRegion
    first_block: int
    """Index of the first block in the prompt."""
    block_ids: Sequence[int]
    offset: int
    """Of the first block in the region, in bytes."""
    loaded: int = 0
    """Blocks that were filled, from the first one on."""
    sums: list[PendingSums] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        return self.offset + self.loaded * self.region.page_bytes

    @property
    def left(self) -> int:
        return len(self.block_ids) - self.loaded

    def fill(self, staged: StagedRegions, blocks: int, *, digested: bool) -> None:
        """Fill the next blocks."""
        ids, pages = self.block_ids[self.loaded : self.loaded + blocks], self.region.pages
        nbytes = blocks * self.region.page_bytes
        pieces = staged.region_views(self.region.index, self.next_offset, nbytes)
        if digested:
            self.sums.append(pages.write_summed(ids, pieces))
        else:
            pages.write_run(ids, pieces)
        self.loaded += blocks


class BlockLoad:
    """Fills the blocks of each layer in their order, as far as their bytes are there. Not thread-safe."""

    def __init__(self, wire: WireLayout, order: LoadOrder) -> None:
        """
        Args:
            wire: of the transfer.
            order: the blocks to fill, which the engine does not hold already.

        Raises:
            RuntimeError: a block is one that no request may write, or is to be filled twice.
        """
        self._digest_plan = wire.digest_plan
        self._num_tokens = order.usable_tokens
        self._parts: list[_Part] = []
        ticket = order.ticket
        runs = {run.group: run for run in order.runs}
        self._checkpoint: BlockLoad | None = None
        regions: Sequence[WireRegion] = wire.regions
        if order.usable_tokens and wire.checkpoint is not None:
            # Of the broken transfer full attention alone; the checkpoint is loaded like a transfer of its tokens.
            regions = [region for region in regions if region.group.kind is GroupKind.FULL]
            whole = replace(ticket, num_tokens=order.usable_tokens, skip_tokens=0)
            self._checkpoint = BlockLoad(wire.checkpoint, replace(order, ticket=whole, usable_tokens=0))
        for region in regions:
            run = region.run(runs[region.group.index], ticket.num_tokens, ticket.skip_tokens)
            # Digests are of what is written, so none would tell that another page was written over it.
            if len(set(run.block_ids)) < len(run.block_ids):
                raise RuntimeError(f"layer {region.layer_name}: two pages are to be loaded into one block")
            # The region may begin earlier than the run.
            skipped = region.group.first_block(ticket.num_tokens, ticket.skip_tokens)
            offset = (run.first_block - skipped) * region.page_bytes
            self._parts.append(_Part(region, run.first_block, run.block_ids, offset))

    def fill_arrived(self, arrival: Arrival | LentTransfer) -> None:
        """Fill the blocks whose bytes are in staging, and whose predecessors' are."""
        parts = [part for part in self._parts if part.left]
        ends = arrival.ends([(part.region.index, part.next_offset) for part in parts])
        for part, end in zip(parts, ends, strict=True):
            blocks = min(part.left, (end - part.next_offset) // part.region.page_bytes)
            if blocks > 0:
                part.fill(arrival, blocks, digested=self._digest_plan.digested)

    def finish(self, staged: StagedTransfer | LentTransfer) -> int:
        """Fill the rest from what was handed over, and check all of it; returns the bytes loaded.

        The request may run then: every copy is in place, and every page is what the prefill engine computed.

        Raises:
            PageDigestError: a page is another one.
            RuntimeError: the checkpoint is another one.
        """
        loaded_bytes = 0
        if self._checkpoint is not None:
            if staged.checkpoint is None or staged.checkpoint.num_tokens != self._num_tokens:
                raise RuntimeError(f"what was kept has no checkpoint after {self._num_tokens} tokens")
            loaded_bytes = self._checkpoint.finish(staged.checkpoint)
        for part in self._parts:
            if part.left:
                part.fill(staged, part.left, digested=self._digest_plan.digested)
        self.flush()
        digests = self._digest_plan.of_transfer(staged.transfer_id, staged.num_tokens, staged.skip_tokens)
        for part in self._parts:
            if part.sums:
                sums = np.concatenate([pending.wait() for pending in part.sums])
                digests.check(staged, part.region.index, part.first_block, sums)
        return loaded_bytes + sum(part.loaded * part.region.page_bytes for part in self._parts)

    def flush(self) -> None:
        """Wait until no copy into the blocks is under way."""
        for part in self._parts:
            part.region.pages.flush()
