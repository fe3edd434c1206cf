"""vLLM's KV cache events: their format, as they come over ZMQ, and their order.

An `EventBatch` has the events of one engine step. A `Subscription` decides which batch of one engine to apply next, and
which to ask for again. It does no I/O and has no clock.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from prfaas.core.kv.groups import GroupKind
from prfaas.core.prefix.hashing import block_key

EngineHash = Annotated[int, msgspec.Meta(ge=0)] | Annotated[bytes, msgspec.Meta(max_length=64)]
"""The engine's own hash of a prefix: opaque, and another one in every process."""


ATTENTION_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Groups that keep every token."""

EVENT_KINDS: Mapping[GroupKind, str] = {
    GroupKind.FULL: "full_attention",
    GroupKind.WINDOW: "sliding_window",
    GroupKind.STATE: "mamba",
}
"""vLLM's words for our kinds of groups."""

ShortText = Annotated[str, msgspec.Meta(max_length=1024)]
# Each window group is looked at for each request.
GroupNumber = Annotated[int, msgspec.Meta(ge=0, lt=128)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
WindowTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Time = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


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
    """Blocks of one KV group became reusable."""

    hashes: list[EngineHash]
    """One per block. Fewer than `token_ids` has blocks where the group keeps only some of them (linear state,
    sliding windows)."""
    block_tokens: Tokens = 0
    parent: EngineHash | None = None
    """The hash of the prefix that `token_ids` follow."""
    token_ids: list[int] = []
    adapter: ShortText | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Per hash what else went into it: the adapter, multimodal parts as lists, in a chain's first block the salt."""
    group: GroupNumber | None = None
    kind: ShortText | None = None
    window_tokens: WindowTokens | None = None
    medium: ShortText | None = None
    """The tier; None and "GPU" are the same."""
    locality: ShortText | None = None
    lookahead_token_ids: list[list[int]] | None = None
    """Per hash the tokens behind the block that went into it too (vLLM 0.33 with speculative decoding); None: none."""


class RemovedBlocks(
    msgspec.Struct,
    tag_field="type",
    tag="BlockRemoved",
    gc=False,
    rename={"hashes": "block_hashes", "group": "group_idx"},
):
    """One copy of each of these blocks of one KV group was evicted."""

    hashes: list[EngineHash]
    group: GroupNumber | None = None
    medium: ShortText | None = None
    locality: ShortText | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The engine forgot everything, in all groups."""


Event = StoredBlocks | RemovedBlocks | Cleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The KV events of one engine step."""

    at_s: _Time
    """By the engine's own wall clock."""
    events: Sequence[Event]
    dp_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    at_s: _Time
    events: list[dict[str, Any]]
    dp_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(EventBatch)
_RAW_DECODER = msgspec.msgpack.Decoder(_RawBatch)
_KNOWN = frozenset(str(kind.__struct_config__.tag) for kind in (StoredBlocks, RemovedBlocks, Cleared))


def decode_batch(payload: bytes) -> EventBatch:
    """The batch in one message's last part; unknown fields and unknown types of event are passed over.

    Raises:
        MalformedEventsError: the payload is something else than a batch.
    """
    try:
        return _DECODER.decode(payload)
    except msgspec.ValidationError:
        return _decode_known(payload)
    except (ValueError, RecursionError) as error:
        raise MalformedEventsError(str(error)) from error


def _decode_known(payload: bytes) -> EventBatch:
    try:
        raw = _RAW_DECODER.decode(payload)
        known = [event for event in raw.events if str(event.get("type")) in _KNOWN]
        return EventBatch(raw.at_s, msgspec.convert(known, list[Event]), raw.dp_rank)
    except (ValueError, RecursionError) as error:
        raise MalformedEventsError(str(error)) from error


def keyed_blocks(event: StoredBlocks) -> tuple[str, int, list[bytes] | None]:
    """What a chain's hashes cover besides token ids.

    Prompt embeddings are in nothing that an event tells: such blocks, and all after them, can't be told apart.

    Returns:
        The salt of a chain that begins with `event`; how many leading blocks can be told; and of each its `block_key`,
        None where none has media.
    """
    keys = event.extra_keys
    if not keys or keys.count(None) == len(keys):
        return "", len(event.hashes), None
    salt = ""
    media: list[bytes] = []
    # In vLLM's order (v1/core/kv_cache_utils.py): adapter, media, salt, embeddings.
    for place, of_block in enumerate(keys):
        rest = list(of_block or ())
        if event.adapter and rest[:1] == [event.adapter]:
            del rest[0]
        items = [pair for pair in rest if _is_item(pair)]
        del rest[: len(items)]
        if place == 0 and event.parent is None and rest and isinstance(rest[0], str):
            salt = rest.pop(0)
        if rest:
            return salt, place, media if any(media) else None
        media.append(block_key(items))
    return salt, len(event.hashes), media if any(media) else None


def _is_item(pair: object) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and type(pair[1]) is int
    )


