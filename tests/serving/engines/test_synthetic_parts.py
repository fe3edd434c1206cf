"""The parts of a stand-in engine: digests of tokens, bytes of pages, layout, times."""

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving.jumping_loop import JumpingLoop

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.layers import ChunkedWindow, FullAttention, LinearState
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.files import load_profile
from prfaas.core.prefix.events import EVENT_KINDS
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.page_digests import DigestSource
from prfaas.serving.engines.synthetic.cache import Context
from prfaas.serving.engines.synthetic.content import (
    PageSource,
    TokenChain,
    expand,
    join,
    page_digests,
    reduce_page,
)
from prfaas.serving.engines.synthetic.endpoints import PrefillSend
from prfaas.serving.engines.synthetic.layout import SyntheticLayout, SyntheticRegion
from prfaas.serving.engines.synthetic.node import stream_interval_of
from prfaas.serving.engines.synthetic.pace import DEFAULT_STEP_S, DecodeClock, Pace
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.transport.protocol.chunk_source import ChunkSource
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket

TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=60)
DIGESTS = st.integers(0, (1 << 64) - 1)


def layout_of(model: str) -> SyntheticLayout:
    return SyntheticLayout.of_model(model_from_config(tiny_config(model), name=model))


@given(TOKENS, st.data())
def test_the_digest_of_a_prefix_does_not_depend_on_what_follows(ids: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(ids)))
    whole, part = TokenChain(ids, 8), TokenChain(ids[:end], 8)
    assert whole.digest(end) == part.digest(end)
    assert list(whole.blocks[: end // 8]) == list(part.blocks)
    assert TokenChain(ids, 8, "lora").digest(end) != part.digest(end)
    place = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:place], ids[place] + 1, *ids[place + 1 :]]
    assert TokenChain(other, 8).digest(len(ids)) != whole.digest(len(ids))


@given(TOKENS, st.integers(1, 40), st.integers(0, 40), DIGESTS)
def test_growing_gives_what_starting_anew_gives(ids: list[int], first: int, then: int, taint: int) -> None:
    once, twice = TokenChain(ids, 8), TokenChain(ids, 8)
    once.extend(first + then, taint, range(100, 200))
    twice.extend(first, taint, range(100, 200))
    again = TokenChain(twice.ids, 8)
    again.extend(then, taint, range(100, 200))
    assert again.ids == once.ids
    assert again.blocks == once.blocks == TokenChain(once.ids, 8).blocks
    assert all(100 <= token < 200 for token in once.ids[len(ids) :])


def test_the_taint_changes_the_answer_and_answers_vary() -> None:
    answers = []
    for taint in range(50):
        chain = TokenChain(list(b"prompt"), 256)
        chain.extend(40, taint, range(64))
        answers.append(tuple(chain.ids[6:]))
    assert len(set(answers)) == 50
    assert len({token for answer in answers for token in answer}) == 64


@given(DIGESTS, st.integers(8, 3000))
def test_a_page_comes_back_as_its_digest(digest: int, page_bytes: int) -> None:
    assert reduce_page(expand(digest, page_bytes)) == digest


@given(DIGESTS, st.integers(8, 600), st.data())
def test_every_byte_counts(digest: int, page_bytes: int, data: st.DataObject) -> None:
    page = bytearray(expand(digest, page_bytes))
    page[data.draw(st.integers(0, page_bytes - 1))] ^= data.draw(st.integers(1, 255))
    assert reduce_page(page) != digest


