"""KV cache events as they leave their machine: chained digests keyed by the deployment, no token ids and no salts."""

from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec

from prfaas.core.prefix.events import (
    ATTENTION_KINDS,
    Cleared,
    EngineHash,
    Event,
    GroupNumber,
    MalformedEventsError,
    RemovedBlocks,
    ShortText,
    StoredBlocks,
    Tokens,
    WindowTokens,
    keyed_blocks,
)
from prfaas.core.prefix.hashing import WORDS, Hashers, chain_root

# An engine has fewer blocks. It counts as holding none of them beyond that: then some are computed again.
_MOST_HELD = 1 << 23
# A batch is one step of an engine, applied in one piece: 100,000 blocks that were stored, twice as many that went.
MOST_BATCH_BYTES = 2 << 20


_Word = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
# More than any drafter looks ahead. Every prompt is hashed for each number that engines tell.
_Lookahead = Annotated[int, msgspec.Meta(ge=0, le=64)]


class StoredDigests(msgspec.Struct, tag_field="type", tag="stored", omit_defaults=True, gc=False):
    """Blocks of one KV group became reusable."""

    hashes: list[_Word]
    """The engine's own, one per block, of 64 bits."""
    digests: list[_Digest] | None = None
    """The index's hashes of the first blocks, those that are known by tokens and media; None: nothing was told of
    their tokens, as in groups that don't lead, and for blocks that another tier holds too."""
    parent: _Word | None = None
    """The engine's hash of the prefix before the first block."""
    block_tokens: Tokens = 0
    lookahead_tokens: _Lookahead = 0
    """Tokens behind a block that its digest covers too."""
    group: GroupNumber | None = None
    kind: ShortText | None = None
    window_tokens: WindowTokens | None = None
    medium: ShortText | None = None
    """The tier; None and "GPU" are the same."""


class RemovedHashes(msgspec.Struct, tag_field="type", tag="removed", omit_defaults=True, gc=False):
    """One copy of each of these blocks of one KV group was evicted."""

    hashes: list[_Word]
    group: GroupNumber | None = None
    medium: ShortText | None = None


HeldEvent = StoredDigests | RemovedHashes | Cleared


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[HeldEvent])


def encode_events(events: Sequence[HeldEvent]) -> bytes:
    """One batch, for `decode_events`."""
    return _ENCODER.encode(events)


def decode_events(payload: bytes) -> list[HeldEvent]:
    """One batch.

    Raises:
        MalformedEventsError: the payload is something else, or longer than `MOST_BATCH_BYTES`.
    """
    if len(payload) > MOST_BATCH_BYTES:
        raise MalformedEventsError(
            f"{len(payload)} bytes are no step of an engine: it has {MOST_BATCH_BYTES} at most"
        )
    try:
        return _DECODER.decode(payload)
    except (ValueError, RecursionError) as error:
        raise MalformedEventsError(str(error)) from error


class ExtraCopies:
    """Copies of blocks beyond the first, by the engine's hash."""

    __slots__ = ("_of", "count")

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self.count = 0
        """Of all blocks together."""

    def add(self, engine_hash: int) -> None:
        """One more copy of a block that is held."""
        self._of[engine_hash] = self._of.get(engine_hash, 0) + 1
        self.count += 1

    def take(self, engine_hash: int) -> bool:
        """One copy less. False: there is none beyond the first."""
        copies = self._of.pop(engine_hash, 0)
        if copies > 1:
            self._of[engine_hash] = copies - 1
        self.count -= copies > 0
        return copies > 0

    def clear(self) -> None:
        """Every block is held once."""
        self._of, self.count = {}, 0


