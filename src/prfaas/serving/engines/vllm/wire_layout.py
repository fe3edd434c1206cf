"""What travels between this engine and one other: the regions of a transfer, and this engine's pages of them."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import lcm

from prfaas.core.kv.groups import GroupKind, Region, region_bytes, usable_tokens
from prfaas.core.kv.page_layout import (
    PageLayout,
    UnlikePagesError,
    WireForm,
    mark_of,
    read_layouts,
    told_layouts,
    unlike_pages,
    wire_forms,
)
from prfaas.core.kv.rank_shares import RankPair
from prfaas.serving.engines.page_digests import DigestPlan
from prfaas.serving.engines.vllm.cut_pages import cut_pages
from prfaas.serving.engines.vllm.layout import EngineRegion, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun
from prfaas.serving.engines.vllm.pages import WirePages
from prfaas.serving.transport.region_layout import PeerLayouts
from prfaas.serving.transport.roster import rank_of, ranked
from prfaas.serving.transport.ticket import MAX_PARTS
from prfaas.serving.transport.wire import count_field

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

    def __init__(
        self, regions: Sequence[WireRegion], mark: str, pair: RankPair, *, page_digests: bool
    ) -> None:
        """
        Args:
            regions: in the order of a transfer.
            mark: see `mark_of`.
            pair: the tensor-parallel ranks of both.
            page_digests: pages travel with digests, in one more region.
        """
        self.mark = mark
        self.part = pair.number
        self.parts = pair.transfers
        self.regions = tuple(regions)
        by_layer: dict[str, list[WireRegion]] = {}
        for region in self.regions:
            by_layer.setdefault(region.layer_name, []).append(region)
        self.regions_of_layer: Mapping[str, Sequence[WireRegion]] = by_layer
        names = [f"{region.layer_name}/{region.part}" for region in self.regions]
        # Wire pages of a token range are parts of the engine's blocks; a state is one page, whatever its tokens.
        ranges = [each for each in self.regions if each.group.kind is not GroupKind.STATE]
        self.step_tokens = lcm(*(each.per_block * each.group.block_tokens for each in ranges))
        """Whole blocks of this engine have a multiple of so many tokens."""
        self.digest_plan = DigestPlan(self.regions, names, pair.finer_rank) if page_digests else None
        """None sends pages without digests."""
        cut = [region for region in self.regions if region.group.kind is not GroupKind.FULL]
        self.checkpoint: WireLayout | None = None
        """Of a checkpoint: linear states and windows alone. None where there are none, or nothing else."""
        if 0 < len(cut) < len(self.regions):
            cut = [replace(region, index=index) for index, region in enumerate(cut)]
            self.checkpoint = WireLayout(cut, mark, pair, page_digests=page_digests)

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

    def checkpoint_bytes(self, num_tokens: int) -> list[int]:
        """Sizes of all regions of a checkpoint after so many tokens.

        Raises:
            ValueError: there can be none.
        """
        if self.checkpoint is None:
            raise ValueError("these layers have no checkpoints")
        return self.checkpoint.region_bytes(num_tokens, 0)

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        """See `groups.usable_tokens`: whole blocks of this engine, with their digests where pages have them."""
        if not self.regions:
            # Whatever other ranks send, nothing is missing of this one's.
            return num_tokens if num_tokens > skip_tokens else 0
        ends = [end for end in checkpoints if end % self.step_tokens == 0]
        extent = (num_tokens, skip_tokens, covered_end, ends)
        plan = self.digest_plan
        tokens = plan.usable_tokens(*extent) if plan is not None else usable_tokens(self.regions, *extent)
        tokens -= tokens % self.step_tokens
        return tokens if tokens > skip_tokens else 0


def wire_layouts(
    layout: KvLayout, name: str, rank: int, ranks: int = 1, *, page_digests: bool = True
) -> PeerLayouts[WireLayout]:
    """What travels between a rank of this engine and ranks of others, once they have told how they keep KV.

    Args:
        layout: of this engine's KV.
        name: this instance's.
        rank: the tensor-parallel rank of this process.
        ranks: how many this engine has.
        page_digests: pages travel with digests.
    """
    me = ranked(name, rank)
    model_regions = tuple(region for region in layout.regions if not region.is_drafters)
    drafted = _Drafted(layout.drafter.identity, len(layout.regions) - len(model_regions))
    known: dict[str, WireLayout] = {}

    def of_shares(
        shares: Sequence[_Share], forms: Sequence[WireForm], pair: RankPair, *, is_whole: bool
    ) -> WireLayout:
        shared = None if is_whole else [astuple(pair), [share.region.index for share in shares]]
        mark = mark_of(forms, shared)
        if mark not in known:
            regions = [
                _wire_region(index, share, form)
                for index, (share, form) in enumerate(zip(shares, forms, strict=True))
            ]
            known[mark] = WireLayout(regions, mark, pair, page_digests=page_digests)
        return known[mark]

    def agree(told: object, peer: str, sends: bool) -> WireLayout:
        try:
            others, layouts, others_drafted = _read_told(told)
            theirs = (rank_of(peer), others)
            pair = RankPair(rank, ranks, *theirs) if sends else RankPair(*theirs, rank, ranks)
        except ValueError as error:
            raise UnlikePagesError(f"the KV layout that {peer} tells {me} can't be read: {error}") from None
        regions, drafters_are_alike = layout.regions, others_drafted == drafted
        if not drafters_are_alike:
            regions, layouts = model_regions, layouts[: len(layouts) - others_drafted.regions]
            logger.info(
                "%s and %s have unlike drafters: what these keep does not travel, so the first tokens behind a "
                "prompt from %s are drafted less well", me, peer, me if sends else peer,
            )  # fmt: skip
        shares, kept = _shares(regions, layouts, pair, (me, peer), sends=sends)
        forms = wire_forms([share.layout for share in shares], kept, me, peer, sends=sends)
        wire = of_shares(shares, forms, pair, is_whole=pair.is_alike and drafters_are_alike)
        if wire.mark:
            logger.info("%s and %s keep their KV differently: it travels in form %s", me, peer, wire.mark)
        return wire

    alike = [_Share(region, region.layout) for region in layout.regions]
    return PeerLayouts(
        {
            "ranks": ranks,
            "pages": told_layouts([region.layout for region in layout.regions]),
            "drafter": astuple(drafted),
        },
        agree,
        of_shares(alike, [None] * len(alike), RankPair(rank, ranks, rank, ranks), is_whole=True),
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """What one other rank has to do with of a region of this engine."""

    region: EngineRegion
    layout: PageLayout
    """The region's own, or of some of its heads."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The regions of a drafter, the last ones of an engine's."""

    identity: str
    """See `Drafter`."""
    regions: int


def _read_told(told: object) -> tuple[int, tuple[PageLayout, ...], _Drafted]:
    if not isinstance(told, dict):
        raise ValueError("an object is expected")
    ranks = count_field(told, "ranks", MAX_PARTS)
    if not ranks:
        raise ValueError("an engine has at least one rank")
    layouts = read_layouts(told.get("pages"))
    match told.get("drafter", ["", 0]):
        case [str() as identity, int() as regions] if 0 <= regions <= len(layouts):
            return ranks, layouts, _Drafted(identity, regions)
    raise ValueError("of a drafter its identity and how many of the regions it has are expected")


def _shares(
    regions: Sequence[EngineRegion],
    told: Sequence[PageLayout],
    pair: RankPair,
    names: tuple[str, str],
    *,
    sends: bool,
) -> tuple[list[_Share], list[PageLayout]]:
    """What a pair of ranks moves of all regions, here and there; those of which it moves nothing are missing.

    Raises:
        UnlikePagesError: the heads of a layer can't be divided so.
    """
    ours, theirs = [], []
    if len(regions) != len(told):
        raise unlike_pages("regions", "a transfer", (names[0], len(regions)), (names[1], len(told)))
    for region, other in zip(regions, told, strict=True):
        sent, kept = (region.layout, other) if sends else (other, region.layout)
        producer, consumer = names if sends else names[::-1]
        shared = pair.share(sent, kept, producer, consumer)
        if shared is not None:
            ours.append(_Share(region, shared[0] if sends else shared[1]))
            theirs.append(shared[1] if sends else shared[0])
    return ours, theirs


def _wire_region(index: int, share: _Share, form: WireForm) -> WireRegion:
    region = share.region
    group, pages, per_block = region.group, region.pages, 1
    page_bytes: int = region.page_bytes
    wire_pages: WirePages = pages
    if form is not None:
        group = replace(group, block_tokens=form.tokens)
        if group.kind is not GroupKind.STATE:
            per_block = region.group.block_tokens // form.tokens
            wire_pages = cut_pages(pages, share.layout, form)
        elif form.parts:
            # A state is one page: its heads are parted, and the rows of drafts stay behind.
            one_token = replace(share.layout, block_tokens=1, page_tokens=1)
            wire_pages = cut_pages(pages, one_token, replace(form, tokens=1))
        page_bytes = wire_pages.page_bytes
    return WireRegion(
        group,
        page_bytes,
        index,
        region.layer_name,
        region.part,
        wire_pages,
        per_block,
        renumbered=group != region.group,
    )