@given(st.lists(DIGESTS, min_size=1, max_size=5), st.integers(8, 200), st.data())
def test_a_source_reads_the_same_bytes_however_they_are_cut(
    digests: list[int], page_bytes: int, data: st.DataObject
) -> None:
    source = PageSource(np.array(digests, dtype=np.uint64), page_bytes)
    whole = b"".join(expand(digest, page_bytes) for digest in digests)
    assert source.nbytes == len(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    out = bytearray(data.draw(st.integers(1, len(whole) - start)))
    source.read_into(start, memoryview(out))
    assert out == whole[start : start + len(out)]
    cut = data.draw(st.integers(0, len(out)))
    view = memoryview(out)
    assert join([view[:cut], view[cut:]]) == bytes(out)


def test_pages_differ_by_prefix_and_layer() -> None:
    pages = {digest for layer in range(8) for digest in page_digests(range(500), layer).tolist()}
    assert len(pages) == 8 * 500


@pytest.mark.parametrize(
    ("model", "kinds", "block_tokens"),
    [
        ("qwen3-next", ["mamba"] * 3 + ["full_attention"], 256),
        ("gpt-oss", ["sliding_window", "full_attention"], 128),
        ("mimo-v2-flash", ["sliding_window"] * 5 + ["full_attention"], 128),
        ("qwen3", ["full_attention"], 128),
    ],
)
def test_groups_are_vllms(model: str, kinds: list[str], block_tokens: int) -> None:
    layout = layout_of(model)
    assert [EVENT_KINDS[group.kind] for group in layout.groups] == kinds
    assert layout.block_tokens == block_tokens
    assert [group.index for group in layout.groups] == list(range(len(kinds)))


@pytest.mark.parametrize("model", ["qwen3-next", "gpt-oss", "mimo-v2-flash", "qwen3"])
@given(num_tokens=st.integers(1, 5000), data=st.data())
def test_a_transfer_has_the_bytes_that_the_model_says(
    model: str, num_tokens: int, data: st.DataObject
) -> None:
    layout, kv_model = layout_of(model), model_from_config(tiny_config(model), name=model)
    skip_tokens = data.draw(st.integers(0, num_tokens))
    regions = layout.region_bytes(num_tokens, skip_tokens)
    assert sum(regions) == kv_model.bytes_to_move(num_tokens, skip_tokens, layout.block_tokens)
    full = [region.group.kind is GroupKind.FULL for region in layout.regions]
    assert full == sorted(full, reverse=True)


@dataclass
class Recorder:
    """What leaves, in order: (region, offset, bytes, urgent); the end as None."""

    left: list[tuple[int, int, int, bool] | None] = field(default_factory=list)

    def put(self, region: int, offset: int, source: ChunkSource, *, urgent: bool = False) -> None:
        self.left.append((region, offset, source.nbytes, urgent))

    def end(self) -> None:
        self.left.append(None)


@pytest.mark.parametrize("model", ["qwen3-next", "gpt-oss", "mimo-v2-flash", "qwen3"])
@given(
    num_tokens=st.integers(1, 3000), cuts=st.sets(st.integers(1, 11), max_size=2), slices=st.integers(1, 4)
)
def test_layers_leave_with_the_chunk_that_computes_them_and_states_with_the_last(
    model: str, num_tokens: int, cuts: set[int], slices: int
) -> None:
    layout = layout_of(model)
    chain = TokenChain(list(range(num_tokens)), layout.block_tokens)
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="p",
        consumer="c",
        num_tokens=num_tokens,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=9,
    )
    recorder: Any = Recorder()
    digests = DigestSource(layout.digest_plan(digested=False).of_transfer(bytes(16), num_tokens, 0))
    sending = PrefillSend(layout, recorder, ticket, Context(chain), digests)
    layers = len(layout.full.layers)
    slices = min(slices, layers)
    ends = sorted(cut * layout.block_tokens for cut in cuts if cut * layout.block_tokens < num_tokens)
    before = [0] * len(layout.regions)
    for end_tokens in [*ends, num_tokens]:
        after = [_ready_bytes(region, num_tokens, end_tokens) for region in layout.regions]
        for done in range(slices):
            sending.layers_done(range(layers * done // slices, layers * (done + 1) // slices), end_tokens)
            sent = _sent_bytes(recorder, len(layout.regions))
            assert all(nbytes in both for nbytes, *both in zip(sent, before, after, strict=True))
            # Windows and states lie evenly among the layers of full attention.
            others = [i for i in range(layers, len(layout.regions)) if after[i] > before[i]]
            if len(others) == len(layout.regions) - layers:
                left = sum(sent[i] == after[i] for i in others)
                assert abs(left - len(others) * (done + 1) / slices) <= 1
        sending.chunk_done(end_tokens)
        assert _sent_bytes(recorder, len(layout.regions)) == after
        before = after
    assert recorder.left.count(None) == 1 and recorder.left[-1] is None
    for put in recorder.left[:-1]:
        assert put is not None
        assert put[3] == (layout.regions[put[0]].group.kind is not GroupKind.FULL)
    assert before == layout.region_bytes(num_tokens, 0)


def _ready_bytes(region: SyntheticRegion, num_tokens: int, done_tokens: int) -> int:
    """What a layer may have sent: of attention all whole blocks of what moves, of a state nothing before the end."""
    group, moving = region.group, region.group.moving_blocks(num_tokens, 0)
    if done_tokens == num_tokens:
        return len(moving) * region.page_bytes
    if group.kind is GroupKind.STATE:
        return 0
    return sum((block + 1) * group.block_tokens <= done_tokens for block in moving) * region.page_bytes


def _sent_bytes(recorder: Recorder, regions: int) -> list[int]:
    sent = Counter[int]()
    for put in recorder.left:
        if put is not None:
            sent[put[0]] += put[2]
    return [sent[index] for index in range(regions)]


def test_a_model_with_chunked_attention_is_refused() -> None:
    model = KvModel("llama-4", (FullAttention(1, 2, 4, 4), ChunkedWindow(3, 2, 4, 4, 64)))
    with pytest.raises(EngineError, match="llama-4 has chunked attention, which can't be transferred yet"):
        SyntheticLayout.of_model(model)


def test_a_model_without_full_attention_is_refused() -> None:
    with pytest.raises(EngineError, match="no full-attention layer"):
        SyntheticLayout.of_model(KvModel("x", (LinearState(2, 10, 20),)))


def test_times_are_the_profiles() -> None:
    h20, h200 = load_profile("internal-1t-h20"), load_profile("internal-1t-h200")
    pace = Pace(h20, 4.0)
    assert pace.prefill_s(8192) == h20.prefill_s(8192) / 4
    assert pace.prefill_s(1) == h20.prefill_s(128) / 4
    assert pace.prefill_s(2 * 131072) == pytest.approx(2 * h20.prefill_s(131072) / 4)
    assert pace.step_s(1) == pace.step_s(20) == 0.025 / 4
    assert pace.step_s(40) == pytest.approx(2 * 0.025 / 4)
    assert Pace(replace(h200, decode=None), 2.0).step_s(7) == DEFAULT_STEP_S / 2


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), min_size=1, max_size=8),
)
def test_the_token_clock_gives_everybody_one_token_per_step(requests: list[tuple[int, int]]) -> None:
    """A step takes as many seconds as the batch has requests: checked against stepping through it."""

    async def measure() -> list[float]:
        loop = asyncio.get_running_loop()
        clock = DecodeClock(float)
        ends = [0.0] * len(requests)

        async def request(index: int, at_s: int, tokens: int) -> None:
            await asyncio.sleep(at_s)
            clock.change_batch(1)
            await clock.reach(clock.steps() + tokens)
            ends[index] = loop.time()
            clock.change_batch(-1)

        await asyncio.gather(*(request(index, *each) for index, each in enumerate(requests)))
        assert clock.batch == 0
        assert clock.tokens == pytest.approx(sum(tokens for _, tokens in requests), rel=1e-3)
        clock.close()
        return ends

    loop = JumpingLoop()
    try:
        measured = loop.run_until_complete(measure())
    finally:
        loop.close()
    assert measured == pytest.approx(_stepped(requests), rel=1e-3)


