"""The pages that a prefix takes from one pool to another, in the order in which they are copied."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.depth import PrefixDepth, needed_blocks, usable_end
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.core.pool.keys import KeyChain, page_id, tenant_id


@dataclass(frozen=True, slots=True)
class PrefixPage:
    """One page of a prefix."""

    page_id: bytes
    group: int
    end_tokens: int
    """Where its block ends in the prefix."""
    identity: PageIdentity | None
    """Of the lead group's pages."""
    nbytes: int
    """All ranks' parts."""
    is_tail: bool
    """A state or a part of a window: without it, the prefix is of no use at its end."""


class PrefixPages:
    """The pages that a prefill needs to go on behind a prefix.

    Tails come first, so that it shows at once whether they are still there. Full attention follows from the head on:
    what breaks off leaves a shorter prefix that can be used, where the model has nothing but full attention.
    """

    def __init__(self, geometry: PoolGeometry, token_ids: Sequence[int], salt: str, adapter: str) -> None:
        """The prefix ends at the last boundary of all groups' blocks in `token_ids`."""
        block = math.lcm(*(group.block_tokens for group in geometry.groups))
        self._geometry = geometry
        self._chain = KeyChain(geometry.step_tokens, salt, adapter)
        self._chain.extend(token_ids)
        self.tenant = tenant_id(salt)
        """Whose pages they are."""
        self.end_tokens = len(token_ids) // block * block
        """0: it is too short for any page."""
        self.pages: tuple[PrefixPage, ...] = ()
        if self.end_tokens:
            pages = [
                self._page(index, number, token_ids, salt, adapter)
                for index, blocks in needed_blocks(geometry.groups, 0, self.end_tokens)
                for number in blocks
            ]
            self.pages = tuple(
                sorted(pages, key=lambda each: (not each.is_tail, each.end_tokens, each.group))
            )

    @property
    def key(self) -> bytes:
        """The key of the whole prefix."""
        return self._chain.key_at(self.end_tokens)

    def depth(self, held: Collection[bytes]) -> PrefixDepth:
        """How far a prefill can go on if these pages are held, of those of this prefix."""
        by_group: dict[int, set[bytes]] = {group.index: set() for group in self._geometry.groups}
        for page in self.pages:
            if page.page_id in held:
                by_group[page.group].add(page.page_id[:-1])
        return usable_end(
            self._geometry.groups,
            self._chain.keys,
            self._geometry.step_tokens,
            by_group,
            0,
            self.end_tokens,
        )

    def _page(self, index: int, number: int, token_ids: Sequence[int], salt: str, adapter: str) -> PrefixPage:
        group = self._geometry.group(index)
        start, end = number * group.block_tokens, (number + 1) * group.block_tokens
        identity = None
        if index == self._geometry.lead.index:
            identity = PageIdentity.of(self._chain, token_ids, range(start, end), salt, adapter)
        return PrefixPage(
            page_id(self._chain.key_at(end), index),
            index,
            end,
            identity,
            group.rank_bytes * self._geometry.ranks,
            is_tail=group.kind is not GroupKind.FULL,
        )


def batches(pages: Sequence[PrefixPage], most_bytes: int, most_pages: int) -> list[tuple[PrefixPage, ...]]:
    """Cut into runs of so many bytes and pages at most, each of one page at least."""
    runs: list[tuple[PrefixPage, ...]] = []
    run: list[PrefixPage] = []
    run_bytes = 0
    for page in pages:
        if run and (run_bytes + page.nbytes > most_bytes or len(run) == most_pages):
            runs.append(tuple(run))
            run, run_bytes = [], 0
        run.append(page)
        run_bytes += page.nbytes
    if run:
        runs.append(tuple(run))
    return runs
