"""Wire layouts: the regions of transfers between this engine and one other, and this engine's pages of them."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from math import lcm
from typing import TypeVar

from prfaas.core.kv.groups import GroupKind, Region, region_bytes
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
from prfaas.core.kv.rank_shares import RankPair, paired_ranks
from prfaas.serving.engines.page_digests import DigestPlan
from prfaas.serving.engines.vllm.cut_pages import cut_pages
from prfaas.serving.engines.vllm.layout import EngineRegion, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun
from prfaas.serving.engines.vllm.pages import WirePages
from prfaas.serving.engines.vllm.stages import LayerStage
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.protocol.peer_list import rank_of, ranked
from prfaas.serving.transport.protocol.ticket import MAX_PARTS
from prfaas.serving.transport.protocol.wire import count_field

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        """The wire pages that a transfer of tokens [skip_tokens, num_tokens) moves of a run of the engine's blocks.

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
        self,
        regions: Sequence[WireRegion],
        mark: str,
        pair: RankPair,
        *,
        page_digests: bool,
        checkpointed: bool = True,
    ) -> None:
        """
        Args:
            regions: in the order of a transfer.
            mark: see `mark_of`.
            pair: the tensor-parallel ranks of both, and the producer's stage.
            page_digests: pages travel with digests, in one more region.
            checkpointed: states and windows stand beside full attention, which may travel to another rank.
        """
        self.mark = mark
        self.part = pair.number
        self.parts = pair.transfers
        self.regions = tuple(regions)
        by_layer: dict[str, list[WireRegion]] = {}
        for region in self.regions:
            by_layer.setdefault(region.layer_name, []).append(region)
        self.regions_of_layer: Mapping[str, Sequence[WireRegion]] = by_layer
        self.borrowed: Mapping[tuple[int, int], WireLayout] = {}
        """What this rank reads of transfers to others of its engine, by their rank and the part of the ticket."""
        self.readers: Collection[int] = ()
        """The ranks of its engine that read some of what this one is sent."""
        names = [f"{region.layer_name}/{region.part}" for region in self.regions]
        # Wire pages of a token range are parts of the engine's blocks; a state is one page, whatever its tokens.
        ranges = [each for each in self.regions if each.group.kind is not GroupKind.STATE]
        self.step_tokens = lcm(*(each.per_block * each.group.block_tokens for each in ranges))
        """Whole blocks of this engine have a multiple of so many tokens."""
        self.digest_plan = DigestPlan(self.regions, names, pair.finer_rank, digested=page_digests)
        cut = [region for region in self.regions if region.group.kind is not GroupKind.FULL]
        self.checkpoint: WireLayout | None = None
        """Of a checkpoint: linear states and windows alone. None where there are none, or nothing else."""
        if cut and checkpointed:
            cut = [replace(region, index=index) for index, region in enumerate(cut)]
            self.checkpoint = WireLayout(cut, mark, pair, page_digests=page_digests, checkpointed=False)

    def lent(self, regions: Sequence[WireRegion]) -> "WireLayout":
        """The layout for a rank that reads only some regions, out of another rank's staging."""
        found = copy(self)
        found.regions, found.checkpoint = tuple(regions), None
        return found

    def lent_tokens(self, num_tokens: int, skip_tokens: int, covered_end: Callable[[int, int], int]) -> int:
        """Tokens whose full attention has come of a `lent` transfer, see `usable_tokens`."""
        covered_end = self.digest_plan.digested_end(num_tokens, skip_tokens, covered_end)
        tokens = num_tokens
        for region in self.regions:
            blocks = covered_end(region.index, 0) // region.page_bytes
            blocks += region.group.first_block(num_tokens, skip_tokens)
            tokens = min(tokens, blocks * region.group.block_tokens)
        return tokens if tokens > skip_tokens else 0

    def kv_region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """See `groups.region_bytes`: without digests."""
        return region_bytes(self.regions, num_tokens, skip_tokens)

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """Sizes of all regions of a transfer.

        Raises:
            ValueError: there can be no such transfer.
        """
        return self.digest_plan.region_bytes(num_tokens, skip_tokens)

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
        tokens = self.digest_plan.usable_tokens(num_tokens, skip_tokens, covered_end, ends)
        tokens -= tokens % self.step_tokens
        return tokens if tokens > skip_tokens else 0


