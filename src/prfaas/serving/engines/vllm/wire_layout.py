"""What travels between this engine and one other: the regions of a transfer, and this engine's pages of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from prfaas.core.kv.groups import GroupKind, Region, region_bytes, usable_tokens
from prfaas.core.kv.page_layout import (
    UnlikePagesError,
    WireForm,
    mark_of,
    read_layouts,
    told_layouts,
    wire_forms,
)
from prfaas.serving.engines.page_digests import DigestPlan
from prfaas.serving.engines.vllm.cut_pages import cut_pages
from prfaas.serving.engines.vllm.layout import EngineRegion, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun
from prfaas.serving.engines.vllm.pages import WirePages
from prfaas.serving.transport.region_layout import PeerLayouts
from prfaas.serving.transport.roster import ranked

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireRegion(Region):
    """One layer's share of a transfer, or one tensor's; its blocks are wire pages."""

    index: int
    """Number of the region in a transfer."""
    layer_name: str
    part: int
    """Which of the layer's tensors."""
    pages: WirePages
    """Where the engine keeps it."""
    per_block: int
    """Wire pages of one of the engine's blocks."""
    renumbered: bool
    """The engine's blocks have other numbers in a prompt than wire pages."""

    def run(self, run: BlockRun, num_tokens: int, skip_tokens: int) -> BlockRun:
        """What a transfer of tokens [skip_tokens, num_tokens) moves of a run of the engine's blocks, as wire pages.

        Raises:
            RuntimeError: a block of them is one that no request may read or write.
        """
        if self.renumbered:
            run = self._renumbered(run, num_tokens, skip_tokens)
        if run.block_ids and min(run.block_ids) < self.per_block:
            raise RuntimeError(f"layer {self.layer_name}: a block to move is vLLM's null block")
        return run

    def _renumbered(self, run: BlockRun, num_tokens: int, skip_tokens: int) -> BlockRun:
        moving = self.group.moving_blocks(num_tokens, skip_tokens)
        if self.group.kind is GroupKind.STATE:
            # The state after the last token is the last block of the run, under another number.
            return BlockRun(run.group, moving.start, run.block_ids[-1:])
        count = self.per_block
        first, end = run.first_block * count, (run.first_block + len(run.block_ids)) * count
        wanted = range(max(first, moving.start), max(first, min(end, moving.stop)))
        ids = tuple(run.block_ids[page // count - run.first_block] * count + page % count for page in wanted)
        return BlockRun(run.group, wanted.start, ids)


class WireLayout:
    """The regions of transfers between this engine's rank and one other."""

    def __init__(self, regions: Sequence[WireRegion], mark: str, rank: int, *, page_digests: bool) -> None:
        """
        Args:
            regions: in the order of a transfer.
            mark: see `mark_of`.
            rank: the tensor-parallel rank of both.
            page_digests: pages travel with digests, in one more region.
        """
        self.mark = mark
        self.regions = tuple(regions)
        by_layer: dict[str, list[WireRegion]] = {}
        for region in self.regions:
            by_layer.setdefault(region.layer_name, []).append(region)
        self.regions_of_layer: Mapping[str, Sequence[WireRegion]] = by_layer
        names = [f"{region.layer_name}/{region.part}" for region in self.regions]
        self.digest_plan = DigestPlan(self.regions, names, rank) if page_digests else None
        """None sends pages without digests."""

    def kv_region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """See `groups.region_bytes`: without digests."""
        return region_bytes(self.regions, num_tokens, skip_tokens)

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """Sizes of all regions of a transfer.

        Raises:
            ValueError: there can be no such transfer.
        """
        if self.digest_plan is not None:
            return self.digest_plan.region_bytes(num_tokens, skip_tokens)
        return self.kv_region_bytes(num_tokens, skip_tokens)

    def usable_tokens(self, num_tokens: int, skip_tokens: int, covered_end: Callable[[int, int], int]) -> int:
        """See `groups.usable_tokens`: whole blocks of this engine, with their digests where pages have them."""
        extent = (num_tokens, skip_tokens, covered_end)
        plan = self.digest_plan
        tokens = plan.usable_tokens(*extent) if plan is not None else usable_tokens(self.regions, *extent)
        if tokens:
            # Of full attention alone, whose wire pages are parts of the engine's blocks.
            tokens -= tokens % lcm(*(each.per_block * each.group.block_tokens for each in self.regions))
        return tokens if tokens > skip_tokens else 0


def wire_layouts(
    layout: KvLayout, name: str, rank: int, *, page_digests: bool = True
) -> PeerLayouts[WireLayout]:
    """What travels between a rank of this engine and the same rank of others, once they have told how they keep KV.

    Args:
        layout: of this engine's KV.
        name: this instance's.
        rank: the tensor-parallel rank of this process.
        page_digests: pages travel with digests.
    """
    ours = [region.layout for region in layout.regions]
    me = ranked(name, rank)
    known: dict[str, WireLayout] = {}

    def of_forms(forms: Sequence[WireForm]) -> WireLayout:
        mark = mark_of(forms)
        if mark not in known:
            regions = [_wire_region(*pair) for pair in zip(layout.regions, forms, strict=True)]
            known[mark] = WireLayout(regions, mark, rank, page_digests=page_digests)
        return known[mark]

    def agree(told: object, peer: str) -> WireLayout:
        try:
            theirs = read_layouts(told)
        except ValueError as error:
            raise UnlikePagesError(f"the KV layout that {peer} tells {me} can't be read: {error}") from None
        wire = of_forms(wire_forms(ours, theirs, me, peer))
        if wire.mark:
            logger.info("%s and %s keep their KV differently: it travels in form %s", me, peer, wire.mark)
        return wire

    return PeerLayouts(rank, told_layouts(ours), agree, of_forms([None] * len(ours)))


def _wire_region(region: EngineRegion, form: WireForm) -> WireRegion:
    group, pages, per_block = region.group, region.pages, 1
    page_bytes: int = region.page_bytes
    wire_pages: WirePages = pages
    if form is not None:
        group = replace(group, block_tokens=form.tokens)
        if group.kind is not GroupKind.STATE:
            per_block = region.group.block_tokens // form.tokens
            wire_pages = cut_pages(pages, region.layout, form)
            page_bytes = wire_pages.page_bytes
    return WireRegion(
        group,
        page_bytes,
        region.index,
        region.layer_name,
        region.part,
        wire_pages,
        per_block,
        renumbered=group != region.group,
    )
