"""The digests of pages: what they see, and where they lie in a transfer."""

import secrets
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup, Region
from prfaas.core.kv.hf_config import model_from_config
from prfaas.serving.engines.page_digests import (
    DIGEST_BYTES,
    DigestPlan,
    DigestSource,
    KnownSums,
    PageDigestError,
    page_sums,
    word_weights,
)
from prfaas.serving.engines.synthetic.layout import SyntheticLayout
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.fingerprint import fingerprint_difference
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket

ID = bytes(range(16))
FULL = KvGroup(0, GroupKind.FULL, 16, 0)
WINDOW = KvGroup(1, GroupKind.WINDOW, 8, 20)
STATE = KvGroup(2, GroupKind.STATE, 16, 0)

# The outputs 1, 3, 5 and 2, 4, 6 of splitmix64 with seed 0, made odd.
LOW = ["0xe220a8397b1dcdaf", "0x6c45d188009454f", "0x1b39896a51a8749b"]
HIGH = ["0x6e789e6aa1b965f5", "0xf88bb8a8724c81ed", "0x53cb9f0c747ea2eb"]

words = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)


def sum_of(page: list[int]) -> int:
    return int(page_sums(np.array([page], dtype=np.int64))[0])


@given(page=words)
def test_the_sum_is_the_documented_one(page: list[int]) -> None:
    low, high = (weights.tolist() for weights in word_weights(len(page)))
    expected = sum(a * word + b * (word >> 32) for a, b, word in zip(low, high, page, strict=True))
    assert sum_of(page) == expected % 2**64


def test_the_weights_never_change() -> None:
    """Another function needs another name in `DIGEST_FORMAT`, since both sides of a transfer must agree."""
    low, high = (weights.view(np.uint64).tolist() for weights in word_weights(3))
    assert [hex(weight) for weight in low] == LOW
    assert [hex(weight) for weight in high] == HIGH
    assert all(weight % 2 for weight in (*low, *high))
    assert [weights[:3].view(np.uint64).tolist() for weights in word_weights(4000)] == [low, high]


@given(page=words, data=st.data())
def test_any_change_of_half_a_word_is_seen(page: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(page) - 1))
    shift = data.draw(st.sampled_from((0, 32)))
    mask = data.draw(st.integers(1, 2**32 - 1)) << shift
    changed = page.copy()
    changed[place] = int(np.uint64(page[place] & (2**64 - 1)) ^ np.uint64(mask))
    changed[place] -= 2**64 if changed[place] >= 2**63 else 0
    assert sum_of(changed) != sum_of(page)


@given(page=words.filter(lambda page: len(page) > 1), data=st.data())
def test_signs_that_change_in_pairs_are_seen(page: list[int], data: st.DataObject) -> None:
    """A sum of whole 64-bit words alone could not see two top bits change."""
    places = data.draw(st.lists(st.integers(0, len(page) - 1), min_size=2, unique=True))
    assume(len(places) % 2 == 0)
    changed = np.array([page], dtype=np.int64)
    changed[0, places] ^= np.int64(-(2**63))
    assert int(page_sums(changed)[0]) != sum_of(page)


def test_words_that_change_places_are_seen() -> None:
    assert sum_of([1, 2, 3]) != sum_of([2, 1, 3])
    assert sum_of([5, 0, 0, 0]) != sum_of([0, 5, 0, 0])


def plan(rank: int = 0, layers: tuple[str, ...] = ("a", "b", "w", "s")) -> DigestPlan:
    regions = [Region(FULL, 100), Region(FULL, 100), Region(WINDOW, 24), Region(STATE, 64)]
    return DigestPlan(regions, layers, rank)


def test_equal_pages_have_different_digests_at_different_places() -> None:
    page = page_sums(np.zeros((1, 12), dtype=np.int64))
    places = product((0, 1), (ID, ID[::-1]), range(4), (0, 1, 7))
    digests = {
        int(plan(rank).of_transfer(transfer_id, 200, 0).bind(region, block, page)[0])
        for rank, transfer_id, region, block in places
    }
    assert len(digests) == 2 * 2 * 4 * 3


