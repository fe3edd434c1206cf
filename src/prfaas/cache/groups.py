"""Blocks of the KV groups that keep less than every token: linear states and sliding windows."""

from collections.abc import Sequence

LINEAR_KINDS = frozenset({"mamba"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
ATTENTION_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


class GroupBlocks:
    """What one engine holds of one KV group: prefixes, of which it has the state, or the block before their end.

    `block_tokens`: tokens of one of the group's blocks.
    """

    __slots__ = ("_by_engine_hash", "_copies", "_held", "block_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._by_engine_hash: dict[int, int] = {}
        self._copies: dict[int, int] = {}
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
            self._copies[engine_hash] = self._copies.get(engine_hash, 0) + 1
        else:
            self._by_engine_hash[engine_hash] = block
            self._held.add(block)

    def remove(self, engine_hash: int) -> int | None:
        """One copy less; the index's hash of the block if that was the last, None otherwise."""
        copies = self._copies.get(engine_hash)
        if copies is not None:
            if copies == 1:
                del self._copies[engine_hash]
            else:
                self._copies[engine_hash] = copies - 1
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
        self._copies = {}
        self._held = set()


class WindowGroup(GroupBlocks):
    """`window_tokens`: a token sees so many, itself included; None: all, as of a second full-attention group."""

    __slots__ = ("window_tokens",)

    def __init__(self, block_tokens: int, window_tokens: int | None) -> None:
        super().__init__(block_tokens)
        self.window_tokens = window_tokens

    def end_below(self, chain: Sequence[int], block_tokens: int, end: int) -> int:
        """`end` if the window before block boundary `end` of `chain` is held, else a smaller one to try next.

        No boundary in between is usable. `block_tokens`: tokens per block of `chain`. A window of smaller
        blocks can't be told from the chain: 0.
        """
        step, rest = divmod(self.block_tokens, block_tokens)
        if rest:
            return 0
        if end % step:
            return end - end % step
        start = 0 if self.window_tokens is None else max(end - step * self._blocks_needed(), 0)
        for place in range(end, start, -step):
            if chain[place - 1] not in self._held:
                return place - step
        return end

    def _blocks_needed(self) -> int:
        return -(-((self.window_tokens or 0) - 1) // self.block_tokens)
