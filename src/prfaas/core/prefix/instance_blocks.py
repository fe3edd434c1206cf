"""The blocks that one instance holds, KV group by KV group, as its events tell."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prfaas.core.pool.depth import common_end, window_end
from prfaas.core.prefix.block_tree import NO_PARENT, BlockTree, StateEnds, held_bit
from prfaas.core.prefix.digests import ExtraCopies, RemovedHashes, StoredDigests
from prfaas.core.prefix.events import ATTENTION_KINDS
from prfaas.core.prefix.hashing import WORDS, PackedHashMap

LINEAR_KINDS = frozenset({"mamba"})


class GroupBlocks:
    """Blocks of one engine in a KV group that keeps less than every token.

    A block stands for a prefix: of a linear group the engine has the state at its end, of a window group the last
    block before its end.
    """

    __slots__ = ("_by_engine_hash", "_held", "block_tokens", "copies")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.copies = ExtraCopies()
        self._by_engine_hash: dict[int, int] = {}
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_engine_hash)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def known(self, engine_hash: int) -> int | None:
        """The index's hash of a block that is held, None if it is not."""
        return self._by_engine_hash.get(engine_hash)

    def store(self, engine_hash: int, block: int) -> None:
        """One more copy of that block is held."""
        if engine_hash in self._by_engine_hash:
            self.copies.add(engine_hash)
        else:
            self._by_engine_hash[engine_hash] = block
            self._held.add(block)

    def remove(self, engine_hash: int) -> int | None:
        """Forget one copy. Returns the index's hash of the block if that was the last, else None."""
        if self.copies.take(engine_hash):
            return None
        block = self._by_engine_hash.pop(engine_hash, None)
        if block is not None:
            self._held.remove(block)
        return block

    def blocks(self) -> list[int]:
        """The index's hashes of all that is held."""
        return list(self._held)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._by_engine_hash = {}
        self.copies.clear()
        self._held = set()