def wire_layouts(
    layout: KvLayout,
    name: str,
    rank: int,
    ranks: int = 1,
    *,
    page_digests: bool = True,
    stage: LayerStage | None = None,
) -> PeerLayouts[WireLayout]:
    """Layouts of transfers between a rank of this engine and ranks of others, once these have reported their KV's.

    Args:
        layout: of this engine's KV.
        name: this instance's.
        rank: the number of this process's rank, in all stages.
        ranks: how many tensor-parallel ones each stage has.
        page_digests: pages travel with digests.
        stage: of this process; None: the engine has one.
    """
    stage = LayerStage.of_engine(layout) if stage is None else stage
    own = _OwnSide(layout, ranked(name, rank), rank % ranks, ranks, page_digests=page_digests, stage=stage)
    shares_copies = max(layout.copies, default=1) > 1
    told = {
        "ranks": ranks,
        "pages": told_layouts([region.layout for region in layout.regions]),
        "drafter": astuple(own.drafted),
        "copies": list(layout.copies) if shares_copies else [],
        **own.told_stage(),
    }
    return PeerLayouts(told, own.agree, own.alike(), shares_copies=shares_copies)


class _OwnSide:
    """A rank of this engine, which agrees with ranks of others on what travels between them."""

    def __init__(
        self, layout: KvLayout, me: str, rank: int, ranks: int, *, page_digests: bool, stage: LayerStage
    ) -> None:
        """`me`: the name of the rank, `rank`: its number in its stage; for the rest see `wire_layouts`."""
        self._layout = layout
        self._stage = stage
        self._me = me
        self._rank = rank
        self._ranks = ranks
        self._page_digests = page_digests
        self._of_model = tuple(region for region in layout.regions if not region.is_drafters)
        self.drafted = _Drafted(layout.drafter.identity, len(layout.regions) - len(self._of_model))
        self._has_full = any(region.group.kind is GroupKind.FULL for region in stage.model)
        self._known: dict[tuple[str, RankPair], WireLayout] = {}

    def alike(self) -> WireLayout:
        """The layout of transfers to and from an equal engine's rank."""
        regions = zip(self._layout.regions, self._stage.places, strict=True)
        shares = [_Share(region, region.layout, place) for region, place in regions]
        pair = RankPair(self._rank, self._ranks, self._rank, self._ranks)
        return self._of_shares(shares, [None] * len(shares), pair, is_whole=True)

    def told_stage(self) -> dict[str, object]:
        """Which stage it is and which of the model's regions it has, as runs of (first, how many); {}: all of them."""
        stage = self._stage
        if stage.count == 1:
            return {}
        runs: list[list[int]] = []
        for place in stage.places:
            if runs and place == sum(runs[-1]):
                runs[-1][1] += 1
            else:
                runs.append([place, 1])
        return {"stage": [stage.number, stage.count, runs]}

    def agree(self, told: object, peer: str, sends: bool) -> WireLayout:
        """Agree with a peer on a layout, by what it reports. Raises `UnlikePagesError`: nothing can travel."""
        me, rank, ranks = self._me, self._rank, self._ranks
        try:
            others = _Told.read(told)
            its_rank = others.tensor_rank(rank_of(peer))
            pair = (
                RankPair(
                    rank, ranks, its_rank, others.ranks, stage=self._stage.number, stages=self._stage.count
                )
                if sends
                else RankPair(its_rank, others.ranks, rank, ranks, stage=others.stage, stages=others.count)
            )
        except ValueError as error:
            raise UnlikePagesError(f"the KV layout that {peer} tells {me} can't be read: {error}") from None
        if (others if sends else self._stage).count > 1:
            raise UnlikePagesError(
                f"{peer if sends else me} has stages of a pipeline, which only send KVCache"
            )
        if others.drafted != self.drafted:
            logger.info(
                "%s and %s have unlike drafters: what these keep does not travel, so the first tokens behind a "
                "prompt from %s are drafted less well", me, peer, me if sends else peer,
            )  # fmt: skip
        wire = self._between(others, pair, peer, sends=sends)
        if wire.mark:
            logger.info("what travels between %s and %s is their own affair: form %s", me, peer, wire.mark)
        if not sends and others.copies is not None:
            wire.readers = _readers(wire, self._layout, rank)
            wire.borrowed = {
                (lender.consumer, lender.number): lent
                for lender in _lenders(self._layout, rank, ranks, others)
                if (lent := self._lent_by(lender, self._between(others, lender, peer, sends=False))).regions
            }
        return wire

    def _between(self, others: "_Told", pair: RankPair, peer: str, *, sends: bool) -> WireLayout:
        layout = self._layout
        regions, layouts, are_alike = layout.regions, others.layouts, others.drafted == self.drafted
        if not are_alike:
            regions, layouts = self._of_model, layouts[: len(layouts) - others.drafted.regions]
        # A producer that tells nothing of copies sends to each rank.
        copies = others.copies if sends else None if others.copies is None else layout.copies
        counts = copies or (1,) * len(layout.regions if not sends else others.layouts)
        places: Sequence[int] = range(len(regions))
        if sends and self._stage.count > 1:
            # This rank has some of the layers that the other side keeps.
            places = self._stage.places
            layouts, counts = _at(places, layouts), _at(places, counts)
        elif not sends and others.places is not None:
            places = others.places
            regions, counts = _at(places, regions), _at(places, counts)
        names = (self._me, peer)
        own = [_Share(region, region.layout, place) for region, place in zip(regions, places, strict=True)]
        shares, kept = _shares(own, layouts, pair, names, counts[: len(own)], sends=sends)
        forms = wire_forms([share.layout for share in shares], kept, *names, sends=sends)
        is_whole = pair.is_alike and pair.stages == 1 and are_alike and len(shares) == len(regions)
        return self._of_shares(shares, forms, pair, is_whole=is_whole)

    def _of_shares(
        self, shares: Sequence["_Share"], forms: Sequence[WireForm], pair: RankPair, *, is_whole: bool
    ) -> WireLayout:
        shared = None if is_whole else [pair.told(), [share.place for share in shares]]
        mark = mark_of(forms, shared)
        if (mark, pair) not in self._known:
            regions = [
                _wire_region(index, share, form)
                for index, (share, form) in enumerate(zip(shares, forms, strict=True))
            ]
            self._known[mark, pair] = WireLayout(
                *(regions, mark, pair), page_digests=self._page_digests, checkpointed=self._has_full
            )
        return self._known[mark, pair]

    def _lent_by(self, lender: RankPair, wire: WireLayout) -> WireLayout:
        copies, rank = self._layout.copies_of, self._rank
        return wire.lent(
            [
                region
                for region in wire.regions
                if lender.consumer // copies(region.layer_name) == rank // copies(region.layer_name)
            ]
        )