def test_a_run_of_blocks_has_the_digests_of_its_blocks() -> None:
    digests = plan().of_transfer(ID, 200, 0)
    sums = page_sums(np.arange(20, dtype=np.int64).reshape(5, 4))
    single = [int(digests.bind(1, 3 + block, sums[block : block + 1])[0]) for block in range(5)]
    assert digests.bind(1, 3, sums).tolist() == single


@st.composite
def extents(draw: st.DrawFn) -> tuple[DigestPlan, int, int]:
    groups = draw(
        st.lists(
            st.tuples(st.sampled_from(list(GroupKind)), st.sampled_from((4, 8, 16)), st.integers(2, 40)),
            min_size=1,
            max_size=4,
        )
    )
    regions = [
        Region(KvGroup(index, kind, block, window if kind is GroupKind.WINDOW else 0), 8)
        for index, (kind, block, window) in enumerate(groups)
        for _ in range(draw(st.integers(1, 3)))
    ]
    num_tokens = draw(st.integers(1, 300))
    layers = [f"layer {index}" for index in range(len(regions))]
    return DigestPlan(regions, layers, 0), num_tokens, draw(st.integers(0, num_tokens))


@given(extent=extents())
def test_every_page_of_a_transfer_has_one_digest(extent: tuple[DigestPlan, int, int]) -> None:
    some_plan, num_tokens, skip_tokens = extent
    digests = some_plan.of_transfer(ID, num_tokens, skip_tokens)
    places = [
        digests.index(number, block)
        for number, region in enumerate(some_plan.regions)
        for block in region.group.moving_blocks(num_tokens, skip_tokens)
    ]
    assert sorted(places) == list(range(len(places)))
    sizes = some_plan.region_bytes(num_tokens, skip_tokens)
    assert sizes[digests.region] == digests.nbytes == DIGEST_BYTES * len(places)
    assert sum(sizes[:-1]) == 8 * len(places)


@given(extent=extents(), data=st.data())
def test_what_was_digested_passes_and_nothing_else(
    extent: tuple[DigestPlan, int, int], data: st.DataObject
) -> None:
    """Gathered from parts in any order, sent in any pieces, checked from any token that is held."""
    some_plan, num_tokens, skip_tokens = extent
    local = data.draw(st.integers(skip_tokens, num_tokens))
    digests = some_plan.of_transfer(ID, num_tokens, skip_tokens)
    source = DigestSource(digests)
    early = data.draw(st.integers(0, len(some_plan.regions)))
    random = np.random.default_rng(0)
    sums = {}
    parts = []
    for number, region in enumerate(some_plan.regions):
        blocks = region.group.moving_blocks(num_tokens, skip_tokens)
        sums[number] = random.integers(0, 2**64 - 1, len(blocks), dtype=np.uint64)
        half = data.draw(st.integers(0, len(blocks)))
        parts += [
            (number, blocks.start, sums[number][:half]),
            (number, blocks.start + half, sums[number][half:]),
        ]
    # The first halves of some layers end a chunk; what no layer lacks leaves with it.
    for number, first_block, part in parts[0 : 2 * early : 2]:
        source.add(number, first_block, KnownSums(part), len(part))
    runs = source.take(final=False)
    for number, first_block, part in data.draw(st.permutations([*parts[2 * early :: 2], *parts[1::2]])):
        source.add(number, first_block, KnownSums(part), len(part))
    runs += source.take(final=True)
    sent = bytearray(source.nbytes)
    for run in runs:
        mine = memoryview(sent)[run.offset : run.offset + run.nbytes]
        cut = data.draw(st.integers(0, run.nbytes))
        run.read_into(cut, mine[cut:])
        run.read_into(0, mine[:cut])
    assert sum(run.nbytes for run in runs) == source.nbytes

    staged = staged_digests(some_plan, bytes(sent), num_tokens, skip_tokens)
    loaded = []
    for number, region in enumerate(some_plan.regions):
        skipped = region.group.first_block(num_tokens, skip_tokens)
        blocks = region.group.moving_blocks(num_tokens, local)
        found = sums[number][blocks.start - skipped :][: len(blocks)]
        digests.check(staged, number, blocks.start, found)
        loaded += [(number, blocks.start, found, place) for place in range(len(blocks))]
    if loaded:
        number, first_block, found, place = data.draw(st.sampled_from(loaded))
        wrong = found.copy()
        wrong[place] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
        message = f"block {first_block + place} of layer layer {number} is not .*1 of the {len(found)} loaded"
        with pytest.raises(PageDigestError, match=message):
            digests.check(staged, number, first_block, wrong)


