"""vLLM's KV cache events, as they come over ZMQ.

What went into an engine's block hashes besides the tokens.

Which event batches of one engine were missed, doubled, or come from a new process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

EngineHash = Annotated[int, msgspec.Meta(ge=0)] | bytes
"""The engine's own hash of a prefix: opaque, and another one in every process."""


class MalformedEventsError(ValueError):
    """The payload is not a batch of KV cache events."""


class StoredBlocks(
    msgspec.Struct,
    tag_field="type",
    tag="BlockStored",
    gc=False,
    rename={
        "hashes": "block_hashes",
        "parent": "parent_block_hash",
        "block_tokens": "block_size",
        "adapter": "lora_name",
        "group": "group_idx",
        "kind": "kv_cache_spec_kind",
        "window_tokens": "kv_cache_spec_sliding_window",
    },
):
    """Blocks of one KV group became reusable; `token_ids` follow the prefix whose hash is `parent`.

    `hashes` has fewer entries than `token_ids` has blocks where the group keeps only some of them (linear
    state, sliding windows). `extra_keys`: per hash, what else went into it: adapter, multimodal parts as lists,
    and in a chain's first block the salt. `medium`: the tier; None and "GPU" are the same.
    """

    hashes: list[EngineHash]
    block_tokens: int = 0
    parent: EngineHash | None = None
    token_ids: list[int] = []
    adapter: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group: int | None = None
    kind: str | None = None
    window_tokens: int | None = None
    medium: str | None = None
    locality: str | None = None


class RemovedBlocks(
    msgspec.Struct,
    tag_field="type",
    tag="BlockRemoved",
    gc=False,
    rename={"hashes": "block_hashes", "group": "group_idx"},
):
    """One copy of each of these blocks of one KV group was evicted."""

    hashes: list[EngineHash]
    group: int | None = None
    medium: str | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The engine forgot everything, in all groups."""


Event = StoredBlocks | RemovedBlocks | Cleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one engine step did. `at_s`: the engine's own wall clock."""

    at_s: float
    events: Sequence[Event]
    dp_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    at_s: float
    events: list[dict[str, Any]]
    dp_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(EventBatch)
_RAW_DECODER = msgspec.msgpack.Decoder(_RawBatch)
_KNOWN = frozenset(str(kind.__struct_config__.tag) for kind in (StoredBlocks, RemovedBlocks, Cleared))


def decode_batch(payload: bytes) -> EventBatch:
    """The batch in one message's last part; unknown fields and unknown types of event are passed over.

    Raises MalformedEventsError for anything else than a batch.
    """
    try:
        return _DECODER.decode(payload)
    except msgspec.ValidationError:
        return _decode_known(payload)
    except msgspec.DecodeError as error:
        raise MalformedEventsError(str(error)) from error


def _decode_known(payload: bytes) -> EventBatch:
    try:
        raw = _RAW_DECODER.decode(payload)
        known = [event for event in raw.events if event.get("type") in _KNOWN]
        return EventBatch(raw.at_s, msgspec.convert(known, list[Event]), raw.dp_rank)
    except msgspec.MsgspecError as error:
        raise MalformedEventsError(str(error)) from error


def plain_blocks(event: StoredBlocks) -> tuple[str, int]:
    """The salt of a chain that begins with `event`, and how many leading blocks are known by their tokens alone.

    Multimodal parts and prompt embeddings are not in the token ids: such blocks, and all after them, can't be
    told apart by these.
    """
    keys = event.extra_keys
    if not keys or keys.count(None) == len(keys):
        return "", len(event.hashes)
    salt = ""
    for place, of_block in enumerate(keys):
        rest = list(of_block or ())
        if event.adapter and rest[:1] == [event.adapter]:
            del rest[0]
        if place == 0 and event.parent is None and rest and isinstance(rest[0], str):
            salt = rest.pop(0)
        if rest:
            return salt, place
    return salt, len(event.hashes)


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `first` to `last`, both included, have not been seen."""

    first: int
    last: int


Offer = Literal["apply", "duplicate", "restart"] | Gap


class SequenceGuard:
    """The sequence numbers of one engine's batches, which count from 0 in every process.

    The reader offers every batch before it applies it:
    - "apply": it is the next one, and from now on taken as applied;
    - "duplicate": it was applied before (replay and live feed overlap);
    - `Gap`: batches before it are missing: replay them, offer each, then offer this one again. Where replay
      can't give them, `skip_to` it, and forget what the instance held;
    - "restart": the engine is a new process. Forget what the instance held, then offer this one again: the new
      process's own first batches may be missing too.

    A lower number than expected is either old or from a new process. The batches' times tell which: a copy has
    a time that is not later than the last applied one's. Number 0 is also known by heart, for the case of a
    clock that was set back. A new process whose first batches are lost, and whose next one has just the number
    that was expected of the old one, is not noticed: the reader's connection has to tell.
    """

    __slots__ = ("_first_s", "_latest_s", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._latest_s = float("-inf")
        self._first_s: float | None = None

    def offer(self, sequence: int, at_s: float) -> Offer:
        """What to do with batch `sequence`, made at `at_s` of the engine's clock."""
        if sequence == self._next:
            self._take(sequence, at_s)
            return "apply"
        if sequence > self._next:
            return Gap(self._next, sequence - 1)
        if at_s > self._latest_s or (sequence == 0 and self._first_s not in (None, at_s)):
            self._reset()
            return "restart"
        return "duplicate"

    def skip_to(self, sequence: int) -> None:
        """Batches before `sequence` are lost for good. Lower numbers than expected are not taken back."""
        self._next = max(self._next, sequence)

    def _take(self, sequence: int, at_s: float) -> None:
        self._next = sequence + 1
        self._latest_s = max(self._latest_s, at_s)
        if sequence == 0:
            self._first_s = at_s

    def _reset(self) -> None:
        self._next = 0
        self._latest_s = float("-inf")
        self._first_s = None