class WindowGroup(GroupBlocks):
    """The blocks of a sliding-window group, or of a second full-attention group."""

    __slots__ = ("_blocks", "window_tokens")

    def __init__(self, block_tokens: int, window_tokens: int | None) -> None:
        """A token sees `window_tokens` tokens, itself included; None: all of them."""
        super().__init__(block_tokens)
        self.window_tokens = window_tokens
        self._blocks = None if window_tokens is None else -(-(window_tokens - 1) // block_tokens)

    def rule(self, chain: Sequence[int], block_tokens: int) -> Callable[[int], int]:
        """The rule for `common_end`: which end, in blocks of `chain` (`block_tokens` tokens each), suits the window.

        No end where the window's blocks are smaller than those: the chain says nothing of them.
        """
        step, rest = divmod(self.block_tokens, block_tokens)
        return _no_end if rest else partial(window_end, chain, self._held, step, self._blocks)


def _no_end(_end: int) -> int:
    return 0


_ENGINE_TIER = (None, "GPU")


class InstanceBlocks:
    """One instance's part of the index: which of its engine's hashes are which blocks of ours, group by group.

    The first full-attention group that stores something leads: its chains say what a hash stands for. Any other
    one, and a group of an unknown kind, counts as a window over everything: so no more is claimed than is held.
    """

    def __init__(self, tree: BlockTree, states: StateEnds) -> None:
        self.block_tokens: int | None = None
        """Tokens per full-attention block; None until one was stored."""
        self.lookahead_tokens = 0
        """Tokens behind a block that its hash covers too."""
        self.has_learned = False
        """A group or the block size is new. The index sets it back."""
        self.count = 0
        """Blocks and states indexed; copies don't count."""
        self.unlinked = 0
        """Blocks passed over: the block before them is unknown, or their tokens alone don't identify them."""
        self.refused = 0
        """Blocks for which there was no room."""
        self.linear: dict[int | None, GroupBlocks] = {}
        self.windows: dict[int | None, WindowGroup] = {}
        self.slot = tree.open_slot()
        self.bit = held_bit(self.slot)
        self._tree = tree
        self._states = states
        self._attention_group: int | None = None
        self._hash_map = PackedHashMap()
        self.most_engine_blocks: int | None = None
        """Blocks that the engine has, of all groups together; None where that is not known."""
        self._has_tiers = self._doubts_copies = False
        self._copies = ExtraCopies()
        self._leaving = array(WORDS)
        # (group, engine hash) → copies of states and windows that came before their attention blocks.
        self._early: dict[tuple[int | None, int], int] = {}

    def stored(self, event: StoredDigests, most: int) -> None:
        """Apply `event`, but let `count` not grow above `most`."""
        if self._leaving:
            self._leave()
        self._has_tiers |= event.medium not in _ENGINE_TIER
        if self._is_attention(event):
            self._store_attention(event, most)
        elif (group := self._group(event)) is not None:
            for engine_hash in event.hashes:
                self._store_in(group, event.group, engine_hash, most)
        self._check_copies()

    def removed(self, event: RemovedHashes) -> None:
        """Apply `event`; blocks that are not known are passed over."""
        if event.group == self._attention_group:
            # Many events together cost half as much.
            self._leaving += array(WORDS, event.hashes)
            return
        group = self._known_group(event.group)
        if group is not None:
            for engine_hash in event.hashes:
                self._remove_from(group, event.group, engine_hash)

    def end_batch(self) -> None:
        """All events of one batch have been given."""
        if self._leaving:
            self._leave()
        if self._early:
            # What is still not known by its hash won't be.
            self.unlinked += sum(self._early.values())
            self._early = {}

    def clear(self) -> None:
        """The engine holds nothing any more. Its groups and its block size stay what they are."""
        self._tree.clear(self.slot, self._hash_map.hashes())
        self._forget()

    def close(self) -> None:
        """Leave the index: `clear`, and free the slot. This object must not be used after that."""
        self._tree.close_slot(self.slot, self._hash_map.hashes())
        self._forget()

    def reusable_blocks(self, chain: Sequence[int], blocks: int, *, needs_states: bool) -> int:
        """The last boundary at which states and windows are held, where the chain's first `blocks` are held."""
        block_tokens = self.block_tokens or 1
        rules = [group.rule(chain, block_tokens) for group in self.windows.values()]
        if needs_states:
            rules.append(partial(self._states.last_end, self.bit, chain))
        return common_end(blocks, rules)

    def _is_attention(self, event: StoredDigests) -> bool:
        """Whether `event` is of the leading group. The first such event chooses that group."""
        if self.block_tokens is not None:
            return event.group == self._attention_group
        if event.kind not in ATTENTION_KINDS or event.block_tokens < 1 or event.digests is None:
            return False
        self._attention_group, self.block_tokens = event.group, event.block_tokens
        self.lookahead_tokens = event.lookahead_tokens
        self.has_learned = True
        return True

    def _known_group(self, group: int | None) -> GroupBlocks | None:
        linear = self.linear.get(group)
        return linear if linear is not None else self.windows.get(group)

    def _group(self, event: StoredDigests) -> GroupBlocks | None:
        """The group of `event`; None if the event says too little about it."""
        known = self._known_group(event.group)
        if known is not None or event.group is None or event.block_tokens < 1:
            return known
        self.has_learned = True
        if event.kind in LINEAR_KINDS:
            # What was complete without this group is incomplete now.
            for group in self.linear.values():
                self._states.discard(self.bit, group.blocks())
            self.linear[event.group] = new = GroupBlocks(event.block_tokens)
            return new
        self.windows[event.group] = window = WindowGroup(event.block_tokens, event.window_tokens)
        return window

    def _store_attention(self, event: StoredDigests, most: int) -> None:
        engine_hashes = array(WORDS, event.hashes)
        if event.digests is None:
            # Another tier has them too.
            for engine_hash in engine_hashes:
                if self._hash_map.get(engine_hash) is not None:
                    self._copies.add(engine_hash)
            return
        if event.block_tokens > (self.block_tokens or 0) and event.medium in _ENGINE_TIER:
            # The first one was the part of a block at a prompt's end.
            self.clear()
            self.block_tokens = event.block_tokens
            self.has_learned = True
        if event.block_tokens != self.block_tokens or not engine_hashes:
            return
        parent = NO_PARENT if event.parent is None else self._hash_map.get(event.parent)
        if parent is None:
            self.unlinked += len(engine_hashes)
            return
        is_alike = event.lookahead_tokens == self.lookahead_tokens
        plain = min(len(event.digests), len(engine_hashes)) if is_alike else 0
        chain = event.digests[: self._room(plain, len(engine_hashes), most)]
        if chain:
            self._link(engine_hashes[: len(chain)], parent, chain)
        if self._early:
            self._settle(most)

    def _check_copies(self) -> None:
        """Count no block of an engine twice any more once that would make more blocks than the engine has.

        vLLM (0.32, `kv_cache_report_mode: full`) announces cache hits exactly as it announces new blocks. What is
        counted twice by that is noticed before the engine first evicts, since it does so only when all blocks are in
        use. Of what is really held twice too little is claimed from then on, which costs some computing.
        """
        if self.most_engine_blocks is None or self._has_tiers:
            return
        groups = (*self.linear.values(), *self.windows.values())
        every = (self._copies, *(group.copies for group in groups))
        extra = sum(copies.count for copies in every)
        if extra and self._doubts_copies | (self.count + extra > self.most_engine_blocks):
            self._doubts_copies = True
            for copies in every:
                copies.clear()

    def _room(self, plain: int, blocks: int, most: int) -> int:
        """How many of `blocks`, of which the first `plain` can be indexed, are."""
        taken = min(plain, max(most - self.count, 0))
        if taken < blocks:
            self.unlinked += blocks - plain
            self.refused += plain - taken
        return taken

    def _link(self, engine_hashes: "array[int]", parent: int, chain: Sequence[int]) -> None:
        already = self._tree.store(self.slot, parent, chain)
        start = 0
        for end in (*already, len(chain)):
            if end > start:
                run_parent = chain[start - 1] if start else parent
                self._hash_map.add(engine_hashes[start:end], run_parent, chain[start:end])
            start = end + 1
        self.count += len(chain) - len(already)
        if already and self._hash_map.get(engine_hashes[already[-1]]) != chain[already[-1]]:
            # The engine's hashes mean something else than before: it is a new process that was not noticed.
            self.clear()
        else:
            for place in already:
                self._copies.add(engine_hashes[place])

    def _leave(self) -> None:
        leaving: Iterable[int] = self._leaving
        if self._copies.count:
            leaving = [each for each in leaving if not self._copies.take(each)]
        links = self._hash_map.pop_each(leaving)
        self._tree.remove(self.slot, links)
        self.count -= len(links)
        self._leaving = array(WORDS)

    def _store_in(self, group: GroupBlocks, number: int | None, engine_hash: int, most: int) -> None:
        block = group.known(engine_hash)
        if block is None:
            block = self._hash_map.get(engine_hash)
            if block is None:
                self._early[number, engine_hash] = self._early.get((number, engine_hash), 0) + 1
                return
            if self.count >= most:
                self.refused += 1
                return
            self.count += 1
        group.store(engine_hash, block)
        if number in self.linear and all(block in each for each in self.linear.values()):
            self._states.add(self.bit, block)

    def _remove_from(self, group: GroupBlocks, number: int | None, engine_hash: int) -> None:
        early = self._early.get((number, engine_hash))
        if early is not None:
            self._early[number, engine_hash] = early - 1
            return
        before = len(group)
        block = group.remove(engine_hash)
        self.count -= before - len(group)
        if block is not None and number in self.linear:
            self._states.discard(self.bit, (block,))

    def _settle(self, most: int) -> None:
        """Store what came early and is known now."""
        early, self._early = self._early, {}
        for (number, engine_hash), count in early.items():
            group = self._known_group(number)
            for _ in range(count if group is not None else 0):
                assert group is not None
                self._store_in(group, number, engine_hash, most)

    def _forget(self) -> None:
        for group in self.linear.values():
            self._states.discard(self.bit, group.blocks())
        for each in (*self.linear.values(), *self.windows.values()):
            each.clear()
        self._hash_map = PackedHashMap()
        self._copies.clear()
        self._leaving = array(WORDS)
        self._early = {}
        self.count = 0
