"""Slots for pages of different sizes in one memory: equal slabs, each cut into slots of one size while it is used.

A slab whose last page goes is cut anew for whatever comes next, so no size keeps memory that it does not use.
"""

from collections.abc import Collection
from heapq import heappop, heappush

from prfaas.core.pool.geometry import whole_sectors

# The part of a slab that no page fills, at most, where a slab size allows it.
_TOLERATED_WASTE = 1 / 16
_MOST_SLABS = 4096
_MOST_CANDIDATES = 1024


def slab_size(slot_bytes: Collection[int], memory_bytes: int) -> int:
    """The size of a slab that slots of all these sizes fill well.

    Large enough that there are at most 4096 slabs, small enough that every size can have one. Of those sizes the
    smallest in which at most 1/16 is wasted, or else the one that wastes least. It is a multiple of one of the sizes.

    Raises:
        ValueError: the memory is too small for one slab of each size.
    """
    largest = max(slot_bytes)
    most = memory_bytes // len(slot_bytes)
    if most < largest:
        raise ValueError(
            f"{memory_bytes} bytes are too little: pages of up to {largest} bytes in {len(slot_bytes)} sizes "
            f"need at least {largest * len(slot_bytes)}"
        )
    least = max(largest, min(whole_sectors(memory_bytes // _MOST_SLABS), most))
    candidates = {
        size * count
        for size in slot_bytes
        for count in range(-(-least // size), min(most // size, -(-least // size) + _MOST_CANDIDATES) + 1)
    }
    if not candidates:
        candidates = {most // largest * largest}
    waste = {slab: max(slab % size for size in slot_bytes) / slab for slab in candidates}
    good = [slab for slab, wasted in waste.items() if wasted <= _TOLERATED_WASTE]
    return min(good) if good else min(waste, key=lambda slab: (waste[slab], slab))


class SlabAllocator:
    """Which slots are taken. Slot numbers are `slab * most_slots + place`, with `most_slots` of the smallest size.

    Of the slabs with free slots of a size the first in memory is filled first, so that the last ones run empty.
    """

    def __init__(self, slab_bytes: int, slot_bytes: Collection[int]) -> None:
        """There is no slab until `add`."""
        self.slab_bytes = slab_bytes
        self.most_slots = slab_bytes // min(slot_bytes)
        """Slots of a slab, at most."""
        # Slot size → heap of slabs with free slots, and the same as a set; outdated entries are passed over.
        self._open: dict[int, list[int]] = {size: [] for size in slot_bytes}
        self._opened: dict[int, set[int]] = {size: set() for size in slot_bytes}
        self._empty: list[int] = []
        self._known: set[int] = set()
        # Slab → its slot size, its free slots and those taken; only while it has taken ones.
        self._size: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._taken: dict[int, set[int]] = {}

    def add(self, slab: int) -> None:
        """That slab can be used from now on, if it can't already."""
        if slab not in self._known:
            self._known.add(slab)
            heappush(self._empty, slab)

    @property
    def known_slabs(self) -> int:
        """How many were added."""
        return len(self._known)

    def take(self, slot_bytes: int) -> int | None:
        """A free slot of that size, None if there is none and no slab is empty."""
        slabs = self._open[slot_bytes]
        while slabs:
            slab = slabs[0]
            free = self._free.get(slab, [])
            while free and free[0] in self._taken[slab]:
                heappop(free)
            if free and self._size[slab] == slot_bytes:
                return self._take_from(slab, free)
            self._opened[slot_bytes].remove(heappop(slabs))
        while self._empty:
            slab = heappop(self._empty)
            if slab not in self._size:
                return self._take_from(slab, self._cut(slab, slot_bytes))
        return None

    def claim(self, slot: int, slot_bytes: int) -> bool:
        """Take a certain slot, as it was before a restart. False if it is taken or its slab has another size.

        It stays among the free ones, and its slab among the empty ones, until `take` comes to it.
        """
        slab, place = divmod(slot, self.most_slots)
        if slab not in self._known:
            return False
        if slab not in self._size:
            self._cut(slab, slot_bytes)
        is_free = self._size[slab] == slot_bytes and place < self.slab_bytes // slot_bytes
        if is_free and place not in self._taken[slab]:
            self._taken[slab].add(place)
            return True
        if not self._taken[slab]:
            self._release(slab)
        return False

    def give_back(self, slot: int) -> None:
        """A slot is no longer taken."""
        slab, place = divmod(slot, self.most_slots)
        self._taken[slab].remove(place)
        if not self._taken[slab]:
            self._release(slab)
            return
        free = self._free[slab]
        heappush(free, place)
        self._reopen(slab)

    def offset(self, slot: int) -> int:
        """Where a taken slot begins, from the first slab on."""
        slab, place = divmod(slot, self.most_slots)
        return slab * self.slab_bytes + place * self._size[slab]

    def slot_at(self, offset: int) -> int:
        """The taken slot that begins there."""
        slab, inside = divmod(offset, self.slab_bytes)
        return slab * self.most_slots + inside // self._size[slab]

    def size_of(self, slot: int) -> int:
        """Bytes of a taken slot."""
        return self._size[slot // self.most_slots]

    def neighbours(self, slot: int) -> list[int]:
        """All taken slots of the slab of a taken slot, itself included."""
        slab = slot // self.most_slots
        return [slab * self.most_slots + place for place in self._taken[slab]]

    def taken_bytes(self) -> int:
        """Of all slots that are taken."""
        return sum(len(taken) * self._size[slab] for slab, taken in self._taken.items())

    def _cut(self, slab: int, slot_bytes: int) -> list[int]:
        self._size[slab] = slot_bytes
        self._taken[slab] = set()
        free = self._free[slab] = list(range(self.slab_bytes // slot_bytes))
        self._reopen(slab)
        return free

    def _reopen(self, slab: int) -> None:
        size = self._size[slab]
        if slab not in self._opened[size]:
            self._opened[size].add(slab)
            heappush(self._open[size], slab)

    def _take_from(self, slab: int, free: list[int]) -> int:
        place = heappop(free)
        self._taken[slab].add(place)
        return slab * self.most_slots + place

    def _release(self, slab: int) -> None:
        del self._size[slab], self._free[slab], self._taken[slab]
        heappush(self._empty, slab)