@dataclass(frozen=True, slots=True)
class _Share:
    """What one other rank has to do with of a region of this engine."""

    region: EngineRegion
    layout: PageLayout
    """The region's own, or of some of its heads."""
    place: int
    """Number of the region among those of the whole model."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The regions of a drafter, the last ones of an engine's."""

    identity: str
    """See `Drafter`."""
    regions: int


@dataclass(frozen=True, slots=True)
class _Told:
    """What the other side tells of its engine."""

    ranks: int
    """Tensor-parallel ones, of each stage."""
    layouts: tuple[PageLayout, ...]
    """Of a transfer's regions."""
    drafted: _Drafted
    copies: tuple[int, ...] | None
    """See `KvLayout.copies`; empty: 1 of each region. None: it knows of none."""
    stage: int = 0
    count: int = 1
    """Of stages."""
    places: tuple[int, ...] | None = None
    """Of the regions among those of the model; None: they are all."""

    def tensor_rank(self, number: int) -> int:
        """The number of a rank in its stage. Raises ValueError: it is of another stage than is told."""
        stage, rank = divmod(number, self.ranks)
        if stage != self.stage:
            raise ValueError(f"rank {number} is not of stage {self.stage} of {self.ranks} ranks each")
        return rank

    @classmethod
    def read(cls, told: object) -> "_Told":
        """Raises ValueError: it is something else."""
        if not isinstance(told, dict):
            raise ValueError("an object is expected")
        ranks = count_field(told, "ranks", MAX_PARTS)
        if not ranks:
            raise ValueError("an engine has at least one rank")
        layouts, copies = read_layouts(told.get("pages")), told.get("copies")
        match told.get("drafter", ["", 0]):
            case [str() as identity, int() as regions] if 0 <= regions <= len(layouts):
                drafted = _Drafted(identity, regions)
            case _:
                raise ValueError("of a drafter its identity and how many of the regions it has are expected")
        stage = _read_stage(told, ranks, len(layouts))
        if copies is None:
            return cls(ranks, layouts, drafted, None, *stage)
        if not isinstance(copies, list) or len(copies) not in (0, len(layouts)):
            raise ValueError("field 'copies' has another number of regions than field 'pages'")
        if not all(isinstance(each, int) and each > 0 and ranks % each == 0 for each in copies):
            raise ValueError(f"field 'copies' must divide {ranks} ranks")
        return cls(ranks, layouts, drafted, tuple(copies), *stage)


