"""The page table of a pool: a row for every slot of the arena, in shared memory.

The daemon alone writes it. Engines read the state of the pages that they copy.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas.serving.pool.processes import Owner

MOST_RANKS = 64

# State, group, whether readers must verify, use, process group, start of its leader, engine, tenant, page id, padding,
# last use, ranks that have not finished their share. Checksums of the ranks follow.
_ROW = struct.Struct("<BBBxIQQ8s8s17s7xdQ")
_LAST_USE = struct.Struct("<d")
_MASK = struct.Struct("<Q")
_USE = struct.Struct("<I")
_VERIFY_AT = 2
_USE_AT = 4
_LAST_USE_AT = _ROW.size - 16
_MASK_AT = _ROW.size - 8
_USE_BITS = 32
_ROW_MASK = (1 << _USE_BITS) - 1


class PageState(IntEnum):
    """State of the page in a slot."""

    FREE = 0
    """Empty, or another page than the requested one."""
    WRITING = 1
    """An engine fills it."""
    READY = 2
    """Its bytes are there and do not change as long as the row's use is the same."""
    SPILLING = 3
    """As READY, and it is being written to SSD at the moment."""
    ON_SSD = 4
    """It is on SSD only. No slot has this state."""
    PROMOTING = 5
    """It is being read from SSD into its slot."""
    FAILED = 6
    """It could not be read from SSD, or its bytes were wrong. A load that pinned it must do without."""

    @property
    def is_readable(self) -> bool:
        """True if the page's bytes may be copied out of the slot now."""
        return self in (PageState.READY, PageState.SPILLING)


_STATES = tuple(PageState)


