"""Which instances hold which blocks of which chain, and the linear states at the ends of these."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

NO_PARENT = 0
_MASKS_SHARED = 1 << 16


class BlockTree:
    """Block hash → the instances that hold it, as one bit mask, with lookups by bisection.

    Two bits per slot (an instance's number): "holds this block", and "holds a block whose parent this is".
    A block that an instance does not hold while it holds a child is a hole. Blocks after a hole don't count, and a
    bisection would not notice it. So holes are kept exactly, and a lookup ends before the first of them.
    They are rare, since engines evict tails before heads: failed loads, blocks held twice.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        # Equal masks are one object: 30 to 50 bytes a block otherwise.
        self._shared: dict[int, int] = {}
        # Per slot: parent → held children beyond the first, which has the bit.
        self._more_children: list[dict[int, int]] = []
        self._own: list[tuple[int, int]] = []
        self._holes: list[set[int]] = []
        self._free: list[int] = []
        self._held_bits = 0
        self._holed_bits = 0

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._masks)

    def open_slot(self) -> int:
        """A number for an instance, with nothing held."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._holes)
            self._holes.append(set())
            self._more_children.append({})
            self._own.append((self._share(held_bit(slot) * 3), self._share(held_bit(slot))))
        self._held_bits |= held_bit(slot)
        return slot

    def close_slot(self, slot: int, hashes: Sequence[int]) -> None:
        """`clear`, and the number may be given to another instance."""
        self.clear(slot, hashes)
        self._held_bits &= ~held_bit(slot)
        self._free.append(slot)

    def clear(self, slot: int, hashes: Sequence[int]) -> None:
        """The instance holds nothing any more; `hashes` is everything it held."""
        marked = [*hashes, *self._holes[slot]]
        before = list(map(self._masks.__getitem__, marked))
        without = ~(held_bit(slot) * 3)
        after = {mask: self._share(mask & without) for mask in set(before)}
        self._masks.update(zip(marked, map(after.__getitem__, before), strict=True))
        for block, mask in zip(marked, before, strict=True):
            if not after[mask]:
                del self._masks[block]
        if not self._masks:
            # A dict keeps the memory of its largest time.
            self._masks = {}
        self._more_children[slot] = {}
        self._holes[slot] = set()
        self._holed_bits &= ~held_bit(slot)

    def store(self, slot: int, parent: int, run: Sequence[int]) -> list[int]:
        """The instance now holds `run`, each block the parent of the next, after `parent` (or NO_PARENT).

        `parent` must be held.

        Returns:
            The positions in `run` that were held already.
        """
        held = held_bit(slot)
        both = held * 3
        masks = self._masks
        # Without holes, whoever held a later block of the run would hold the first.
        if run[0] not in masks and (not self._holed_bits or masks.keys().isdisjoint(run)):
            both, held = self._own[slot]
            masks.update(zip(run, repeat(both)))
            masks[run[-1]] = held
        else:
            before = list(map(masks.get, run))
            if any(mask and mask & both for mask in set(before)):
                return self._store_singly(slot, parent, run)
            after = {mask: self._share((mask or 0) | both) for mask in set(before)}
            masks.update(zip(run, map(after.__getitem__, before), strict=True))
            masks[run[-1]] = self._share((before[-1] or 0) | held)
        if parent:
            self._gain_child(slot, parent)
        return []

    def remove(self, slot: int, links: Iterable[tuple[int, int]]) -> None:
        """The instance no longer holds these blocks, which it held: (parent or NO_PARENT, block) of each."""
        masks = self._masks
        held = held_bit(slot)
        has_child = held << 1
        more = self._more_children[slot]
        pending_parent = NO_PARENT
        for parent, block in links:
            mask = masks[block] ^ held
            # Engines evict tails first: the block before is mostly this one's child.
            if pending_parent == block and block not in more:
                mask ^= has_child
            elif pending_parent:
                self._lose_child(slot, pending_parent)
                mask = masks[block] ^ held
            pending_parent = parent
            if mask & has_child:
                self._holes[slot].add(block)
                self._holed_bits |= held
            if mask:
                masks[block] = self._share(mask)
            else:
                del masks[block]
        if pending_parent:
            self._lose_child(slot, pending_parent)

    def lengths(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """How many leading blocks of `chain` instances hold: (their bits, blocks), longest first, only above 0.

        `chain` must not be empty.
        """
        holders = self._masks.get(chain[0], 0) & self._held_bits
        if not holders:
            return []
        found: list[tuple[int, int]] = []
        holed = holders & self._holed_bits
        if holders != holed:
            self._bisect(found, chain, holders ^ holed, len(chain))
        if holed:
            for bit in _bits(holed):
                holes = self._holes[slot_of(bit)]
                end = next((place for place, block in enumerate(chain) if block in holes), len(chain))
                self._bisect(found, chain, bit, end)
            found.sort(key=lambda entry: -entry[1])
        return found

    def _bisect(self, found: list[tuple[int, int]], chain: Sequence[int], holders: int, length: int) -> None:
        """As `lengths`, of `holders`, which all hold the first block and nothing behind a hole up to `length`."""
        get = self._masks.get
        longest = get(chain[length - 1], 0) & holders
        if longest:
            found.append((longest, length))
            holders ^= longest
        while holders:
            # Of those left, the longest is in [low, high).
            low, high, longest = 1, length, holders
            while high - low > 1:
                middle = (low + high) // 2
                if there := get(chain[middle - 1], 0) & holders:
                    low, longest = middle, there
                else:
                    high = middle
            found.append((longest, low))
            holders ^= longest
            length = low

    def _store_singly(self, slot: int, parent: int, run: Sequence[int]) -> list[int]:
        held = held_bit(slot)
        already = []
        for place, block in enumerate(run):
            mask = self._masks.get(block, 0)
            if mask & held:
                already.append(place)
            else:
                self._fill_hole(slot, block)
                self._masks[block] = self._share(mask | held)
                if parent:
                    self._gain_child(slot, parent)
            parent = block
        return already

    def _gain_child(self, slot: int, parent: int) -> None:
        mask = self._masks[parent]
        has_child = held_bit(slot) << 1
        if mask & has_child:
            more = self._more_children[slot]
            more[parent] = more.get(parent, 0) + 1
        else:
            self._masks[parent] = self._share(mask | has_child)

    def _lose_child(self, slot: int, parent: int) -> None:
        more = self._more_children[slot]
        count = more.get(parent)
        if count is None:
            mask = self._masks[parent] ^ held_bit(slot) << 1
            if mask:
                self._masks[parent] = self._share(mask)
            else:
                del self._masks[parent]
            if not mask & held_bit(slot):
                self._fill_hole(slot, parent)
        elif count == 1:
            del more[parent]
        else:
            more[parent] = count - 1

    def _fill_hole(self, slot: int, block: int) -> None:
        holes = self._holes[slot]
        if block in holes:
            holes.remove(block)
            if not holes:
                self._holed_bits &= ~held_bit(slot)

    def _share(self, mask: int) -> int:
        if len(self._shared) > _MASKS_SHARED:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


def held_bit(slot: int) -> int:
    """The bit of the instance with that number in the masks of `BlockTree.lengths`."""
    return 1 << 2 * slot


def slot_of(bit: int) -> int:
    """The instance's number, given its `held_bit`."""
    return bit.bit_length() >> 1


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