def _stepped(requests: list[tuple[int, int]]) -> list[float]:
    """When each request has its tokens, sharing steps in small slices of time."""
    left = [float(tokens) for _, tokens in requests]
    ends = [0.0] * len(requests)
    now_s = 0.0
    while any(each > 1e-9 for each in left):
        active = [i for i, (at_s, _) in enumerate(requests) if at_s <= now_s and left[i] > 1e-9]
        starts = [at_s for at_s, _ in requests if at_s > now_s]
        if not active:
            now_s = float(min(starts))
            continue
        finish_s = now_s + min(left[i] for i in active) * len(active)
        until_s = min([finish_s, *map(float, starts)])
        for i in active:
            left[i] -= (until_s - now_s) / len(active)
            if left[i] <= 1e-9:
                ends[i] = until_s
        now_s = until_s
    return ends


def test_nothing_here_brings_vllm_or_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, prfaas.serving.engines.synthetic.node, prfaas.serving.engines.command;"
        "sys.exit(any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ([], 1),
        (["--enforce-eager"], 1),
        (["--stream-interval", "64"], 64),
        (["--seed", "1", "--stream-interval=8", "--stream-interval", "9"], 9),
    ],
)
def test_stand_ins_take_vllms_stream_interval(arguments: list[str], tokens: int) -> None:
    assert stream_interval_of(arguments) == tokens


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_stream_interval_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(EngineError, match="--stream-interval"):
        stream_interval_of(["--stream-interval", value])
