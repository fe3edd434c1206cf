"""vLLM's KV cache events, as they come over ZMQ."""

from collections.abc import Sequence
from typing import Annotated, Any

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
