"""The page table of a pool: a row for every slot of the arena, in shared memory.

The daemon alone writes it. Engines read the state of the pages that they copy.
"""

from enum import IntEnum


class PageState(IntEnum):
    """What can be done with the page in a slot."""

    FREE = 0
    """Nothing is there, or another page than the one that was asked for."""
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
    """It could not be read from SSD, or its bytes were wrong. Who pinned it must do without."""

    @property
    def is_readable(self) -> bool:
        """Whether the page's bytes may be copied out of the slot now."""
        return self in (PageState.READY, PageState.SPILLING)