def _read_stage(told: dict[str, object], ranks: int, regions: int) -> tuple[int, int, tuple[int, ...] | None]:
    """(Number, how many, places of its regions), see `_OwnSide.told_stage`. Raises ValueError: it is something else."""
    match told.get("stage"):
        case None:
            return 0, 1, None
        case [int() as number, int() as count, [*runs]] if 0 <= number < count <= MAX_PARTS // ranks:
            places: list[int] = []
            for run in runs:
                match run:
                    case [int() as first, int() as length] if first >= len(
                        places
                    ) and 0 < length <= regions - len(places):
                        places += range(first, first + length)
                    case _:
                        break
            if len(places) == regions and places == sorted(set(places)):
                return number, count, tuple(places)
    raise ValueError("of a stage its number, how many there are and which regions it has are expected")


def _at(places: Sequence[int], of_model: Sequence[T]) -> tuple[T, ...]:
    """Those of a stage. Raises UnlikePagesError: the other side's model has fewer."""
    if places and places[-1] >= len(of_model):
        raise UnlikePagesError(f"a stage has region {places[-1]} of a model with {len(of_model)}")
    return tuple(of_model[place] for place in places)


def _lenders(layout: KvLayout, rank: int, ranks: int, others: _Told) -> Iterator[RankPair]:
    """The transfers of a producer's stage to other ranks of this engine that keep some of what this one keeps."""
    copies = max(layout.copies, default=1)
    first = rank - rank % copies
    for lender in range(first, first + copies):
        if lender != rank:
            for producer in paired_ranks(lender, ranks, others.ranks):
                yield RankPair(producer, others.ranks, lender, ranks, stage=others.stage, stages=others.count)


def _readers(wire: WireLayout, layout: KvLayout, rank: int) -> frozenset[int]:
    found: set[int] = set()
    for region in wire.regions:
        copies = layout.copies_of(region.layer_name)
        found |= set(range(rank - rank % copies, rank - rank % copies + copies))
    return frozenset(found - {rank})


def _shares(
    own: Sequence[_Share],
    told: Sequence[PageLayout],
    pair: RankPair,
    names: tuple[str, str],
    copies: Sequence[int],
    *,
    sends: bool,
) -> tuple[list[_Share], list[PageLayout]]:
    """What a pair of ranks moves of all regions, here and there; those of which it moves nothing are missing.

    Raises:
        UnlikePagesError: the heads of a layer can't be divided so.
    """
    ours, theirs = [], []
    if len(own) != len(told):
        raise unlike_pages("regions", "a transfer", (names[0], len(own)), (names[1], len(told)))
    for mine, other, count in zip(own, told, copies, strict=True):
        sent, kept = (mine.layout, other) if sends else (other, mine.layout)
        producer, consumer = names if sends else names[::-1]
        shared = pair.share(sent, kept, producer, consumer, place=mine.place, copies=count)
        if shared is not None:
            ours.append(replace(mine, layout=shared[0] if sends else shared[1]))
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
        pages=wire_pages,
        per_block=per_block,
        renumbered=group != region.group,
    )