def are_readable(states: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """`is_readable` of every one of `PageTable.states`."""
    readable: npt.NDArray[np.bool_] = (states == PageState.READY) | (states == PageState.SPILLING)
    return readable


class PageRow(NamedTuple):
    """A row of the table."""

    row: int
    state: PageState
    group: int
    owner: Owner
    """The engine that reserved the page."""
    tenant: bytes
    page_id: bytes
    last_use_s: float
    ranks_left: int
    checksums: tuple[int, ...]


def row_bytes(ranks: int) -> int:
    """Bytes of a row for pages with shares of `ranks` ranks."""
    return _ROW.size + 8 * ranks


def row_of(slot: int) -> int:
    """The row that the slot of a `PageRef` names."""
    return slot & _ROW_MASK


class PageTable:
    """The table over its bytes in the arena; also the engines' view of it."""

    def __init__(self, rows: memoryview, ranks: int) -> None:
        """`rows`: a multiple of `row_bytes(ranks)`, zeros in a new arena."""
        self._rows = rows
        self._row_bytes = row_bytes(ranks)
        self._checksums = struct.Struct(f"<{ranks}Q")
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._rows) // self._row_bytes

    def slot(self, row: int) -> int:
        """The slot number of a `PageRef` for the row's present use."""
        return row | int(_USE.unpack_from(self._rows, row * self._row_bytes + _USE_AT)[0]) << _USE_BITS

    def state(self, slot: int) -> PageState:
        """State of a `PageRef`'s page; FREE if its row has another use or does not exist."""
        row, use = slot & _ROW_MASK, slot >> _USE_BITS
        at = row * self._row_bytes
        if at >= len(self._rows) or _USE.unpack_from(self._rows, at + _USE_AT)[0] != use:
            return PageState.FREE
        state = self._rows[at]
        return _STATES[state] if state < len(_STATES) else PageState.FREE

    def states(self, slots: Sequence[int]) -> npt.NDArray[np.uint8]:
        """`state` of each slot, as numbers: a tenth of the time where there are many."""
        named = np.array(slots, np.uint64)
        rows = (named & np.uint64(_ROW_MASK)).astype(np.int64)
        is_there = rows < len(self)
        rows[~is_there] = 0
        # A use is over before its row says FREE: so a state that was read before its use was still that use's.
        states = self._column(np.dtype(np.uint8), 0)[rows]
        uses = self._column(np.dtype("<u4"), _USE_AT)[rows]
        states[~is_there | (uses != named >> np.uint64(_USE_BITS)) | (states >= len(_STATES))] = (
            PageState.FREE
        )
        return states

    def are_readable(self, slots: Sequence[int]) -> bool:
        """True if all these slots may be copied out."""
        return bool(are_readable(self.states(slots)).all())

    def checksums_to_verify(self, slots: Sequence[int], rank: int) -> dict[int, int]:
        """By slot: the checksum of a rank's share, of those of these pages that readers must verify."""
        must = self._column(np.dtype(np.uint8), _VERIFY_AT)[[row_of(slot) for slot in slots]]
        return {
            slots[at]: self.read(row_of(slots[at])).checksums[rank] for at in np.flatnonzero(must).tolist()
        }

    def begin(
        self, row: int, state: PageState, page_id: bytes, owner: Owner, tenant: bytes, ranks_left: int
    ) -> int:
        """Start a new use of the row. Returns the slot of its `PageRef`s."""
        at = row * self._row_bytes
        use = (int(_USE.unpack_from(self._rows, at + _USE_AT)[0]) + 1) & _ROW_MASK
        # The state comes last: a row that a killed daemon left incomplete is FREE.
        _ROW.pack_into(
            self._rows, at, PageState.FREE, page_id[16], 0, use, owner.process_group, owner.started,
            owner.engine, tenant, page_id, 0.0, ranks_left,
        )  # fmt: skip
        self._rows[at] = state
        return row | use << _USE_BITS

    def set_state(self, row: int, state: PageState) -> None:
        """Set the state; the row's use stays the same."""
        self._rows[row * self._row_bytes] = state

    def set_ranks_left(self, row: int, ranks_left: int) -> None:
        """Set the ranks that have not finished their shares: bit r for rank r."""
        _MASK.pack_into(self._rows, row * self._row_bytes + _MASK_AT, ranks_left)

    def set_checksums(self, row: int, checksums: Sequence[int]) -> None:
        """Set the checksum of each rank's share."""
        self._checksums.pack_into(self._rows, row * self._row_bytes + _ROW.size, *checksums)

    def set_must_verify(self, row: int, must: bool) -> None:
        """Set whether readers must compare the page's shares with their checksums."""
        self._rows[row * self._row_bytes + _VERIFY_AT] = must

    def set_last_use(self, row: int, last_use_s: float) -> None:
        """Set the time of the last use, in Unix time; the next daemon orders pages by it."""
        _LAST_USE.pack_into(self._rows, row * self._row_bytes + _LAST_USE_AT, last_use_s)

    def read(self, row: int) -> PageRow:
        """Read a row."""
        at = row * self._row_bytes
        state, group, _, _, process_group, started, engine, tenant, page_id, last_use_s, ranks_left = (
            _ROW.unpack_from(self._rows, at)
        )
        known = _STATES[state] if state < len(_STATES) else PageState.FREE
        checksums = self._checksums.unpack_from(self._rows, at + _ROW.size)
        return PageRow(
            row,
            known,
            group,
            Owner(process_group, started, engine),
            tenant=tenant,
            page_id=page_id,
            last_use_s=last_use_s,
            ranks_left=ranks_left,
            checksums=checksums,
        )

    def _column(self, kind: "np.dtype[Any]", offset: int) -> npt.NDArray[Any]:
        """One field of all rows. Not to be kept: the arena can't be unmapped as long as anybody refers to it."""
        return np.ndarray((len(self),), kind, self._rows, offset, (self._row_bytes,))

    def used_rows(self) -> Iterator[PageRow]:
        """Every row that is not FREE."""
        states = self._column(np.dtype(np.uint8), 0)
        for row in np.flatnonzero(states).tolist():
            yield self.read(row)
