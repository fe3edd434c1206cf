"""One rank's part of a pool's pages, and the copies between it and the engine's blocks."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from prfaas.core.pool.geometry import PageGroup, PoolGeometry, aligned_bytes
from prfaas.serving.engines.vllm.arena_pages import ArenaPages, Bytes1D
from prfaas.serving.engines.vllm.layout import EngineRegion, KvLayout
from prfaas.serving.engines.vllm.metadata import PoolPages
from prfaas.serving.pool.protocol import PageRef

# A preemption waits for one copy of that size at most, and so does another load.
_PIECE_BYTES = 8 << 20


def pool_geometry(layout: KvLayout, fingerprint: str, ranks: int) -> PoolGeometry:
    """The pages of an engine's pool: a group's layers lie in a page in the layout's order.

    Args:
        layout: of one rank's KV; all ranks have the same.
        fingerprint: of everything that gives pages their meaning.
        ranks: tensor-parallel ranks.

    Raises:
        PoolGeometryError: this model can't have a pool.
    """
    sizes: dict[int, int] = {}
    for region in layout.regions:
        sizes[region.group.index] = sizes.get(region.group.index, 0) + region.page_bytes
    groups = {region.group.index: region.group for region in layout.regions}
    return PoolGeometry(
        fingerprint,
        ranks,
        tuple(
            PageGroup(index, group.kind, group.block_tokens, group.window_tokens, aligned_bytes(sizes[index]))
            for index, group in sorted(groups.items())
        ),
    )


class _GroupPart:
    """This rank's part of the pages of one group."""

    def __init__(self, regions: Sequence[EngineRegion], rank_bytes: int, offset: int) -> None:
        self.regions = regions
        self.rank_bytes = rank_bytes
        self.offset = offset
        """Where it begins in a page."""


class RankPages:
    """Copies whole blocks between the engine and an arena. Threads may copy different blocks at once."""

    def __init__(self, layout: KvLayout, geometry: PoolGeometry, rank: int) -> None:
        self._parts = {
            group.index: _GroupPart(
                [region for region in layout.regions if region.group.index == group.index],
                group.rank_bytes,
                geometry.rank_offset(group.index, rank),
            )
            for group in geometry.groups
        }

    def rank_bytes(self, group: int) -> int:
        """Bytes of a page of that group that this rank copies."""
        return self._parts[group].rank_bytes

    def pieces(self, part: PoolPages) -> list[PoolPages]:
        """Cut into what is copied in one go."""
        count = max(1, _PIECE_BYTES // self._parts[part.group].rank_bytes)
        return [part.cut(first, first + count) for first in range(0, len(part.block_ids), count)]

    def mark_written(self, group: int) -> None:
        """Remember that what the compute stream has queued so far must be done before a copy of this group."""
        for region in self._parts[group].regions:
            region.pages.mark_written()

    def load(self, arena: Bytes1D, group: int, block_ids: Sequence[int], pages: Sequence[PageRef]) -> None:
        """Fill blocks from their pages; returns when all is in place.

        Raises:
            ValueError: a block that no request may write, or a page outside the arena.
        """
        part = self._parts[group]
        places, start = self._places(part, arena, block_ids, pages), 0
        for region in part.regions:
            region.pages.load_from(places, start)
            start += region.page_bytes
        for region in part.regions:
            region.pages.flush()

    def store(self, arena: Bytes1D, group: int, block_ids: Sequence[int], pages: Sequence[PageRef]) -> None:
        """Copy blocks into their pages; returns when the blocks are no longer needed.

        Raises:
            ValueError: a block that no request may read, or a page outside the arena.
        """
        part = self._parts[group]
        places, start = self._places(part, arena, block_ids, pages), 0
        for region in part.regions:
            region.pages.store_to(places, start)
            start += region.page_bytes
        if start < part.rank_bytes:
            for offset in places.offsets:
                arena[offset + start : offset + part.rank_bytes] = 0

    def checksum(self, arena: Bytes1D, group: int, page: PageRef) -> int:
        """xxh3_64 of this rank's part as it lies in the arena."""
        part = self._parts[group]
        offset = page.offset + part.offset
        return xxh3_64_intdigest(arena[offset : offset + part.rank_bytes].data)

    @staticmethod
    def _places(
        part: _GroupPart, arena: Bytes1D, block_ids: Sequence[int], pages: Sequence[PageRef]
    ) -> ArenaPages:
        if 0 in block_ids:
            raise ValueError("a block to copy is vLLM's null block")
        if len(block_ids) != len(pages):
            raise ValueError(f"{len(block_ids)} blocks have {len(pages)} pages")
        offsets = [page.offset + part.offset for page in pages]
        if offsets and not 0 <= min(offsets) <= max(offsets) <= len(arena) - part.rank_bytes:
            raise ValueError("a page lies outside the arena")
        return ArenaPages(arena, block_ids, offsets)