REPLAY_TIMEOUT_S = 2.0
MOST_KEPT_BACK = 10_000


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch of events."""

    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Drop:
    """Knowledge of the engine's blocks is void."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the replay endpoint for all batches from `sequence` on; forget any earlier question."""

    sequence: int


Step = Apply | Drop | Ask


class Subscription:
    """Turns live and replayed batches into steps: between two drops every batch is applied once, in order.

    A gap in the live batches is asked for again; batches that come meanwhile are kept back. A replay without its
    beginning (the engine keeps the last 10,000 batches), or one that sends nothing for 2 s, ends in a drop, unless
    nothing was missed. A replay with a gap in its midst was cut by a full queue and is asked for again from there.
    Batches count from 0 in every process: `restarted` has to be called when the connection was lost.
    """

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.gaps = self.replays = self.resyncs = self._next = 0
        self._kept_back: deque[tuple[int, EventBatch]] = deque()
        self._heard_s: float | None = None
        self._asked_from = 0
        self._is_cut = False

    @property
    def is_replaying(self) -> bool:
        return self._heard_s is not None

    def start(self, now_s: float) -> Iterator[Step]:
        """The connection is new: ask for what happened before."""
        yield self._ask(0, now_s)

    def restarted(self, now_s: float, reason: str) -> Iterator[Step]:
        """The connection was lost: who is there next is a new process."""
        self.sequence, self._next = None, 0
        self._kept_back.clear()
        yield Drop(reason)
        yield self._ask(0, now_s)

    def live(self, sequence: int, batch: EventBatch, now_s: float) -> Iterator[Step]:
        """A batch from the publisher."""
        self._kept_back.append((sequence, batch))
        if not self.is_replaying:
            yield from self._release(now_s, may_ask=True)
        elif len(self._kept_back) > MOST_KEPT_BACK:
            yield from self._release(now_s, may_ask=False)

    def replayed(self, sequence: int, batch: EventBatch, now_s: float) -> Iterator[Step]:
        """A batch from the replay endpoint."""
        if not self.is_replaying or self._is_cut:
            return
        self._heard_s = now_s
        if sequence > self._next > self._asked_from:
            self._is_cut = True
            return
        if sequence > self._next:
            yield self._skip_to(sequence, "gap")
        if sequence == self._next:
            yield self._apply(sequence, batch)

    def replay_ended(self, now_s: float) -> Iterator[Step]:
        """The replay endpoint has sent all that it had."""
        if not self.is_replaying:
            return
        self.replays += 1
        if self._is_cut:
            yield self._ask(self._next, now_s)
        else:
            yield from self._release(now_s, may_ask=True)

    def tick(self, now_s: float) -> Iterator[Step]:
        """Give up a replay that has sent nothing for `REPLAY_TIMEOUT_S`."""
        if self._heard_s is not None and now_s - self._heard_s >= REPLAY_TIMEOUT_S:
            yield from self._release(now_s, may_ask=False)

    def _ask(self, sequence: int, now_s: float) -> Ask:
        self._heard_s, self._asked_from, self._is_cut = now_s, sequence, False
        return Ask(sequence)

    def _release(self, now_s: float, *, may_ask: bool) -> Iterator[Step]:
        """Go on with what was kept back. What is missing is asked for, unless that has just been tried in vain."""
        asked_from = self._asked_from if self.is_replaying else None
        self._heard_s, self._is_cut = None, False
        while self._kept_back:
            sequence, batch = self._kept_back[0]
            if sequence > self._next:
                if may_ask and self._next != asked_from:
                    self.gaps += 1
                    yield self._ask(self._next, now_s)
                    return
                yield self._skip_to(sequence, "unanswered")
            self._kept_back.popleft()
            if sequence == self._next:
                yield self._apply(sequence, batch)

    def _skip_to(self, sequence: int, reason: str) -> Drop:
        self.resyncs += 1
        self._next = sequence
        return Drop(reason)

    def _apply(self, sequence: int, batch: EventBatch) -> Apply:
        self.sequence, self._next = sequence, sequence + 1
        return Apply(batch)
