"""KV events of any content: refused as a batch, or the index goes on."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mutations import mutated

from prfaas.core.prefix.digests import EventDigests, decode_events, encode_events
from prfaas.core.prefix.events import MalformedEventsError, decode_batch
from prfaas.core.prefix.index import GlobalIndex

from .test_events import STORED, encode

FUZZ = settings(max_examples=300, deadline=None)

numbers = st.sampled_from([0, 1, 2, -1, 11, 1 << 31, 1 << 63, (1 << 64) - 1]) | st.floats() | st.none()
values: st.SearchStrategy[Any] = st.recursive(
    numbers | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "type block_hashes parent_block_hash token_ids block_size lora_id lora_name medium extra_keys group_idx "
    "kv_cache_spec_kind kv_cache_spec_sliding_window lookahead_token_ids"
)
changes = st.dictionaries(st.sampled_from(FIELDS.split()), values, max_size=3)
events = changes.map(lambda changed: STORED | changed) | values
WRITTEN = [
    encode(STORED, {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 3}),
    encode(STORED | {"parent_block_hash": 10, "extra_keys": [["salt"], None]}, {"type": "AllBlocksCleared"}),
]
TOLD = [
    encode_events(EventDigests(0).of(decode_batch(payload).events))
    for payload in (*WRITTEN, encode(STORED | {"lookahead_token_ids": [[3], [5]]}))
]


@FUZZ
@given(
    payloads=st.lists(
        st.lists(events, max_size=3).map(lambda some: encode(*some)) | mutated(WRITTEN),
        min_size=1,
        max_size=3,
    )
)
def test_an_engine_may_publish_anything(payloads: list[bytes]) -> None:
    digests, index = EventDigests(0), GlobalIndex()
    for payload in payloads:
        with suppress(MalformedEventsError):
            told = decode_events(encode_events(digests.of(decode_batch(payload).events)))
            index.apply("a", told)
    index.match(index.chains([1, 2, 3, 4]))
    index.drop("a")


@FUZZ
@given(
    payloads=st.lists(
        st.builds(lambda some: msgspec.msgpack.encode(some), st.lists(events, max_size=3)) | mutated(TOLD),
        min_size=1,
        max_size=3,
    )
)
def test_a_machine_may_tell_anything_of_its_events(payloads: list[bytes]) -> None:
    index = GlobalIndex()
    for payload in payloads:
        with suppress(MalformedEventsError):
            index.apply("a", decode_events(payload))
    index.match(index.chains([1, 2, 3, 4]))
    index.drop("a")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "stored", "hashes": [1], "block_tokens": 16, "group": 128, "kind": "sliding_window"},
        {"type": "stored", "hashes": [1], "digests": [1], "block_tokens": 16, "lookahead_tokens": 65},
        {"type": "removed", "hashes": [1] * (2 << 20)},
    ],
    ids=["more groups than models have", "more tokens ahead than drafters look", "more than a step"],
)
def test_what_would_cost_each_request_or_the_event_loop_is_no_batch(event: dict[str, object]) -> None:
    with pytest.raises(MalformedEventsError):
        decode_events(msgspec.msgpack.encode([event]))