class Reach(NamedTuple):
    """How far some instances can reuse one chain."""

    holders: int
    """Their bits, as in `BlockTree.lengths`."""
    attention_blocks: int
    """Leading blocks whose full attention they hold."""
    reusable_blocks: int
    """Leading blocks after which a prefill can start there."""


class StateEnds:
    """Block hash → instances that hold the state at the end of that block, in every linear group of theirs."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, holder: int, block: int) -> None:
        """The instance with the bit `holder` has the state at the end of `block`."""
        self._masks[block] = self._masks.get(block, 0) | holder

    def discard(self, holder: int, blocks: Iterable[int]) -> None:
        """`holder` has these states no more (or never had them in all groups)."""
        for block in blocks:
            mask = self._masks.get(block, 0) & ~holder
            if mask:
                self._masks[block] = mask
            else:
                self._masks.pop(block, None)
        if not self._masks:
            self._masks = {}

    def last_end(self, holder: int, chain: Sequence[int], end: int) -> int:
        """The last boundary of `chain`, at most `end` blocks, where `holder` has its states; 0 without."""
        while end and not self._masks.get(chain[end - 1], 0) & holder:
            end -= 1
        return end

    def reaches(self, chain: Sequence[int], lengths: Sequence[tuple[int, int]]) -> list[Reach]:
        """How far instances can reuse `chain`, given what `BlockTree.lengths` says of it (not empty)."""
        found: list[Reach] = []
        longest = lengths[0][1]
        # The end of what is held is where the state mostly is: only without it, go through the chain.
        waiting = self._settle(found, lengths, chain[longest - 1], longest)
        if waiting and not self._masks.keys().isdisjoint(chain):
            backwards = chain[longest - 1 :: -1]
            for block in filter(self._masks.__contains__, backwards):
                waiting = self._settle(found, waiting, block, longest - backwards.index(block))
                if not waiting:
                    break
        return found + [Reach(holders, blocks, 0) for holders, blocks in waiting]

    def _settle(
        self, found: list[Reach], waiting: Sequence[tuple[int, int]], block: int, end: int
    ) -> Sequence[tuple[int, int]]:
        """Move those who can go on from `block`, at `end`, from `waiting` to `found`."""
        ready = self._masks.get(block, 0)
        left = []
        for holders, blocks in waiting:
            done = holders & ready if blocks >= end else 0
            if done:
                found.append(Reach(done, blocks, end))
            if done != holders:
                left.append((holders ^ done, blocks))
        return left