class EventDigests:
    """Digests the events of one engine or pool, in their order.

    Only the first full-attention group that stores something is digested: it leads the index too. The digest of each
    block of it that is held stays here, since the next ones follow on it.
    """

    def __init__(self, seed: int) -> None:
        """`seed`: of the deployment's block hashes."""
        self._hashers = Hashers(seed)
        self._leads = False
        self._group: int | None = None
        self._lookahead_tokens = 0
        self._digests: dict[int, int] = {}
        self._copies = ExtraCopies()

    def clear(self) -> None:
        """Nothing is held any more."""
        self._digests = {}
        self._copies.clear()

    def of(self, events: Sequence[Event]) -> list[HeldEvent]:
        """One batch. What other machines hold is left out."""
        told: list[HeldEvent] = []
        for event in events:
            if isinstance(event, Cleared):
                self.clear()
                told.append(event)
            elif event.locality == "REMOTE":
                continue
            elif isinstance(event, StoredBlocks):
                told.append(self._stored(event))
            else:
                self._removed(event, told)
        return told

    def _stored(self, event: StoredBlocks) -> StoredDigests:
        hashes = words_of(event.hashes).tolist()
        digests = None
        if self._is_leading(event):
            digests = self._chain(event, hashes) if event.token_ids else None
            self._hold(hashes, digests)
        return StoredDigests(
            hashes=hashes,
            digests=digests,
            parent=None if event.parent is None else word_of(event.parent),
            block_tokens=event.block_tokens,
            lookahead_tokens=0 if digests is None else self._lookahead_tokens,
            group=event.group,
            kind=event.kind,
            window_tokens=event.window_tokens,
            medium=event.medium,
        )

    def _is_leading(self, event: StoredBlocks) -> bool:
        if self._leads:
            return event.group == self._group
        if event.kind in ATTENTION_KINDS and event.block_tokens > 0 and event.token_ids:
            self._leads, self._group = True, event.group
            self._lookahead_tokens = len(event.lookahead_token_ids[0]) if event.lookahead_token_ids else 0
        return self._leads

    def _chain(self, event: StoredBlocks, hashes: Sequence[int]) -> list[int]:
        """Digests of the event's first blocks, as far as tokens and media tell all."""
        if event.block_tokens < 1 or len(event.token_ids) != len(hashes) * event.block_tokens:
            return []
        salt, told, keys = keyed_blocks(event)
        if event.parent is None:
            root = chain_root(self._hashers.seed, salt, event.adapter or "")
        elif (known := self._digests.get(word_of(event.parent))) is not None:
            root = known
        else:
            return []
        hasher = self._hashers.of(event.block_tokens, self._lookahead_tokens)
        lookaheads = event.lookahead_token_ids
        try:
            if not self._lookahead_tokens and not lookaheads:
                return list(hasher.hashes(event.token_ids, root, max_blocks=told, keys=keys))
            found = hasher.stored_hashes(event.token_ids, lookaheads or (), root, max_blocks=told, keys=keys)
            return list(found)
        except OverflowError:
            return []

    def _hold(self, hashes: Sequence[int], digests: Sequence[int] | None) -> None:
        held = self._digests
        for place, engine_hash in enumerate(hashes if digests is None else hashes[: len(digests)]):
            if engine_hash in held:
                self._copies.add(engine_hash)
            if digests is not None:
                held[engine_hash] = digests[place]
        if len(held) > _MOST_HELD:
            self.clear()

    def _removed(self, event: RemovedBlocks, told: list[HeldEvent]) -> None:
        hashes = words_of(event.hashes).tolist()
        if self._leads and event.group == self._group:
            for engine_hash in hashes:
                if not self._copies.take(engine_hash):
                    self._digests.pop(engine_hash, None)
        last = told[-1] if told else None
        # Engines send one event per block.
        if isinstance(last, RemovedHashes) and (last.group, last.medium) == (event.group, event.medium):
            last.hashes += hashes
        else:
            told.append(RemovedHashes(hashes, event.group, event.medium))


def word_of(engine_hash: EngineHash) -> int:
    """An engine's hash as an unsigned 64-bit integer: of bytes the last 8, as vLLM itself shortens them."""
    return engine_hash if isinstance(engine_hash, int) else int.from_bytes(engine_hash[-8:], "big")


def words_of(engine_hashes: Sequence[EngineHash]) -> "array[int]":
    """Engine hashes as unsigned 64-bit integers."""
    try:
        return array(WORDS, engine_hashes)  # type: ignore[arg-type]
    except TypeError:
        return array(WORDS, map(word_of, engine_hashes))
