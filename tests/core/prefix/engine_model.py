"""A reference model of an engine's prefix cache: what it holds, in plain sets, and the events it sends.

Shares no code with the index: prefixes are tuples of token ids here, not hashes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import msgspec

Prefix = tuple[int, ...]
Key = tuple[str, str, Prefix]  # salt, adapter, tokens that the hash covers


@dataclass(frozen=True)
class Shape:
    """Tokens per block; `state_blocks`: a linear group's block in attention blocks; window sizes in tokens."""

    block_tokens: int = 2
    linear_groups: int = 0
    state_blocks: int = 1
    windows: tuple[int, ...] = ()
    window_blocks: int = 1
    lookahead: int = 0
    drops_last_block: bool = False

    @property
    def attention_group(self) -> int:
        return self.linear_groups

    def covered(self, prompt: Prefix, end: int) -> Prefix:
        """What the hash of the block that ends at `end` covers."""
        return prompt[: end + self.lookahead]

    def hashed_tokens(self, prompt: Prefix) -> int:
        """Tokens of the prompt's blocks that have a hash."""
        return max(len(prompt) - self.lookahead, 0) // self.block_tokens * self.block_tokens


@dataclass
class Holdings:
    """Copies held, per group: a prefix stands for its last block, or for the state after it."""

    shape: Shape
    groups: dict[int, Counter[Key]] = field(default_factory=dict)

    def has(self, group: int, key: Key) -> bool:
        return self.groups.get(group, Counter())[key] > 0

    def attention_tokens(self, salt: str, adapter: str, prompt: Prefix) -> int:
        block, length = self.shape.block_tokens, 0
        while (
            length + block < len(prompt)
            and length + block <= self.shape.hashed_tokens(prompt)
            and self.has(
                self.shape.attention_group, (salt, adapter, self.shape.covered(prompt, length + block))
            )
        ):
            length += block
        return length - block if length and self.shape.drops_last_block else length

    def servable_tokens(self, salt: str, adapter: str, prompt: Prefix) -> int:
        """What a prefill of `prompt` need not compute, by trying every length."""
        best = 0
        for length in range(self.attention_tokens(salt, adapter, prompt) + 1):
            if length % self.shape.block_tokens == 0 and self._can_start(salt, adapter, prompt, length):
                best = length
        return best

    def _can_start(self, salt: str, adapter: str, prompt: Prefix, length: int) -> bool:
        if not length:
            return True
        shape = self.shape
        here = (salt, adapter, shape.covered(prompt, length))
        if not all(self.has(group, here) for group in range(shape.linear_groups)):
            return False
        window_block = shape.block_tokens * shape.window_blocks
        for place, window in enumerate(shape.windows):
            if length % window_block:
                return False
            ends = range(length, 0, -window_block)
            needed = ends[: -(-(window - 1) // window_block)]
            group = shape.attention_group + 1 + place
            if not all(self.has(group, (salt, adapter, shape.covered(prompt, end))) for end in needed):
                return False
        return True


@dataclass(frozen=True)
class Batch:
    """One step's events on the wire. `after`: what the engine held then. `process`: counts restarts."""

    process: int
    sequence: int
    at_s: float
    payload: bytes
    after: Holdings


class EngineModel:
    """Serves prompts, evicts at random, and tells what it did as vLLM would, one batch per step.

    `end_step` closes a batch; `take` gives the closed ones.
    """

    def __init__(self, shape: Shape, random: Random) -> None:
        self.shape = shape
        self.random = random
        self.clock_s = 0.0
        self.process = 0
        self._batches: list[Batch] = []
        self._start()

    def _start(self) -> None:
        self.holdings = Holdings(self.shape)
        self.hash_seed = self.random.randbytes(8)
        self.sequence = 0
        self._step: list[dict[str, object]] = []

    def serve(
        self,
        prompt: Prefix,
        *,
        salt: str = "",
        adapter: str = "",
        chunk_blocks: int = 3,
        again: bool = False,
        room: int | None = None,
    ) -> None:
        """Prefill `prompt`; `again`: without looking into the cache, so that blocks are held twice.

        `room`: blocks that the engine has, of which it evicts some when it needs more.
        """
        block = self.shape.block_tokens
        start = 0 if again else self.holdings.servable_tokens(salt, adapter, prompt)
        while self.shape.hashed_tokens(prompt) - start >= block:
            end = min(start + chunk_blocks * block, self.shape.hashed_tokens(prompt))
            while room is not None and self.held() + chunk_blocks > room:
                self.evict()
            self._chunk(salt, adapter, prompt, start, end)
            start = end

    def load(self, prompt: Prefix) -> None:
        """The attention blocks come from elsewhere, without states: a decode instance."""
        held = self.holdings.attention_tokens("", "", (*prompt, 0))
        end = self.shape.hashed_tokens(prompt)
        if end > held:
            self._send([self._stored_attention("", "", prompt, held, end)])

    def announce_again(self, prompt: Prefix) -> None:
        """Tell of a cache hit as if it were new: vLLM's `kv_cache_report_mode: full`."""
        block = self.shape.block_tokens
        end = self.holdings.attention_tokens("", "", (*prompt, 0)) // block * block
        if end:
            before = {group: Counter(keys) for group, keys in self.holdings.groups.items()}
            self._send([self._stored_attention("", "", prompt, 0, end)])
            self.holdings.groups = before

    def held(self) -> int:
        """Blocks in use, copies included."""
        return sum(sum(keys.values()) for keys in self.holdings.groups.values())

    def evict(self) -> None:
        """One copy of anything, not only of tails."""
        everything = [
            (group, key)
            for group, keys in sorted(self.holdings.groups.items())
            for key, count in sorted(keys.items())
            if count
        ]
        if everything:
            group, key = self.random.choice(everything)
            self.holdings.groups[group][key] -= 1
            event = {"type": "BlockRemoved", "block_hashes": [self._hash(key)], "group_idx": group}
            self._send([event | {"medium": "GPU"}])

    def clear(self) -> None:
        self.holdings = Holdings(self.shape)
        self._send([{"type": "AllBlocksCleared"}])

    def restart(self) -> None:
        self.process += 1
        self._start()

    def end_step(self) -> None:
        if self._step:
            self.clock_s += 1
            payload = msgspec.msgpack.encode([self.clock_s, self._step, 0])
            groups = {group: Counter(keys) for group, keys in self.holdings.groups.items()}
            after = Holdings(self.shape, groups)
            self._batches.append(Batch(self.process, self.sequence, self.clock_s, payload, after))
            self.sequence += 1
            self._step = []

    def take(self) -> Iterator[Batch]:
        """Every batch closed since the last call."""
        batches, self._batches = self._batches, []
        yield from batches

    def _chunk(self, salt: str, adapter: str, prompt: Prefix, start: int, end: int) -> None:
        shape = self.shape
        events = []
        for group in range(shape.linear_groups):
            unit = shape.block_tokens * shape.state_blocks
            keys = [(salt, adapter, shape.covered(prompt, end))] if end % unit == 0 else []
            events.append(self._stored(group, "mamba", keys, None, prompt[start:end], unit))
        events.append(self._stored_attention(salt, adapter, prompt, start, end))
        window_block = shape.block_tokens * shape.window_blocks
        for place, window in enumerate(shape.windows):
            ends = range(start - start % window_block + window_block, end + 1, window_block)
            keys = [
                (salt, adapter, shape.covered(prompt, each)) for each in ends if self.random.random() < 0.8
            ]
            event = self._stored(
                shape.attention_group + 1 + place,
                "sliding_window",
                keys,
                None,
                prompt[start:end],
                window_block,
            )
            events.insert(
                self.random.randrange(len(events) + 1), event | {"kv_cache_spec_sliding_window": window}
            )
        self._send(events)

    def _stored_attention(
        self, salt: str, adapter: str, prompt: Prefix, start: int, end: int
    ) -> dict[str, object]:
        block = self.shape.block_tokens
        covered = self.shape.covered
        ends = range(start + block, end + 1, block)
        keys = [(salt, adapter, covered(prompt, each)) for each in ends]
        parent = (salt, adapter, covered(prompt, start)) if start else None
        event = self._stored(
            self.shape.attention_group, "full_attention", keys, parent, prompt[start:end], block
        )
        if self.shape.lookahead:
            event["lookahead_token_ids"] = [list(covered(prompt, each)[each:]) for each in ends]
        if salt or adapter:
            extra: list[list[str] | None] = [[adapter] if adapter else None for _ in keys]
            if salt and not start:
                extra[0] = [*(extra[0] or []), salt]
            event["extra_keys"] = extra
            if adapter:
                event["lora_name"] = adapter
        return event

    def serve_image(self, prompt: Prefix) -> None:
        """A prompt whose second block has an image: its hashes are no business of `holdings`."""
        block = self.shape.block_tokens
        count = len(prompt) // block
        if count and not self.shape.lookahead:
            # What has the same content has the same hash.
            hashes = [
                self._hash(("an image", "", prompt[:end])) for end in range(block, count * block + 1, block)
            ]
            extra = [None, [["an image", 0]], *([None] * count)][:count]
            known: Key = ("", "", prompt[:block])
            hashes[0] = self._hash(known)
            self._hold(self.shape.attention_group, [known])
            event = self._event(self.shape.attention_group, "full_attention", hashes, None, prompt, block)
            self._send([event | {"token_ids": list(prompt[: count * block]), "extra_keys": extra}])
            behind = [self._hash(("an image", "", prompt[: count * block] + prompt[:block]))]
            after = self._event(
                self.shape.attention_group, "full_attention", behind, hashes[-1], prompt[:block], block
            )
            if count > 1:
                self._send([after])

    def _stored(
        self, group: int, kind: str, keys: list[Key], parent: Key | None, tokens: Prefix, block_tokens: int
    ) -> dict[str, object]:
        self._hold(group, keys)
        parent_hash = None if parent is None else self._hash(parent)
        return self._event(group, kind, [self._hash(key) for key in keys], parent_hash, tokens, block_tokens)

    def _event(
        self,
        group: int,
        kind: str,
        hashes: list[int],
        parent: int | None,
        tokens: Prefix,
        block_tokens: int,
    ) -> dict[str, object]:
        event: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "token_ids": list(tokens),
            "block_size": block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "group_idx": group,
            "kv_cache_spec_kind": kind,
            "session_id": "a field of the future",
        }
        return event if parent is None else event | {"parent_block_hash": parent}

    def _hold(self, group: int, keys: list[Key]) -> None:
        self.holdings.groups.setdefault(group, Counter()).update(keys)

    def _hash(self, key: Key) -> int:
        digest = hashlib.sha256(self.hash_seed + repr(key).encode()).digest()
        return int.from_bytes(digest[:8], "big")

    def _send(self, events: list[dict[str, object]]) -> None:
        self._step += events