A_TICKET = replace(
    Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=1,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=60.0,
    ),
    transfer_id=ID,
)


def staged_digests(some_plan: DigestPlan, sent: bytes, num_tokens: int, skip_tokens: int) -> StagedTransfer:
    sizes = some_plan.region_bytes(num_tokens, skip_tokens)
    lease = StagingArena(1 << 20, 4096).allocate(sum(sizes))
    assert lease is not None
    starts = [sum(sizes[:region]) for region in range(len(sizes))]
    start = 0
    for piece in lease.views(starts[-1], sizes[-1]):
        piece[:] = sent[start : start + len(piece)]
        start += len(piece)
    return StagedTransfer(
        ticket=replace(A_TICKET, num_tokens=num_tokens, skip_tokens=skip_tokens),
        region_starts=starts,
        region_bytes=sizes,
        lease=lease,
        on_free=lambda: None,
    )


def test_a_peer_with_another_setting_or_without_digests_is_told_apart() -> None:
    layout = SyntheticLayout.of_model(model_from_config(tiny_config("qwen3"), name="qwen3"))
    ours = layout.fingerprint("m", page_digests=True)
    off = layout.fingerprint("m", page_digests=False)
    older = {field: value for field, value in ours.items() if field != "page_digests"}
    sentence = "KV layout differs in 'page_digests': home/0 has 'v2', east/0 has "
    assert fingerprint_difference(ours, off, "home/0", "east/0") == sentence + "'off'"
    assert fingerprint_difference(ours, older, "home/0", "east/0") == sentence + "None"
    assert fingerprint_difference(ours, dict(ours), "home/0", "east/0") is None


@given(
    st.integers(1, 200).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens))),
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.booleans(),
)
def test_of_a_broken_transfer_the_blocks_count_that_are_there_with_their_digests(
    extent: tuple[int, int], came: list[int], has_state: bool
) -> None:
    """Three layers of two block sizes; `came`: blocks of each layer, and of the digests of the first group."""
    small = KvGroup(1, GroupKind.FULL, 8, 0)
    regions = [Region(FULL, 100), Region(FULL, 100), Region(small, 24), *[Region(STATE, 64)] * has_state]
    some_plan = DigestPlan(regions, ["a", "b", "c", "s"], 0)
    sizes = some_plan.region_bytes(*extent)
    first_group = 8 * 2 * len(FULL.moving_blocks(*extent))

    def covered_end(region: int, start: int) -> int:
        if region < len(regions):
            return min(regions[region].page_bytes * came[region] + 3, sizes[region])
        return min(start + 16 * came[3] + 15, first_group) if start == 0 else sizes[region]

    num_tokens, skip_tokens = extent
    usable = some_plan.usable_tokens(num_tokens, skip_tokens, covered_end)
    blocks = min(came[0], came[1], came[3], len(FULL.moving_blocks(*extent)))
    first = skip_tokens // 16
    smaller = min(came[2], len(small.moving_blocks(*extent)))
    tokens = min(16 * (first + blocks), 8 * (skip_tokens // 8 + smaller), num_tokens) // 16 * 16
    assert usable == (tokens if tokens > skip_tokens and not has_state else 0)
